"""All plans that a model, a batch and a cluster allow.

The space has three levels, so that a search can prune: the parallel degrees of the ranks (`degrees`); the variant of a
plan and its virtual stages (`variants_of`, `with_variant`); and the sharding of the state (`with_sharing`). Its plans
are legal: `config.checks.check.job_faults` and `schedule.job_program.plan_faults` accept them. Plans that differ only
in name appear once: a pipeline of one rank has no schedule, one rank of tp has no sequence parallel, one rank of cp has
no method.

Left out: schedules that change the numbers (pipedream, pipedream-2bw) or that a solver makes (auto); `extra_warmup`;
layouts, which planner/stages/partition_dp.py finds for a plan; `budget` and `layers`, which choose the recomputation
layer by layer; shares of the optimizer state in host memory between none and all; hybrid sharding other than over a
node; orders of the axes except the default and the one with stages inside a node, and the latter if every group crosses
the same links with both.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from shardwright.config.context_facts import CONTEXT_METHODS
from shardwright.config.divisors import divisors
from shardwright.config.job import JobSpec
from shardwright.config.model import ModelSpec
from shardwright.config.nf4_rows import BLOCK
from shardwright.config.plan import chunks_per_rank
from shardwright.config.rank_order import (
    DEFAULT_ORDER,
    ORDERS,
    STAGES_INSIDE,
    Degrees,
    full_order,
    inside_pipeline,
    number_of,
    of_stage_on_node,
)
from shardwright.config.recompute_facts import searched_recomputes
from shardwright.config.schedule_facts import SCHEDULES, searched
from shardwright.cost.from_job import run_of
from shardwright.layers.query import PlanGrid
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.plan_block import (
    DEGREES,
    SHARING,
    Column,
    Columns,
    PlanBlock,
    PlanVariant,
    cross,
    rank_grid,
    select,
)
from shardwright.sharding.groups import REPLICAS, is_hybrid, layout, of_stage


def recomputations() -> list[PlanVariant]:
    """The policies of recomputation with their settings, in the order in which a search tries them."""
    return [
        PlanVariant(recompute=facts.name, **setting) for facts in searched_recomputes() for setting in facts.searched
    ]


def degrees(job: JobSpec, constraints: Constraints) -> Columns:
    """All parallel degrees with one rank on each device: a row each, with DEGREES as columns. There may be none."""
    model, num_devices = job.model, job.cluster.num_devices
    rows: list[tuple[int, ...]] = []
    for batch in constraints.batches(job.batch.global_batch_size):
        shared = job.batch.with_size(batch).divisor  # divides all sizes of a batch that grows
        for tp in _tensor_degrees(model, num_devices):
            for pp in divisors(num_devices // tp):
                if pp > model.layers or not (constraints.allows("tp", tp) and constraints.allows("pp", pp)):
                    continue
                for cp in divisors(num_devices // (tp * pp)):
                    dp = num_devices // (tp * pp * cp)
                    if shared % dp or not (constraints.allows("cp", cp) and constraints.allows("dp", dp)):
                        continue
                    if cp > 1 and not any(_context_allows(model, method, tp, cp) for method in CONTEXT_METHODS):
                        continue
                    foldings = list(_foldings(job, constraints, dp * cp, tp))
                    sizes = [size for size in divisors(shared // dp) if constraints.allows("microbatch_size", size)]
                    rows += [
                        (batch, tp, pp, cp, dp, ep, etp, size, is_sequence)
                        for (ep, etp, is_sequence), size in product(foldings, sizes)
                        if not (is_sequence and model.sequence // cp % tp)
                    ]
    names = [name for name in DEGREES if name != "order"]
    table = np.array(rows, dtype=np.int64).reshape(-1, len(names))
    columns: Columns = {name: table[:, index] for index, name in enumerate(names)}
    columns["sequence_parallel"] = columns["sequence_parallel"].astype(bool)
    return _ordered(job, constraints, columns)


def _ordered(job: JobSpec, constraints: Constraints, rows: Columns) -> Columns:
    """The rows with each order of the axes; with a further order only rows whose groups then cross other links."""
    fixed_order = constraints.keep.get("order")
    orders = (
        (DEFAULT_ORDER, STAGES_INSIDE)
        if fixed_order is None and not job.cluster.parts
        else (fixed_order or DEFAULT_ORDER,)
    )
    parts = [rows | {"order": np.full_like(rows["dp"], number_of(full_order(order)))} for order in orders]
    plans = [rank_grid(part) for part in parts]
    masks = [has_blocks(plan) for plan in plans]
    for plan, mask in zip(plans[1:], masks[1:], strict=True):
        mask &= placement_differs(job, plans[0], plan)
    tables = [select(part, mask) for part, mask in zip(parts, masks, strict=True)]
    return {name: np.concatenate([part[name] for part in tables]) for name in tables[0]}


def has_blocks(plans: PlanGrid) -> Column:
    """Mask of the plans whose order cuts stages into blocks of whole lines (config/checks/check.py)."""
    ((number, _),) = plans.orders
    inside = ORDERS[number].inside
    if inside is None:
        return np.ones_like(plans.pp, dtype=bool)
    dense, experts = inside_pipeline(plans, inside)
    return (plans.pp == 1) | (np.maximum(dense, experts) % np.minimum(dense, experts) == 0)


def placement_differs(job: JobSpec, plans: Degrees, other_plans: Degrees) -> Column:
    """Mask of the plans with a group that crosses other links in `other_plans`: the same degrees in another order."""
    run = run_of(job)
    crosses = np.zeros(np.shape(plans.pp), dtype=bool)
    if run.topology.torus:
        return crosses | (plans.block != other_plans.block)
    for devices in (max(1, run.devices_per_node), *(devices for devices, _ in run.topology.levels)):
        of_stages = (np.minimum(of_stage(plan, devices), plan.stage_ranks) for plan in (plans, other_plans))
        of_pipelines = (np.clip(devices // plan.block, 1, plan.pp) for plan in (plans, other_plans))
        crosses |= np.not_equal(*of_stages) | np.not_equal(*of_pipelines)
    return crosses


def _tensor_degrees(model: ModelSpec, num_devices: int) -> list[int]:
    shared = math.gcd(model.heads, model.num_kv_heads, model.ffn_size, num_devices)
    if model.moe.experts:
        shared = math.gcd(shared, model.moe.shared_size(model.ffn_size) or shared)
    if model.adapter.row_format:  # parts of rows are whole blocks
        widths = [model.heads * model.head_size]
        widths += [model.ffn_size] if len(model.blocks_with_experts) < model.layers else []
        widths += [model.moe.shared_size(model.ffn_size)] if model.moe.experts else []
        shared = math.gcd(shared, *(width // BLOCK for width in widths))
    return [tp for tp in divisors(shared) if tp <= model.vocab]


def _context_allows(model: ModelSpec, method: str, tp: int, cp: int) -> bool:
    """True if a method can split the sequence over cp ranks (config/checks/check_context.py)."""
    if model.sequence % (chunks_per_rank(method) * cp):
        return False
    if not CONTEXT_METHODS[method].trades_heads:
        return True
    heads, kv_heads = model.heads // tp, model.num_kv_heads // tp
    return not model.is_latent and heads % cp == 0 and (kv_heads % cp == 0 or cp % kv_heads == 0)


def _foldings(job: JobSpec, constraints: Constraints, replicas: int, tp: int) -> Iterator[tuple[int, int, bool]]:
    """Yield each (ep, expert_tp, sequence parallel) that a stage of `replicas` x `tp` ranks admits."""
    moe, ffn = job.model.moe, job.model.ffn_size
    part = BLOCK if job.model.adapter.row_format else 1  # of the rows of a matrix
    for is_sequence in (False, True) if tp > 1 else (False,):
        if not constraints.allows("sequence_parallel", is_sequence):
            continue
        if not moe.experts:
            if constraints.allows("ep", 1) and _allows_expert_tp(constraints, tp, tp):
                yield 1, tp, is_sequence
            continue
        for expert_tp in sorted({1, tp}):
            if (expert_tp < tp and not is_sequence) or moe.ffn_size(ffn) // part % expert_tp:
                continue
            if not _allows_expert_tp(constraints, expert_tp, tp):
                continue
            for ep in divisors(math.gcd(moe.experts, replicas * tp // expert_tp)):
                if constraints.allows("ep", ep):
                    yield ep, expert_tp, is_sequence


def _allows_expert_tp(constraints: Constraints, expert_tp: int, tp: int) -> bool:
    """True if matrices of experts may be split over `expert_tp` ranks. In plans 0 stands for as many as tp."""
    return constraints.allows("expert_tp", expert_tp) or (expert_tp == tp and constraints.allows("expert_tp", 0))


def variants_of(job: JobSpec, constraints: Constraints, columns: Columns) -> list[PlanVariant]:
    """All variants that some row admits, with the most expensive recomputation last."""
    precisions = sorted({job.precision.float8, constraints.float8}, key=lambda name: name != job.precision.float8)
    variants = []
    schedules = searched() if (columns["pp"] > 1).any() else ("1f1b",)
    methods = CONTEXT_METHODS.names if (columns["cp"] > 1).any() else (method_of_one(constraints),)
    dispatches = ("direct", "node-aware") if (columns["ep"] > 1).any() else ("direct",)
    for policy, schedule, method, dispatch, float8 in product(
        (policy for policy in recomputations() if _allows_recompute(constraints, policy)),
        (name for name in schedules if constraints.allows_schedule(name, has_stages=False)),
        (name for name in methods if constraints.allows("cp_method", name)),
        (name for name in dispatches if constraints.allows("dispatch", name)),
        precisions,
    ):
        variants.append(replace(policy, schedule=schedule, cp_method=method, dispatch=dispatch, float8=float8))
    return variants


def _allows_recompute(constraints: Constraints, variant: PlanVariant) -> bool:
    """True if the constraints allow the recomputation of a variant. Its operators are a list in TOML."""
    operators = constraints.allows("recompute_operators", list(variant.recompute_operators))
    names = "recompute", "recompute_every", "offload_activations"
    return operators and all(constraints.allows(name, getattr(variant, name)) for name in names)


def with_variant(job: JobSpec, constraints: Constraints, columns: Columns, variant: PlanVariant) -> PlanBlock:
    """The rows that admit a variant, each with every number of virtual stages that it allows, and nothing sharded."""
    return PlanBlock(variant, with_stages(job, constraints, admitted(job, constraints, columns, variant), variant))


def with_stages(job: JobSpec, constraints: Constraints, rows: Columns, variant: PlanVariant) -> Columns:
    """The rows, which a variant admits, as those of `with_variant`. Only their pp is read: there are many times as many
    as before."""
    pieces = SCHEDULES[variant.schedule].stages_per_rank
    most = job.model.layers // rows["pp"]
    if pieces:
        rows = select(rows, most >= pieces)
        rows["virtual_stages"] = np.ones_like(rows["pp"])
        if not constraints.allows("virtual_stages", 1) and not constraints.allows("virtual_stages", pieces):
            rows = select(rows, np.zeros(len(rows["pp"]), dtype=bool))
    else:
        # The numbers of range(2, most + 1) for each row, concatenated.
        count = np.maximum(most - 1, 0)
        rows = select(rows, np.repeat(np.arange(len(most)), count))
        ends = np.cumsum(count)
        rows["virtual_stages"] = 2 + np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - count, count)
        low, high = constraints.between.get("virtual_stages", (2, job.model.layers))
        fixed_number = constraints.keep.get("virtual_stages")
        low, high = (low, high) if fixed_number is None else (fixed_number, fixed_number)
        rows = select(rows, (low <= rows["virtual_stages"]) & (rows["virtual_stages"] <= high))
    for name in ("zero", "zero_ranks", "offload_optimizer"):
        rows[name] = np.zeros_like(rows["pp"])
    rows["offload_parameters"] = np.zeros(len(rows["pp"]), dtype=bool)
    return rows


def admitted(job: JobSpec, constraints: Constraints, columns: Columns, variant: PlanVariant) -> Columns:
    """The rows whose degrees a variant admits."""
    mask = admits_schedule(columns, variant.schedule, constraints) & _admits_methods(job, constraints, columns, variant)
    for size in job.batch.sizes()[:2] if job.batch.grows else ():  # if these are legal, all further sizes are
        smaller = np.where(columns["global_batch_size"] == job.batch.global_batch_size, size, np.iinfo(np.int64).max)
        smaller = np.minimum(columns["global_batch_size"], smaller)
        mask &= admits_schedule(columns | {"global_batch_size": smaller}, variant.schedule, constraints)
    return select(columns, mask)


def admits_schedule(columns: Columns, schedule: str, constraints: Constraints) -> Column:
    """Mask of the plans that a schedule admits."""
    pp = columns["pp"]
    num_microbatches = columns["global_batch_size"] // (columns["dp"] * columns["microbatch_size"])
    if schedule == "1f1b":  # for pp = 1, too
        return pp > 0 if constraints.allows_schedule(schedule, has_stages=True) else pp == 1
    admitted: Column = (pp > 1) & SCHEDULES[schedule].admits(pp, num_microbatches)
    return admitted


def method_of_one(constraints: Constraints) -> str:
    """The method of context parallelism under which plans stand whose ranks share no sequence: ring, or the first that
    the software has."""
    methods = constraints.among.get("cp_method", ("ring",))
    return "ring" if "cp_method" in constraints.keep or "ring" in methods or not methods else str(methods[0])


def _admits_methods(job: JobSpec, constraints: Constraints, columns: Columns, variant: PlanVariant) -> Column:
    """Mask of the plans that the methods of context and expert parallelism admit."""
    model, cp, tp = job.model, columns["cp"], columns["tp"]
    mask = np.ones(len(cp), dtype=bool)
    facts = CONTEXT_METHODS[variant.cp_method]
    shares = (cp > 1) & (model.sequence % (facts.chunks * cp) == 0)
    if facts.trades_heads and model.is_latent:
        shares &= False
    elif facts.trades_heads:
        heads, kv_heads = model.heads // tp, model.num_kv_heads // tp
        shares &= (heads % cp == 0) & ((kv_heads % cp == 0) | (cp % kv_heads == 0))
    mask &= shares | ((cp == 1) & (variant.cp_method == method_of_one(constraints)))
    if variant.dispatch == "node-aware":
        per_node, span = job.cluster.devices_per_node, columns["ep"] * columns["expert_tp"]
        node = of_stage_on_node(rank_grid(columns), per_node) if per_node else np.zeros_like(span)
        is_even = (span % np.maximum(1, node) == 0) & (node % columns["expert_tp"] == 0)
        mask &= (columns["ep"] > 1) & (node > 0) & is_even & (span > node)
    return mask


def with_sharing(job: JobSpec, constraints: Constraints, block: PlanBlock) -> PlanBlock:
    """Each plan of a block with every ZeRO stage and hybrid sharding within a node, and the least offload allowed."""
    columns = {name: values for name, values in block.columns.items() if name not in SHARING}
    choices = _sharing_choices(constraints)
    least = _offload_choices(constraints)[0]
    stages, hybrids = np.array([zero for zero, _ in choices]), np.array([hybrid for _, hybrid in choices], bool)
    rows = cross(columns, {"zero": stages, "hybrid": hybrids})
    hybrid, zero = rows.pop("hybrid"), rows["zero"]
    size = hybrid_ranks(job, constraints, rows)
    rows["zero_ranks"] = np.where(hybrid, size, 0)
    rows["offload_optimizer"] = np.full(len(zero), least[0])
    rows["offload_parameters"] = np.full(len(zero), least[1])
    is_legal = ~hybrid | ((zero > 0) & (size > 0) & np.repeat(block.num_copies == 1, len(choices)))
    return PlanBlock(block.variant, select(rows, is_legal & ((zero == 3) | ~rows["offload_parameters"])))


def with_offload(constraints: Constraints, block: PlanBlock) -> PlanBlock:
    """Each plan of a block with every further choice of offload, without the least one."""
    choices = _offload_choices(constraints)[1:]
    columns = {name: values for name, values in block.columns.items() if not name.startswith("offload")}
    shares = np.array([share for share, _ in choices], float)
    parameters = np.array([is_offloaded for _, is_offloaded in choices], bool)
    rows = cross(columns, {"offload_optimizer": shares, "offload_parameters": parameters})
    return PlanBlock(block.variant, select(rows, (rows["zero"] == 3) | ~rows["offload_parameters"]))


def _sharing_choices(constraints: Constraints) -> list[tuple[int, bool]]:
    """The choices of (ZeRO stage, hybrid sharding or not)."""
    fixed_ranks = constraints.keep.get("zero_ranks")
    may_be_hybrid = any(constraints.among.get("zero_ranks", (1,)))
    return [
        (zero, hybrid)
        for zero, hybrid in product((0, 1, 2, 3), (False, True))
        if constraints.allows("zero", zero)
        and (zero or not hybrid)
        and (may_be_hybrid or not hybrid)
        and (fixed_ranks is None or bool(fixed_ranks) == hybrid)
    ]


def _offload_choices(constraints: Constraints) -> list[tuple[float, bool]]:
    """The choices of offload: (share of the optimizer state, parameters or not), least first."""
    fixed_share = constraints.keep.get("offload_optimizer")
    shares = (0.0, 1.0) if fixed_share is None else (float(fixed_share),)
    return [
        (share, parameters)
        for share, parameters in product(shares, (False, True))
        if constraints.allows("offload_optimizer", share) and constraints.allows("offload_parameters", parameters)
    ]


def offloaded_share(constraints: Constraints) -> float:
    """The share of the optimizer state that plans which offload it have in host memory; 0 if none may offload it."""
    return max(share for share, _ in _offload_choices(constraints))


def may_use_host(constraints: Constraints) -> bool:
    """True if some plan may keep optimizer state or parameters in host memory."""
    return any(share > 0 or parameters for share, parameters in _offload_choices(constraints))


def hybrid_ranks(job: JobSpec, constraints: Constraints, rows: Columns) -> Column:
    """The number of replicas that share one set of shards under hybrid sharding: those of a node, or as the user fixed;
    0 if there would be only one group."""
    fixed_ranks, plans = constraints.keep.get("zero_ranks", 0), rank_grid(rows)
    on_node = of_stage(plans, job.cluster.devices_per_node) // layout(plans, REPLICAS[False]).stride
    size = np.full_like(rows["tp"], fixed_ranks) if fixed_ranks else on_node
    replicas = rows["dp"] * rows["cp"]
    return np.where((size > 1) & is_hybrid(size, replicas), size, 0)


def count_by_variant(job: JobSpec, constraints: Constraints, columns: Columns) -> dict[PlanVariant, int]:
    """The number of plans of the space, by variant. The plans are not made."""
    sharing, offload = _sharing_choices(constraints), _offload_choices(constraints)
    ways = {
        hybrid: sum(
            len([1 for _, parameters in offload if zero == 3 or not parameters])
            for zero, is_hybrid in sharing
            if is_hybrid == hybrid
        )
        for hybrid in (False, True)
    }
    may_be_hybrid = hybrid_ranks(job, constraints, columns) > 0
    layers, most = job.model.layers, job.model.layers // columns["pp"]
    low, high = constraints.between.get("virtual_stages", (2, layers))
    if "virtual_stages" in constraints.keep:
        low = high = constraints.keep["virtual_stages"]
    virtual = np.maximum(np.minimum(most, high) - max(low, 2) + 1, 0)

    def plans(schedule: str) -> Column:
        pieces = SCHEDULES[schedule].stages_per_rank
        fits = constraints.allows("virtual_stages", 1) or constraints.allows("virtual_stages", pieces)
        stages = (most >= pieces) & fits if pieces else virtual
        num_sharings = ways[False] + ways[True] * (may_be_hybrid & (SCHEDULES[schedule].num_copies == 1))
        return stages * num_sharings * admits_schedule(columns, schedule, constraints)

    variants = variants_of(job, constraints, columns)
    methods = {(variant.cp_method, variant.dispatch): variant for variant in variants}
    masks = {names: _admits_methods(job, constraints, columns, variant) for names, variant in methods.items()}
    by_schedule = {schedule: plans(schedule) for schedule in {variant.schedule for variant in variants}}
    counts = {
        (schedule, *method_names): int(row_counts[mask].sum())
        for schedule, row_counts in by_schedule.items()
        for method_names, mask in masks.items()
    }
    return {variant: counts[variant.schedule, variant.cp_method, variant.dispatch] for variant in variants}


def evenly_spread(rows: Columns, number: int) -> Columns:
    """About so many of the rows with the least microbatch, evenly over them."""
    sizes = rows["microbatch_size"]
    least = np.flatnonzero(sizes == sizes.min())
    return select(rows, least[:: max(1, len(least) // number)])
