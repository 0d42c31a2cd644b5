"""The plan as the cost model sees it, with a model's shape: degrees, nothing of how they are run.

A job becomes a `Run` (cost/from_job.py), and so does a row of published measurements: everything behind it reads only
this. It can say more than our runtime executes (fp4, experts that compute in fp8), because plans of others are
predicted too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np

from shardwright.config.context_facts import CONTEXT_METHODS
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import ModelShape
from shardwright.config.optimizer import ADAMW, OptimizerSpec
from shardwright.config.plan import layer_policies
from shardwright.config.rank_order import number_of, stage_block, stage_size
from shardwright.config.recompute_policy import WHOLE_LAYER, Policy
from shardwright.config.schedule_facts import SCHEDULES, ScheduleFacts
from shardwright.schedule.job_program import job_placement
from shardwright.sharding.groups import REPLICAS, WORLD, layout
from shardwright.sharding.stage_placement import vee
from shardwright.workload.arrays import Array, Numbers


@dataclass(frozen=True)
class PlanGrid:
    """The plan: degrees, what is sharded, the order of work and what is computed again.

    Each number may be an array of one length, with one entry a plan; what is not of type Numbers is one for all plans.
    `zero_ranks` replicas share one set of ZeRO's shards; 0 is all of them. `precision` is of the products: bf16,
    fp16, float32, fp8, mxfp8 or nvfp4. `gradient_bytes` and `reduce_bytes` are of a gradient that is added up and of
    one on its way, `moment_bytes` of each of the `optimizer`'s moments, 0 as the software has it; weight gradients and
    rows to experts are in fp8 where software does so, or it is asked for here; `bucket_bytes` of the parameters whose
    gradients travel together, 0 all.

    Where plans have several schedules, `schedule_number` has of each its place in SCHEDULES; -1 is `schedule`.
    `is_vee` where stages lie in a V though the schedule's name does not say so, as `auto` may lay them.
    `order_number` is the place of its order of axes in ORDERS (config/rank_order.py).

    `recompute` is none; full (each layer) or stage (all of a stage), from its input; names of plan.recompute_operators,
    in order of the alphabet with "+" between; and, of other frameworks, selective (the attention core where its scores
    are kept) and matmul (all but what attention and every second product give). `policies` has it by layer where it is
    not the same for all.
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
    layout: tuple[int, ...] = ()
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
    optimizer: OptimizerSpec = ADAMW
    float8_weight_gradients: bool = False
    float8_dispatch: bool = False
    bucket_bytes: float = 0.0
    reduce_each: str = "auto"

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight or an activation in forward and backward."""
        return 4 if self.precision == "float32" else 2

    @cached_property
    def orders(self) -> tuple[tuple[int, Numbers], ...]:
        """The orders of the plans, each with which of the plans have it."""
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
        """Neighbouring ranks of one stage, before those of the next."""
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
        """Ranks that share each expert's matrices: here `expert_tp` says it itself."""
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
        """The results of a function of each plan's schedule: it gets a name, and the index of its plans."""
        parts = [(index, formula(name, index)) for name, index in self.schedules]
        if len(parts) == 1:
            return parts[0][1]
        others = np.broadcast_shapes(*(part.shape[:-1] for _, part in parts))  # such as ranks
        table = np.empty((*others, len(self.schedule_number)))
        for index, part in parts:
            table[..., index] = part
        return table

    def of_schedules(self, fact: Callable[[ScheduleFacts], Any]) -> Numbers:
        """A fact of each plan's schedule, a number: one where all have the same schedule."""
        if len(self.schedules) == 1:
            return fact(SCHEDULES[self.schedules[0][0]])
        return schedule_column(self.schedule_number, fact)

    @cached_property
    def num_copies(self) -> Numbers:
        """How often a pipeline holds each stage."""
        return self.of_schedules(lambda facts: facts.num_copies)

    @property
    def trades_heads(self) -> bool:
        """True where the ranks of cp, if there are several, trade tokens for heads."""
        return CONTEXT_METHODS[self.cp_method].trades_heads

    @property
    def is_paired(self) -> bool:
        """True if another microbatch computes while tokens travel to experts and back. Plans of which some do so and
        some do not are no grid of a model with experts."""
        are_paired = {SCHEDULES[name].pairs for name, _ in self.schedules}
        assert len(are_paired) == 1, f"schedules with and without pairs are in one grid: {self.schedules}"
        return are_paired.pop()

    @cached_property
    def num_microbatches(self) -> Numbers:
        """Forward passes of one rank in a step. The last ones of a batch that does not divide are full here."""
        return np.maximum(1, -(-self.global_batch // (self.dp * self.microbatch)))

    @property
    def is_single(self) -> bool:
        """True if it is one plan, whose numbers are plain."""
        return all(np.ndim(getattr(self, name)) == 0 for name in _NUMBERS)

    def as_arrays(self) -> "PlanGrid":
        """The plan with every number an array, of one entry where it is one plan; itself where it is so."""
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
        """Some of the plans of one whose numbers are arrays."""
        return self.having({name: getattr(self, name)[index] for name in _NUMBERS})

    @property
    def words(self) -> tuple[Any, ...]:
        """The fields of a plan that are not numbers."""
        return _words(self)

    def having(self, values: dict[str, Any]) -> "PlanGrid":
        """The plan with other values of some fields. dataclasses.replace takes three times as long."""
        return PlanGrid(**{name: getattr(self, name) for name in _FIELDS} | values)


_FIELDS = tuple(f.name for f in fields(PlanGrid))
_NUMBERS = tuple(f.name for f in fields(PlanGrid) if f.type is Numbers)
_words = attrgetter(*(f.name for f in fields(PlanGrid) if f.type is not Numbers))


def stacked(grids: Sequence[PlanGrid]) -> PlanGrid:
    """Single plans that differ in numbers alone, as one of arrays."""
    numbers: dict[str, Any] = {name: np.array([getattr(grid, name) for grid in grids]) for name in _NUMBERS}
    return replace(grids[0], **numbers)


@dataclass(frozen=True)
class Topology:
    """The links between nodes: levels of switches as (devices below, share of bandwidth upward), or a torus's axes."""

    levels: tuple[tuple[int, float], ...] = ()
    torus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Run:
    """The question to the cost model: a model under a plan on devices, with a generation of software.

    Bandwidths are in bytes a second, of one device in one direction, as the maker states them; 0 is unknown. So are
    latencies, in seconds. `devices_per_node` devices share the links of a node, rack or torus. `job` is the job that it
    came from, if one, whose plan's numbers may be others than those of `grid`.
    """

    shape: ModelShape
    grid: PlanGrid
    device: str
    software: str
    devices_per_node: int
    node_bytes_per_s: float
    network_bytes_per_s: float
    node_latency_s: float = 0.0
    network_latency_s: float = 0.0
    topology: Topology = Topology()
    job: JobSpec | None = None

    @property
    def setting(self) -> tuple[Any, ...]:
        """All but the plan."""
        return _setting(self)


_setting = attrgetter(*(f.name for f in fields(Run) if f.name not in ("grid", "job")))


def schedule_column(numbers: Numbers, fact: Callable[[ScheduleFacts], Any]) -> Array:
    """A fact of the schedules with these numbers, which are their places in SCHEDULES."""
    column: Array = np.array([fact(facts) for facts in SCHEDULES.values()])[numbers]
    return column


def policy_name(policy: Policy) -> str:
    """The name of a job's policy in a PlanGrid."""
    return "full" if policy == WHOLE_LAYER else "+".join(sorted(policy)) or "none"


def _policies(job: JobSpec) -> tuple[str, ...]:
    """The policy of each layer of a job."""
    if job.plan.recompute == "stage":
        return ("stage",) * job.model.layers
    policies = layer_policies(job.plan, job.model.layers)
    names = {policy: policy_name(policy) for policy in set(policies)}
    return tuple(names[policy] for policy in policies)


def grid_of(job: JobSpec) -> PlanGrid:
    """The plan of a job. A budget for activations has been met before (account/budget.py)."""
    p, precision, policies = job.plan, job.precision, _policies(job)
    is_uniform = len(set(policies)) == 1
    return PlanGrid(
        dp=p.dp, tp=p.tp, pp=p.pp, cp=p.cp, ep=p.ep, expert_tp=p.expert_tp_size, virtual=p.stages_per_rank,
        schedule=p.schedule, is_vee=p.schedule == "auto" and job_placement(job) == vee(p.pp),
        order_number=number_of(p.order), sequence_parallel=p.sequence_parallel and p.tp > 1,
        zero=p.zero, zero_ranks=p.zero_ranks, microbatch=p.microbatch_size, global_batch=job.batch.global_batch_size,
        recompute=policies[0] if is_uniform else "mixed", policies=() if is_uniform else policies,
        precision=precision.product_number, layout=tuple(p.layout),
        cp_method=p.cp_method, dispatch=p.dispatch, extra_warmup=p.extra_warmup,
        offload_optimizer=p.offload_optimizer, offload_parameters=p.offload_parameters,
        offload_activations=p.offload_activations, compress=p.compress, compress_rank=p.compress_rank,
        compress_share=p.compress_share, gradient_bytes=precision.gradient_bytes,
        reduce_bytes=precision.reduce_bytes, moment_bytes=precision.moment_bytes, bucket_bytes=p.bucket_mib * 2**20,
        float8_weight_gradients=precision.float8_weight_gradients, float8_dispatch=precision.float8_dispatch,
        reduce_each=p.reduce_each, optimizer=job.optimizer,
    )  # fmt: skip
