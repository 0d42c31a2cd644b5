"""The plan as the cost model sees it, with a model's shape: the degrees, and nothing of the execution.

A job becomes a `Run` (cost/from_job.py), and so does a row of published measurements: the whole cost model reads only
this. It can express more than our runtime executes (fp4, experts that compute in fp8), because plans of other systems
are predicted too.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import cache, cached_property
from operator import attrgetter
from typing import Any

import numpy as np

from shardwright.config.context_facts import CONTEXT_METHODS
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import ModelShape
from shardwright.config.number_types import NUMBER_TYPES
from shardwright.config.optimizer import ADAMW, OptimizerSpec
from shardwright.config.phrase import say
from shardwright.config.plan import layer_policies
from shardwright.config.rank_order import number_of, stage_block, stage_size
from shardwright.config.recompute_facts import RECOMPUTES
from shardwright.config.recompute_policy import OPERATORS, WHOLE_LAYER, Policy
from shardwright.config.schedule_facts import SCHEDULES, ScheduleFacts
from shardwright.layers.arrays import Array, Numbers
from shardwright.schedule.job_program import job_placement
from shardwright.sharding.groups import REPLICAS, WORLD, layout
from shardwright.sharding.stage_placement import vee


@dataclass(frozen=True)
class PlanGrid:
    """The plan: degrees, sharding, the order of work and recomputation.

    Each number may be an array of one length, with one entry per plan; fields that are not of type Numbers are the same
    for all plans. `zero_ranks` replicas share one set of ZeRO's shards; 0 is all of them. `precision` is the number
    type of the products, and `compute` that of everything else; "" is the same type, or bf16 beside narrow products.
    `gradient_bytes` and `reduce_bytes` are of an element of an accumulated gradient and of one in a reduction,
    `moment_bytes` of each of the `optimizer`'s moments; 0 is the software's default. With `has_masters` weights of 16
    bits have a copy in float32, which is updated. Weight gradients and rows to experts are in fp8 if the software does
    so, or if requested here. `bucket_bytes` are the bytes of the parameters whose gradients are reduced together; 0 is
    all.

    If plans have several schedules, `schedule_number` is the place of each plan's schedule in SCHEDULES; -1 is
    `schedule`. `is_vee` if stages lie in a V and the schedule's name does not say so, as `auto` may place them.
    `order_number` is the place of the order of axes in ORDERS (config/rank_order.py).
    If plans have several layouts, `layout_number` is the place of each plan's layout in `layouts`; -1 is `layout`.

    `recompute` is none; full (each layer) or stage (all of a stage), from its input; names of plan.recompute_operators,
    in alphabetical order with "+" between; and, of other frameworks, the others of LAYER_POLICIES. `policies` has it by
    layer if it is not the same for all.
    """

    dp: Numbers = 1
    tp: Numbers = 1
    pp: Numbers = 1
    cp: Numbers = 1
    ep: Numbers = 1
    expert_tp: Numbers = 1
    virtual: Numbers = 1
    schedule: str = "1f1b"
    schedule_number: Numbers = -1
    is_vee: bool = False
    order_number: Numbers = 0
    sequence_parallel: Numbers = False
    zero: Numbers = 0
    zero_ranks: Numbers = 0
    microbatch: Numbers = 1
    global_batch: Numbers = 1
    recompute: str = "none"
    policies: tuple[str, ...] = ()
    precision: str = "bf16"
    compute: str = ""
    layout: tuple[int, ...] = ()
    layouts: tuple[tuple[int, ...], ...] = ()
    layout_number: Numbers = -1
    cp_method: str = "ring"
    dispatch: str = "direct"
    extra_warmup: Numbers = 0
    offload_optimizer: Numbers = 0.0
    offload_parameters: Numbers = False
    offload_activations: Numbers = False
    compress: str = "none"
    compress_rank: int = 4
    compress_share: float = 0.01
    gradient_bytes: int = 0
    reduce_bytes: int = 0
    moment_bytes: int = 0
    has_masters: bool = True
    optimizer: OptimizerSpec = ADAMW
    float8_weight_gradients: bool = False
    float8_dispatch: bool = False
    bucket_bytes: float = 0.0
    reduce_each: str = "auto"

    @property
    def is_narrow(self) -> bool:
        """True if products are in a narrower number type than everything else."""
        return NUMBER_TYPES[self.precision].is_narrow

    @property
    def wide_number(self) -> str:
        """The number type of everything but products."""
        return self.compute or ("bf16" if self.is_narrow else self.precision)

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight or an activation in forward and backward."""
        return NUMBER_TYPES[self.wide_number].num_bytes

    def gathered_bytes(self, in_float8: bool) -> int:
        """Bytes of a gathered parameter of a layer: one `in_float8`, where products are in fp8."""
        return 1 if in_float8 and NUMBER_TYPES[self.precision].peak == "float8" else self.element_bytes

    @cached_property
    def orders(self) -> tuple[tuple[int, Numbers], ...]:
        """The orders of the plans, each with a mask of the plans that have it; 1 for all plans."""
        numbers = np.atleast_1d(self.order_number)
        present = np.flatnonzero(np.bincount(numbers)).tolist()
        if len(present) < 2:
            return tuple((number, 1) for number in present) or ((0, 1),)
        return tuple((number, numbers == number) for number in present)

    @cached_property
    def stage_ranks(self) -> Numbers:
        """Ranks that share the work of one stage."""
        return stage_size(self)

    @cached_property
    def block(self) -> Numbers:
        """Neighbouring ranks of one stage, before the ranks of the next stage."""
        return stage_block(self)

    @cached_property
    def world(self) -> Numbers:
        """Number of ranks."""
        return layout(self, WORLD).size

    @cached_property
    def replicas(self) -> Numbers:
        """Ranks that hold the same part of a layer and see different tokens."""
        return layout(self, REPLICAS[False]).size

    @property
    def expert_tp_size(self) -> Numbers:
        """Ranks that share each expert's matrices: here `expert_tp` itself."""
        return self.expert_tp

    @cached_property
    def schedules(self) -> tuple[tuple[str, Any], ...]:
        """The schedules of the plans, each with the index of the plans that have it."""
        numbers = self.schedule_number
        if np.max(numbers, initial=-1) < 0:
            return ((self.schedule, slice(None)),)
        present = np.flatnonzero(np.bincount(numbers)).tolist()
        if len(present) == 1:
            return ((SCHEDULES.names[present[0]], slice(None)),)
        return tuple((SCHEDULES.names[number], np.flatnonzero(numbers == number)) for number in present)

    def by_schedule(self, formula: Callable[[str, Any], Numbers]) -> Numbers:
        """The results of a function of each plan's schedule: it receives the name, and the index of its plans."""
        parts = [(index, formula(name, index)) for name, index in self.schedules]
        if len(parts) == 1:
            return parts[0][1]
        leading_shape = np.broadcast_shapes(*(part.shape[:-1] for _, part in parts))  # such as ranks
        table = np.empty((*leading_shape, len(self.schedule_number)))
        for index, part in parts:
            table[..., index] = part
        return table

    def of_schedules(self, fact: Callable[[ScheduleFacts], Any]) -> Numbers:
        """A fact of each plan's schedule, a number; a single one if all have the same schedule."""
        if len(self.schedules) == 1:
            return fact(SCHEDULES[self.schedules[0][0]])
        return schedule_column(self.schedule_number, fact)

    @cached_property
    def num_copies(self) -> Numbers:
        """Copies of each stage in a pipeline."""
        return self.of_schedules(lambda facts: facts.num_copies)

    @property
    def trades_heads(self) -> bool:
        """True if the ranks of cp, if there are several, trade tokens for heads."""
        return CONTEXT_METHODS[self.cp_method].trades_heads

    @property
    def is_paired(self) -> bool:
        """True if another microbatch computes while tokens travel to experts and back. All plans of a grid must agree
        on this."""
        are_paired = {SCHEDULES[name].pairs for name, _ in self.schedules}
        assert len(are_paired) == 1, f"schedules with and without pairs are in one grid: {self.schedules}"
        return are_paired.pop()

    @cached_property
    def num_microbatches(self) -> Numbers:
        """Forward passes of one rank in a step. The last microbatch of a batch that does not divide counts as full."""
        return np.maximum(1, -(-self.global_batch // (self.dp * self.microbatch)))

    @property
    def is_single(self) -> bool:
        """True for one plan, whose numbers are scalars."""
        return all(np.ndim(getattr(self, name)) == 0 for name in _NUMBERS)

    def as_arrays(self) -> "PlanGrid":
        """The plan with every number as an array, of one entry for one plan; itself if all are arrays."""
        if self._is_of_arrays:
            return self
        values = {name: np.asarray(getattr(self, name)) for name in _NUMBERS}
        sizes = {value.size for value in values.values() if value.ndim} or {1}
        like = min(sizes) if 0 in sizes else max(sizes)
        return self.having({n: v if v.shape == (like,) else np.full(like, v) for n, v in values.items()})

    @cached_property
    def _is_of_arrays(self) -> bool:
        shapes = [getattr(getattr(self, name), "shape", ()) for name in _NUMBERS]
        return shapes[0] != () and shapes.count(shapes[0]) == len(shapes)

    def at(self, index: Array) -> "PlanGrid":
        """Some of the plans of a grid whose numbers are arrays."""
        return self.having({name: getattr(self, name)[index] for name in _NUMBERS})

    @property
    def words(self) -> tuple[Any, ...]:
        """The fields of a plan that are not numbers."""
        return _words(self)

    def having(self, values: dict[str, Any]) -> "PlanGrid":
        """The plan with other values of some fields. It is filled without a call of the constructor, as
        dataclasses.replace takes four times as long, and a search asks for ten thousands."""
        grid = object.__new__(PlanGrid)
        vars(grid).update(zip(_FIELDS, _values(self), strict=True))
        vars(grid).update(values)
        return grid


_FIELDS = tuple(f.name for f in fields(PlanGrid))
_values = attrgetter(*_FIELDS)
_NUMBERS = tuple(f.name for f in fields(PlanGrid) if f.type is Numbers)
_words = attrgetter(*(f.name for f in fields(PlanGrid) if f.type is not Numbers))


def stacked(grids: Sequence[PlanGrid]) -> PlanGrid:
    """Single plans that differ only in numbers and layouts, as one grid of arrays."""
    values: dict[str, Any] = {name: np.array([getattr(grid, name) for grid in grids]) for name in _NUMBERS}
    layouts = tuple(dict.fromkeys(grid.layout for grid in grids))
    if len(layouts) > 1:
        values |= {"layouts": layouts, "layout_number": np.array([layouts.index(grid.layout) for grid in grids])}
    return grids[0].having(values)


@dataclass(frozen=True)
class Topology:
    """The links between nodes: levels of switches as (devices below, share of bandwidth upward), or a torus's axes."""

    levels: tuple[tuple[int, float], ...] = ()
    torus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Run:
    """The question to the cost model: a model under a plan on devices, with a generation of software.

    Bandwidths are in bytes per second, of one device in one direction, as the maker states them; latencies are in
    seconds; 0 is unknown. `network` is the kind of the network between nodes (config/network_facts.py).
    `devices_per_node` devices share the links of a node, rack or torus. `job` is the job that
    the run came from, if any; the numbers of its plan may differ from those of `grid`.
    """

    shape: ModelShape
    grid: PlanGrid
    _: KW_ONLY
    device: str
    software: str
    devices_per_node: int
    node_bytes_per_s: float
    network_bytes_per_s: float
    node_latency_s: float = 0.0
    network_latency_s: float = 0.0
    network: str = "unknown"
    topology: Topology = Topology()
    job: JobSpec | None = None

    @property
    def setting(self) -> tuple[Any, ...]:
        """Everything except the plan and the job."""
        return _setting(self)


_setting = attrgetter(*(f.name for f in fields(Run) if f.name not in ("grid", "job")))


def schedule_column(numbers: Numbers, fact: Callable[[ScheduleFacts], Any]) -> Array:
    """A fact of the schedules with these numbers, which are their places in SCHEDULES."""
    column: Array = np.array([fact(facts) for facts in SCHEDULES.values()])[numbers]
    return column


# Names of policies in a PlanGrid, beside those of operators with "+" between. Other frameworks compute again:
# selective, the attention core, if its scores are kept; matmul, all but the results of attention and of every second
# product; kernel, heads, latents and experts, the parts of these names (layers/chains.py).
LAYER_POLICIES = ("none", "full", "selective", "stage", "matmul", "kernel", "heads", "latents", "experts")


@cache
def named_operators(policy: str) -> Policy:
    """The operators in the name of a policy such as "attention+norm"; none for "none". ValueError if one is unknown."""
    operators = frozenset(policy.split("+")) - {"none"}
    if unknown := operators - {*OPERATORS}:
        raise ValueError(
            say(
                "there is no policy of recomputation {policy}: {names} is no operator",
                policy=repr(policy),
                names=tuple(sorted(unknown)),
            )
        )
    return operators


def policy_name(policy: Policy) -> str:
    """The name of a job's policy in a PlanGrid."""
    return "full" if policy == WHOLE_LAYER else "+".join(sorted(policy)) or "none"


def _policies(job: JobSpec) -> tuple[str, ...]:
    """The policy of each layer of a job."""
    if RECOMPUTES[job.plan.recompute].by_stage:
        return ("stage",) * job.model.layers
    policies = layer_policies(job.plan, job.model.layers)
    names = {policy: policy_name(policy) for policy in set(policies)}
    return tuple(names[policy] for policy in policies)


def grid_of(job: JobSpec) -> PlanGrid:
    """The plan of a job. A budget for activations must be resolved before (memory/budget.py)."""
    p, precision, policies = job.plan, job.precision, _policies(job)
    is_uniform = len(set(policies)) == 1
    return PlanGrid(
        dp=p.dp, tp=p.tp, pp=p.pp, cp=p.cp, ep=p.ep, expert_tp=p.expert_tp_size, virtual=p.stages_per_rank,
        schedule=p.schedule, is_vee=p.schedule == "auto" and job_placement(job) == vee(p.pp),
        order_number=number_of(p.order), sequence_parallel=p.sequence_parallel and p.tp > 1,
        zero=p.zero, zero_ranks=p.zero_ranks, microbatch=p.microbatch_size, global_batch=job.batch.global_batch_size,
        recompute=policies[0] if is_uniform else "mixed", policies=() if is_uniform else policies,
        precision=precision.product_number, compute=precision.compute, layout=tuple(p.layout),
        cp_method=p.cp_method, dispatch=p.dispatch, extra_warmup=p.extra_warmup,
        offload_optimizer=p.offload_optimizer, offload_parameters=p.offload_parameters,
        offload_activations=p.offload_activations, compress=p.compress, compress_rank=p.compress_rank,
        compress_share=p.compress_share, gradient_bytes=precision.gradient_bytes,
        reduce_bytes=precision.reduce_bytes, moment_bytes=precision.moment_bytes,
        has_masters=precision.master_number == "float32", bucket_bytes=p.bucket_mib * 2**20,
        float8_weight_gradients=precision.float8_weight_gradients, float8_dispatch=precision.float8_dispatch,
        reduce_each=p.reduce_each, optimizer=job.optimizer,
    )  # fmt: skip
