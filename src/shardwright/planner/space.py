"""All plans that a model, a batch and a cluster allow.

They come in three levels, for a search to prune: how ranks stand and what each computes (`degrees`); the words of a
plan and its virtual stages (`words_of`, `with_words`); and who holds which state (`with_sharing`). Legal is what
`spec/check.job_faults` and `schedule/job.plan_faults` accept. Of plans that are the same in all but name one stands for
all: a pipeline of one rank has no schedule, one rank of tp no sequence parallel, one of cp no method.

Left out: schedules that change the numbers (pipedream, pipedream-2bw) or that a solver makes (auto); `extra_warmup`;
layouts, which planner/stages.py finds for a plan; `budget` and `layers`, which choose what to compute again by layer;
shares of the optimizer state between none and all in host memory; hybrid sharding other than over a node.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from shardwright.planner.block import DEGREES, NUMBERS, Block, Column, Columns, Words, crossed, joined, taken
from shardwright.spec.base import PlanError
from shardwright.spec.job import JobSpec
from shardwright.spec.model import ModelSpec
from shardwright.spec.plan import STAGES_PER_RANK
from shardwright.spec.sequence import chunks_per_rank

SCHEDULES = (
    "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe", "dualpipev", "gpipe",
    "looped-bfs", "sequential",
)  # fmt: skip
CONTEXT_METHODS = ("ring", "all-gather", "ulysses")

# What is computed again, least first: nothing; the attention core (Korthikanti et al. 2022, arXiv 2205.05198, section
# 5); what is elementwise (norms and activations); all but the ends of each block; some layers; all.
_NOTHING = Words()
RECOMPUTE = (
    _NOTHING,
    Words(recompute="selective"),
    Words(recompute="selective", recompute_operators=("norm", "activation")),
    Words(recompute="selective", recompute_operators=("norm", "qkv", "attention", "up", "activation")),
    Words(recompute="full", recompute_every=4),
    Words(recompute="full", recompute_every=2),
    Words(recompute="full"),
    Words(recompute="full", offload_activations=True),
    Words(recompute="stage"),
)
_SEARCHED = (*(name for name in NUMBERS if name != "global_batch_size"), *Words.__dataclass_fields__)
_RANGES = ("microbatch_size", "tp", "pp", "cp", "dp", "ep", "virtual_stages")


@dataclass(frozen=True)
class Limits:
    """What the user fixes: fields of the plan that stay, and ranges of others, by name without section.

    `global_batch` is a range of sequences in a step, `float8` a recipe that may be chosen beside the job's precision.
    """

    keep: Mapping[str, Any] = field(default_factory=dict)
    between: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    global_batch: tuple[int, int] | None = None
    float8: str = "none"

    def __post_init__(self) -> None:
        faults = [
            f"plan.{name} is not searched, so it can't be kept; there are {', '.join(sorted(_SEARCHED))}"
            for name in self.keep
            if name not in _SEARCHED or name == "float8"
        ]
        faults += [
            f"plan.{name} has no range; there are {', '.join(sorted(_RANGES))}, and batch.global_batch_size"
            for name in self.between
            if name not in _RANGES
        ]
        if faults:
            raise PlanError("what the search may choose", faults)

    def allows(self, name: str, value: object) -> bool:
        """Whether a field may have a value."""
        if name in self.keep and self.keep[name] != value:
            return False
        low, high = self.between.get(name, (None, None))
        return low is None or high is None or low <= value <= high  # type: ignore[operator]

    def batches(self, given: int) -> list[int]:
        """Global batches to try: the job's, or the range's lower end doubled until its upper end."""
        if self.global_batch is None:
            return [given]
        low, high = self.global_batch
        doubled = [low << n for n in range(max(1, (high // low).bit_length()))]
        return sorted({size for size in (*doubled, high) if low <= size <= high})


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def degrees(job: JobSpec, limits: Limits, num_devices: int) -> Columns:
    """Every way to stand `num_devices` ranks: one row each, with DEGREES as columns. There may be none."""
    model = job.model
    rows: list[tuple[int, ...]] = []
    for batch in limits.batches(job.batch.global_batch_size):
        for tp in _tensor_degrees(model, num_devices):
            for pp in divisors(num_devices // tp):
                if pp > model.layers or not (limits.allows("tp", tp) and limits.allows("pp", pp)):
                    continue
                for cp in divisors(num_devices // (tp * pp)):
                    dp = num_devices // (tp * pp * cp)
                    if batch % dp or not (limits.allows("cp", cp) and limits.allows("dp", dp)):
                        continue
                    if cp > 1 and not any(_context_allows(model, m, tp, cp) for m in CONTEXT_METHODS):
                        continue
                    folds = list(_foldings(job, limits, dp * cp, tp))
                    sizes = [size for size in divisors(batch // dp) if limits.allows("microbatch_size", size)]
                    rows += [
                        (batch, tp, pp, cp, dp, ep, etp, size, is_sequence)
                        for (ep, etp, is_sequence), size in product(folds, sizes)
                        if not (is_sequence and model.sequence // cp % tp)
                    ]
    table = np.array(rows, dtype=np.int64).reshape(-1, len(DEGREES))
    columns: Columns = {name: table[:, index] for index, name in enumerate(DEGREES)}
    columns["sequence_parallel"] = columns["sequence_parallel"].astype(bool)
    return columns


def _tensor_degrees(model: ModelSpec, num_devices: int) -> list[int]:
    shared = math.gcd(model.heads, model.num_kv_heads, model.ffn_size, num_devices)
    if model.moe.experts:
        shared = math.gcd(shared, model.moe.shared_size(model.ffn_size) or shared)
    return [tp for tp in divisors(shared) if tp <= model.vocab]


def _context_allows(model: ModelSpec, method: str, tp: int, cp: int) -> bool:
    """Whether a method can cut the sequence over cp ranks (spec/check_context.py)."""
    if model.sequence % (chunks_per_rank(method) * cp):  # type: ignore[arg-type]
        return False
    if method != "ulysses":
        return True
    heads, kv_heads = model.heads // tp, model.num_kv_heads // tp
    return not model.is_latent and heads % cp == 0 and (kv_heads % cp == 0 or cp % kv_heads == 0)


def _foldings(job: JobSpec, limits: Limits, replicas: int, tp: int) -> Iterator[tuple[int, int, bool]]:
    """(ep, expert_tp, sequence parallel) that a stage of `replicas` x `tp` ranks admits."""
    moe, ffn = job.model.moe, job.model.ffn_size
    for is_sequence in (False, True) if tp > 1 else (False,):
        if not limits.allows("sequence_parallel", is_sequence):
            continue
        if not moe.experts:
            if limits.allows("ep", 1):
                yield 1, tp, is_sequence
            continue
        for expert_tp in sorted({1, tp}):
            if (expert_tp < tp and not is_sequence) or moe.ffn_size(ffn) % expert_tp:
                continue
            if not (limits.allows("expert_tp", expert_tp) or (expert_tp == tp and limits.allows("expert_tp", 0))):
                continue
            for ep in divisors(math.gcd(moe.experts, replicas * tp // expert_tp)):
                if limits.allows("ep", ep):
                    yield ep, expert_tp, is_sequence


def words_of(job: JobSpec, limits: Limits, columns: Columns) -> list[Words]:
    """All combinations of words that some row can use, with the dearest recomputation last."""
    precisions = sorted({job.precision.float8, limits.float8}, key=lambda name: name != job.precision.float8)
    found = []
    for again, schedule, method, dispatch, float8 in product(
        RECOMPUTE,
        SCHEDULES if (columns["pp"] > 1).any() else ("1f1b",),
        CONTEXT_METHODS if (columns["cp"] > 1).any() else ("ring",),
        ("direct", "node-aware") if (columns["ep"] > 1).any() else ("direct",),
        precisions,
    ):
        words = Words(
            schedule, again.recompute, again.recompute_operators, again.recompute_every, again.offload_activations,
            method, dispatch, float8,
        )  # fmt: skip
        if all(limits.allows(name, _as_given(getattr(words, name))) for name in Words.__dataclass_fields__):
            found.append(words)
    return found


def _as_given(value: object) -> object:
    """Tuples as the lists that TOML has."""
    return list(value) if isinstance(value, tuple) else value


def with_words(job: JobSpec, limits: Limits, columns: Columns, words: Words) -> Block:
    """The rows that admit the words, each with every number of virtual stages that they allow, and nothing sharded."""
    rows = taken(columns, _admits(job, columns, words))
    pieces = STAGES_PER_RANK.get(words.schedule, 1)
    most = job.model.layers // rows["pp"]
    if pieces:
        rows = taken(rows, most >= pieces)
        rows["virtual_stages"] = np.ones_like(rows["dp"])
        if not limits.allows("virtual_stages", 1) and not limits.allows("virtual_stages", pieces):
            rows = taken(rows, np.zeros(len(rows["dp"]), dtype=bool))
    else:
        # range(2, most + 1) of each row, one below the other.
        count = np.maximum(most - 1, 0)
        rows = taken(rows, np.repeat(np.arange(len(most)), count))
        ends = np.cumsum(count)
        rows["virtual_stages"] = 2 + np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - count, count)
        low, high = limits.between.get("virtual_stages", (2, job.model.layers))
        given = limits.keep.get("virtual_stages")
        low, high = (low, high) if given is None else (given, given)
        rows = taken(rows, (low <= rows["virtual_stages"]) & (rows["virtual_stages"] <= high))
    for name in ("zero", "zero_ranks", "offload_optimizer"):
        rows[name] = np.zeros_like(rows["dp"])
    rows["offload_parameters"] = np.zeros(len(rows["dp"]), dtype=bool)
    return Block(words, rows)


def _admits(job: JobSpec, columns: Columns, words: Words) -> Column:
    """Mask of the rows whose degrees go with the words."""
    model, pp, cp, tp = job.model, columns["pp"], columns["cp"], columns["tp"]
    num_microbatches = columns["global_batch_size"] // (columns["dp"] * columns["microbatch_size"])
    mask = (pp > 1) | (words.schedule == "1f1b")
    if words.schedule == "dualpipe":
        mask &= (pp % 2 == 0) & (num_microbatches >= 2 * pp) & (num_microbatches % 2 == 0)
    if words.schedule == "dualpipev":
        mask &= num_microbatches >= 2 * pp
    if words.cp_method == "ulysses" and model.is_latent:
        mask &= False
    elif words.cp_method == "ulysses":
        heads, kv_heads = model.heads // tp, model.num_kv_heads // tp
        mask &= (
            (model.sequence % cp == 0) & (heads % cp == 0) & ((kv_heads % cp == 0) | (cp % kv_heads == 0)) & (cp > 1)
        )
    else:
        mask &= ((cp > 1) & (model.sequence % (2 * cp) == 0)) | ((cp == 1) & (words.cp_method == "ring"))
    if words.dispatch == "node-aware":
        node, span = job.cluster.devices_per_node, columns["ep"] * columns["expert_tp"]
        crosses = (span % node == 0) & (node % columns["expert_tp"] == 0) & (span > node) if node else False
        mask &= (columns["ep"] > 1) & crosses
    return mask


def with_sharing(job: JobSpec, limits: Limits, block: Block) -> Block:
    """Each plan of a block with every ZeRO stage, hybrid sharding within a node, and offload of state."""
    columns = {name: block.columns[name] for name in (*DEGREES, "virtual_stages")}
    choices = sharing_choices(limits)
    rows = crossed(columns, {name: np.array([choice[i] for choice in choices]) for i, name in enumerate(_CHOICE)})
    hybrid, zero = rows.pop("hybrid"), rows["zero"]
    of_node = job.cluster.devices_per_node // rows["tp"]
    kept = limits.keep.get("zero_ranks", 0)
    size = np.full_like(of_node, kept) if kept else of_node
    replicas = rows["dp"] * rows["cp"]
    rows["zero_ranks"] = np.where(hybrid, size, 0)
    is_cut = (zero > 0) & (size > 1) & (size < replicas) & (replicas % np.maximum(size, 1) == 0)
    mask = ~hybrid | (is_cut & (block.words.schedule != "dualpipe"))
    return Block(block.words, taken(rows, mask))


_CHOICE = ("zero", "hybrid", "offload_optimizer", "offload_parameters")


def sharing_choices(limits: Limits) -> list[tuple[int, bool, float, bool]]:
    """(zero, whether over neighbours alone, share of the optimizer state offloaded, parameters offloaded)."""
    kept = limits.keep.get("zero_ranks")
    shares = sorted({0.0, 1.0} if "offload_optimizer" not in limits.keep else {float(limits.keep["offload_optimizer"])})
    return [
        (zero, hybrid, share, parameters)
        for zero, hybrid, share, parameters in product((0, 1, 2, 3), (False, True), shares, (False, True))
        if limits.allows("zero", zero) and limits.allows("offload_parameters", parameters)
        if (zero or not hybrid) and (zero == 3 or not parameters) and (kept is None or bool(kept) == hybrid)
    ]


def all_plans(job: JobSpec, limits: Limits, num_devices: int) -> list[Block]:
    """The whole space, a block for each combination of words. For small spaces, and for counting nothing is priced."""
    columns = degrees(job, limits, num_devices)
    blocks = [with_words(job, limits, columns, words) for words in words_of(job, limits, columns)]
    return [with_sharing(job, limits, block) for block in blocks if len(block)]


def num_plans(job: JobSpec, limits: Limits, columns: Columns) -> int:
    """Plans of the space, without making them."""
    choices = sharing_choices(limits)
    plain = sum(not hybrid for _, hybrid, _, _ in choices)
    of_node = np.maximum(limits.keep.get("zero_ranks", 0) or job.cluster.devices_per_node // columns["tp"], 1)
    replicas = columns["dp"] * columns["cp"]
    is_cut = (of_node > 1) & (of_node < replicas) & (replicas % of_node == 0)
    total = 0
    layers = job.model.layers
    low, high = limits.between.get("virtual_stages", (2, layers))
    if "virtual_stages" in limits.keep:
        low = high = limits.keep["virtual_stages"]
    for words in words_of(job, limits, columns):
        pieces = STAGES_PER_RANK.get(words.schedule, 1)
        most = layers // columns["pp"]
        if pieces:
            fits = limits.allows("virtual_stages", 1) or limits.allows("virtual_stages", pieces)
            stages = (most >= pieces) & fits
        else:
            stages = np.maximum(np.minimum(most, high) - max(low, 2) + 1, 0)
        sharing = plain + (len(choices) - plain) * (is_cut & (words.schedule != "dualpipe"))
        total += int((stages * sharing)[_admits(job, columns, words)].sum())
    return total


__all__ = ["Limits", "all_plans", "degrees", "joined", "num_plans", "with_sharing", "with_words", "words_of"]
