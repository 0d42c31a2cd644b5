"""What a layer keeps for its backward, tensor by tensor, and what it costs to compute it again.

This is what our runtime keeps (model/decoder.py), derived operator by operator as Korthikanti et al. 2022 (arXiv
2205.05198, section 4) derive theirs; docs/recompute.md sets the two side by side. A test compares it with what autograd
saves, to the byte.

Letters: S tokens of a sequence on a rank, B microbatch size, T = S x B, H hidden, N query heads, G key/value heads, D
head width, F inner width of the MLP, V vocabulary, t tensor-parallel degree. Sizes are bytes on one rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwright.spec.job import JobSpec
from shardwright.spec.plan import split_evenly
from shardwright.spec.recompute import LAYER, Policy

FLOAT32, INT32, INT64, BOOL = 4, 4, 8, 1

# Operations an element, roughly: what is elementwise is bound by memory, and counted so that nothing is free.
NORM_FLOPS, ACTIVATION_FLOPS = 6, 8


@dataclass(frozen=True)
class Work:
    """FLOPs, bytes read and written, and bytes of collectives' full tensors."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    communicated_bytes: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.moved_bytes + other.moved_bytes,
            self.communicated_bytes + other.communicated_bytes,
        )


@dataclass(frozen=True)
class Operator:
    """One operator of a layer: the tensors it takes, keeps for its backward and gives, and what running it takes."""

    name: str
    takes: str
    keeps: tuple[str, ...]
    gives: str
    work: Work


Region = tuple[Operator, ...]


@dataclass(frozen=True)
class Layer:
    """A layer on one rank, for one microbatch: the size of each tensor, and its two chains of operators.

    The last operator of a chain is the product whose output joins the residual stream. Between them stands the sum
    that makes "middle".
    """

    sizes: Mapping[str, int]
    attention: Region
    mlp: Region

    def kept(self, policy: Policy) -> dict[str, int]:
        """Bytes that are kept from the forward to the backward, by tensor."""
        if LAYER in policy:
            return {"input": self.sizes["input"]}
        names: dict[str, None] = {}
        for chain in (self.attention, self.mlp):
            follows_region = False
            for region in _runs(chain, policy):
                if region[0].name in policy:
                    names[region[0].takes] = None
                    follows_region = True
                    continue
                for operator in region:
                    # The product after a region keeps the region's input instead of its own.
                    names |= {} if follows_region else dict.fromkeys(operator.keeps)
                    follows_region = False
        return {name: self.sizes[name] for name in names}

    def kept_bytes(self, policy: Policy) -> int:
        """All that is kept."""
        return sum(self.kept(policy).values())

    def regions(self, policy: Policy) -> list[Region]:
        """What is computed again, each at a time of its own."""
        if LAYER in policy:
            return [self.attention + self.mlp[:-1]]
        return [run for chain in (self.attention, self.mlp) for run in _runs(chain, policy) if run[0].name in policy]

    def again_bytes(self, policy: Policy) -> int:
        """What is there in the backward besides what was kept: of the largest region, all that it makes again."""
        sizes = []
        for region in self.regions(policy):
            made = {name for operator in region for name in operator.keeps} | {region[-1].gives}
            sizes.append(sum(self.sizes[name] for name in made - {region[0].takes}))
        return max(sizes, default=0)

    def work_again(self, policy: Policy) -> Work:
        """What computing again takes."""
        return sum((operator.work for region in self.regions(policy) for operator in region), Work())

    def work(self) -> Work:
        """What the forward takes."""
        return sum((operator.work for operator in self.attention + self.mlp), Work())

    def deferred_bytes(self) -> int:
        """What is kept from I to W: input and output gradient of each product, whole along the sequence."""
        products = (self.attention[1], self.attention[-1], self.mlp[1], self.mlp[-1])
        return sum(self.sizes[f"whole {p.takes}"] + self.sizes[f"whole {p.gives}"] for p in products)


def _runs(chain: Region, policy: Policy) -> Iterator[Region]:
    """The chain, cut where recomputed and kept operators meet."""
    run: list[Operator] = []
    for operator in chain:
        if run and (operator.name in policy) != (run[-1].name in policy):
            yield tuple(run)
            run = []
        run.append(operator)
    yield tuple(run)


def layer_of(job: JobSpec) -> Layer:
    """Any layer of a job, on any rank, for one microbatch; they are all alike."""
    model, plan, element = job.model, job.plan, job.precision.compute_bytes
    tp, batch = plan.tp, plan.microbatch_size
    tokens = job.tokens_within * batch
    is_sharded = plan.sequence_parallel and tp > 1
    tokens_here = tokens // tp if is_sharded else tokens
    hidden, heads, kv_heads, width = model.hidden, model.heads // tp, model.num_kv_heads // tp, model.head_size
    qkv_width = (heads + 2 * kv_heads) * width
    inner = model.ffn_size // tp
    up_width = (2 if model.gated_mlp else 1) * inner
    # What attention sees: its tokens, or all of them of fewer heads, of which a group has its key and value at least.
    trades = plan.cp > 1 and plan.cp_method == "ulysses"
    seen = (tokens * plan.cp, heads // plan.cp, max(1, kv_heads // plan.cp)) if trades else (tokens, heads, kv_heads)
    tokens_seen, heads_seen, kv_seen = seen
    stream, whole_stream = element * tokens_here * hidden, element * tokens * hidden
    # RMSNorm keeps 1 / rms in float32; LayerNorm keeps mean and 1 / deviation, in the number type of x on a CPU.
    statistics = FLOAT32 * tokens_here if model.norm == "rmsnorm" else 2 * element * tokens_here
    sizes = {
        "input": stream, "attention statistics": statistics, "attention normal": stream,
        "qkv": element * tokens * qkv_width,
        "biased qkv": element * tokens * qkv_width,
        "traded qkv": element * tokens_seen * (heads_seen + 2 * kv_seen) * width,
        "query": element * tokens_seen * heads_seen * width,
        "key": element * tokens_seen * kv_seen * width,
        "value": element * tokens_seen * kv_seen * width,
        "attended before trade": element * tokens_seen * heads_seen * width,
        "attended": element * tokens * heads * width,
        "log-sum-exp": FLOAT32 * tokens_seen * heads_seen,
        "middle": stream, "mlp statistics": statistics, "mlp normal": stream,
        "up": element * tokens * up_width,
        "biased up": element * tokens * up_width,
        "inner": element * tokens * inner,
        "output": stream,
    }  # fmt: skip
    sizes |= {f"whole {name}": size for name, size in sizes.items()}
    sizes |= {f"whole {name}": whole_stream for name in ("attention normal", "middle", "mlp normal", "output")}

    whole_qkv = "traded qkv" if trades else "biased qkv" if model.bias else "qkv"
    if model.positions == "rotary":
        qkv_kept: tuple[str, ...] = ("query", "key", "value")
    elif heads_seen == kv_seen or kv_seen == 1:
        qkv_kept = (whole_qkv,)  # three views of it
    else:
        qkv_kept = (whole_qkv, "query")  # several queries of a key are copied side by side

    def product(rows: int, columns: int, gathered: int = 0, scattered: int = 0) -> Work:
        """T x rows times rows x columns."""
        moved = element * (tokens * rows + rows * columns + tokens * columns)
        # Under sequence parallel the input is gathered, else the output summed; one rank alone does neither.
        return Work(2.0 * tokens * rows * columns, moved, gathered if is_sharded else (scattered if tp > 1 else 0))

    def norm() -> Work:
        return Work(float(NORM_FLOPS * tokens_here * hidden), 2.0 * stream)

    attention_output = "attended before trade" if trades else "attended"
    rotary = 2 * (sizes["query"] + sizes["key"]) if model.positions == "rotary" else 0
    attended = Work(
        4.0 * tokens * model.sequence * heads * width,
        sizes["query"] + sizes["key"] + sizes["value"] + sizes["attended"] + rotary,
        context_bytes(job),
    )
    activated = Work(float(ACTIVATION_FLOPS * tokens * up_width), float(sizes["up"] + sizes["inner"]))
    leaving = product(heads * width, hidden, whole_stream, whole_stream)
    falling = product(inner, hidden, whole_stream, whole_stream)
    return Layer(
        sizes,
        attention=(
            Operator("norm", "input", ("input", "attention statistics"), "attention normal", norm()),
            Operator("qkv", "attention normal", ("attention normal",), "qkv", product(hidden, qkv_width, whole_stream)),
            Operator("attention", "qkv", (*qkv_kept, attention_output, "log-sum-exp"), "attended", attended),
            Operator("output", "attended", ("attended",), "middle", leaving),
        ),
        mlp=(
            Operator("norm", "middle", ("middle", "mlp statistics"), "mlp normal", norm()),
            Operator("up", "mlp normal", ("mlp normal",), "up", product(hidden, up_width, whole_stream)),
            Operator("activation", "up", ("biased up" if model.bias else "up",), "inner", activated),
            Operator("down", "inner", ("inner",), "output", falling),
        ),
    )


def context_bytes(job: JobSpec) -> int:
    """Bytes of the collectives over cp in the forward of one layer's attention, of one microbatch, as the ledger counts
    them: of the keys and values that a rank sends on, of all that are gathered, or of what is traded for the rest."""
    plan, model = job.plan, job.model
    if plan.cp == 1:
        return 0
    heads, kv_heads = model.heads // plan.tp, model.num_kv_heads // plan.tp
    head = job.precision.compute_bytes * job.tokens_within * plan.microbatch_size * model.head_size
    if plan.cp_method == "ulysses":
        return head * (2 * heads + 2 * max(kv_heads, plan.cp))
    return head * 2 * kv_heads * (plan.cp - 1 if plan.cp_method == "ring" else plan.cp)


def documents_kept(job: JobSpec) -> dict[str, int]:
    """What every stage keeps of a microbatch where documents are separate: of each token, the document it is in."""
    if not job.data.separate_documents:
        return {}
    # Zig-zag parts are put together anew; else they are a view of the numbers of all S + 1 tokens.
    tokens = job.model.sequence + (job.plan.cp == 1 or job.plan.cp_method == "ulysses")
    return {"documents": INT32 * tokens * job.plan.microbatch_size}


def embedding_kept(job: JobSpec) -> dict[str, int]:
    """What the first stage keeps besides its layers, of one microbatch. Token ids are the batch's, and there anyway,
    unless a rank's are picked from them or have lost their marks."""
    plan = job.plan
    tokens = job.tokens_within * plan.microbatch_size
    is_picked = plan.cp > 1 and plan.cp_method != "ulysses"
    kept: dict[str, int] = {}
    if plan.tp > 1 or is_picked:
        kept["rows"] = INT64 * tokens
    elif job.data.separate_documents:
        kept["rows"] = INT64 * job.model.sequence * plan.microbatch_size
    if plan.tp > 1:
        kept["rows elsewhere"] = BOOL * tokens
    if job.model.positions == "learned":
        kept["positions"] = INT64 * job.tokens_within
    return kept


def head_kept(job: JobSpec, tp_index: int = 0) -> dict[str, int]:
    """What the last stage keeps besides its layers, of one microbatch: the final norm's, the head's and the loss's."""
    model, plan = job.model, job.plan
    layer = layer_of(job)
    tokens = job.tokens_within * plan.microbatch_size
    first, end = split_evenly(model.vocab, plan.tp, tp_index)
    masked = {"targets that do not count": BOOL * tokens} if job.data.separate_documents else {}
    return masked | {
        "final input": layer.sizes["input"], "final statistics": layer.sizes["attention statistics"],
        "final normal": layer.sizes["attention normal"],
        "softmax": FLOAT32 * tokens * (end - first),
        "targets": INT64 * tokens, "targets elsewhere": BOOL * tokens,
    }  # fmt: skip


def head_deferred_bytes(job: JobSpec, tp_index: int = 0) -> int:
    """What the head keeps from I to W: its input, and the gradient of the logits."""
    first, end = split_evenly(job.model.vocab, job.plan.tp, tp_index)
    tokens, element = job.tokens_within * job.plan.microbatch_size, job.precision.compute_bytes
    return element * tokens * (job.model.hidden + end - first)
