"""The state that one rank holds, as units: the layouts of the flat buffers of parallel/zero/flat_unit.py.

Units, their order and their padding come from sharding/buckets.py, which the runtime uses too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from shardwright.config.job import JobSpec
from shardwright.config.kept_results import kept_by_identity
from shardwright.config.nf4_rows import WORD_BYTES
from shardwright.config.plan import PlanSpec
from shardwright.config.units import FLOAT32_BYTES
from shardwright.schedule.schedule import Program
from shardwright.sharding.buckets import bucket_elements, in_unit_order, unit_groups, unit_layout
from shardwright.sharding.flat_buffer import FlatLayout
from shardwright.sharding.groups import COPIES, SHARDS, axis_groups, zero_stage
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.sharding.stage_parameters import alike_stages, last_uses, stage_parameters
from shardwright.sharding.unit_update import UpdateGroup, Updates

UnitKey = tuple[int, int]  # (stage, number of the unit in it)


@dataclass(frozen=True)
class Replicas:
    """The division of the state of some parameters over replicas: `zero` is the stage of ZeRO that takes effect.

    `num_ranks` share one set of shards, and `num_copies` hold the same shard. `shards_axis` and `copies_axis` are their
    mesh axes. `index` is the rank's index among those that share shards, 0 if none do, and `tp_index` its index on its
    tensor-parallel line.
    """

    zero: int
    num_ranks: int
    num_copies: int
    shards_axis: str
    copies_axis: str
    index: int = 0
    tp_index: int = 0

    @property
    def num_shards(self) -> int:
        """The number of shards of the optimizer state: 1 if every replica holds all of it."""
        return self.num_ranks if self.zero else 1


@dataclass(frozen=True)
class UnitState:
    """Parameters that are gathered, reduced and updated together, in their order in the buffer. They are updated
    `by_matrix`, or each element by itself."""

    places: tuple[ParameterShard, ...]
    layout: FlatLayout
    is_late: bool
    replicas: Replicas
    by_matrix: bool = False

    @property
    def is_exact(self) -> bool:
        """True if its values are float32, whatever the compute type of the others."""
        return self.places[0].is_exact

    def value_bytes(self, compute_bytes: int) -> int:
        """Bytes of an element of its buffers of values, if those of the computation have `compute_bytes`."""
        if self.places[0].row_format:
            return WORD_BYTES
        return FLOAT32_BYTES if self.is_exact else compute_bytes

    @property
    def is_frozen(self) -> bool:
        """True if it has values alone, which no step changes."""
        return self.places[0].is_frozen


@dataclass(frozen=True)
class StageState:
    """The units of one stage on one rank.

    `regions` has the places of each region in the order of the layers, `units_in` the units whose values it needs.
    `own_gradient` is the number of elements of the table's second gradient, if the last stage uses the table on the
    same rank. `updates` are the units that are updated together. `further` are the regions of further tokens.
    `added_before` names, for a region, parameters that get a part of their gradient before those of the region. `like`
    is the stage whose units it has, but for their names.
    """

    stage: int
    like: int
    units: tuple[UnitState, ...]
    regions: dict[str, tuple[ParameterShard, ...]]
    units_in: dict[str, tuple[UnitKey, ...]]
    own_gradient: int
    updates: tuple[UpdateGroup, ...] = ()
    further: tuple[str, ...] = ()
    added_before: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def unit_of(self) -> dict[str, UnitKey]:
        """The unit of each parameter, by its name."""
        return {place.name: (self.stage, n) for n, unit in enumerate(self.units) for place in unit.places}

    def layers(self) -> list[tuple[ParameterShard, ...]]:
        """The places of each layer."""
        return [places for region, places in self.regions.items() if region.isdigit()]

    def at(self, stage: int) -> "StageState":
        """The state of another stage that has the same units."""
        units_in = {region: tuple((stage, n) for _, n in units) for region, units in self.units_in.items()}
        return self if stage == self.stage else replace(self, stage=stage, units_in=units_in)

    @property
    def num_elements(self) -> int:
        """The number of elements of all units, padding included."""
        return sum(unit.layout.size for unit in self.units)


def replicas_of(plan: PlanSpec, is_expert: bool = False, index: int = 0, tp_index: int = 0) -> Replicas:
    """The replicas that share the state of a stage, or of its experts, for the rank with these indices."""
    shards, copies = (axis_groups(plan, kind[is_expert]) for kind in (SHARDS, COPIES))
    zero = zero_stage(plan, is_expert)
    return Replicas(
        zero,
        shards.size,
        copies.size,
        shards.axis,
        copies.axis,
        index=index if zero else 0,
        tp_index=tp_index % (plan.expert_tp_size if is_expert else plan.tp),
    )


def shard_indices(plan: PlanSpec, rank: int) -> tuple[int, int]:
    """A rank's index among those that share shards: (of common parameters, of experts)."""
    lines = (axis_groups(plan, SHARDS[is_expert]).lines() for is_expert in (False, True))
    dense, experts = (next(line.index(rank) for line in kind_lines if rank in line) for kind_lines in lines)
    return dense, experts


def rank_state(
    job: JobSpec, program: Program, pp_rank: int, tp_index: int = 0, shards: tuple[int, int] = (0, 0)
) -> dict[int, StageState]:
    """The state of a pipeline rank, by stage, on one rank of its tensor-parallel group. `shards`: its
    `shard_indices`."""
    replicas = {is_expert: replicas_of(job.plan, is_expert, shards[is_expert], tp_index) for is_expert in (False, True)}
    return _rank_state(job, program, pp_rank, partial(_stage_state, job, replicas, tp_index))


def sized_state(job: JobSpec, program: Program, pp_rank: int, tp_index: int = 0) -> dict[int, StageState]:
    """The state of a pipeline rank as far as sizes need it: stages that are alike share their units, whose
    parameters have the names that they have in one of these stages."""
    alike = _alike_stages(job)
    if tp_index not in alike:
        alike[tp_index] = _AlikeStages(job, tp_index)
    return _rank_state(job, program, pp_rank, alike[tp_index].state)


class _AlikeStages:
    """The states of a job's stages, of which each is made once for all that are alike."""

    def __init__(self, job: JobSpec, tp_index: int) -> None:
        replicas = {is_expert: replicas_of(job.plan, is_expert, tp_index=tp_index) for is_expert in (False, True)}
        self._make = partial(_stage_state, job, replicas, tp_index)
        self._alike = alike_stages(job.model, job.plan)
        self._states: dict[tuple[int, bool], StageState] = {}

    def state(self, stage: int, shares_table: bool) -> StageState:
        """The state of a stage."""
        key = self._alike[stage], shares_table
        if key not in self._states:
            self._states[key] = self._make(stage, shares_table)
        return self._states[key].at(stage)


@partial(kept_by_identity, most=2)
def _alike_stages(job: JobSpec) -> dict[int, _AlikeStages]:
    """The stages that `sized_state` has made of a job, by tensor-parallel index."""
    return {}


def _rank_state(
    job: JobSpec, program: Program, pp_rank: int, stage_state: Callable[[int, bool], StageState]
) -> dict[int, StageState]:
    """The state of a pipeline rank, from that of a stage and whether the rank has both uses of the shared table."""
    stages, last_stage = program.placement.stages_of(pp_rank), program.num_stages - 1
    # A table with two uses on one rank is stored once, with two gradients.
    shares_table = job.model.shares_table and {0, last_stage} <= set(stages)
    states = {stage: stage_state(stage, shares_table) for stage in stages}
    if job.model.shares_table and last_stage in states:
        last_state = states[last_stage]
        table = (states[0] if shares_table else last_state).unit_of["embedding.weight"]
        units_with_table = {region: (*last_state.units_in[region], table) for region in last_uses(job.model)}
        units_in = {
            region: tuple(dict.fromkeys(units)) for region, units in (last_state.units_in | units_with_table).items()
        }
        states[last_stage] = replace(last_state, units_in=units_in)
    return states


def _stage_state(
    job: JobSpec, replicas: dict[bool, Replicas], tp_index: int, stage: int, shares_table: bool
) -> StageState:
    regions = stage_parameters(job.model, job.plan, stage, tp_index)
    own_gradient = 0
    if shares_table and "head" in regions:
        first_use = last_uses(job.model)[0]
        (table,) = (place for place in regions[first_use] if place.is_tied)
        own_gradient = 0 if table.is_frozen else table.num_elements
        regions[first_use].remove(table)
    late = [place for places in regions.values() for place in places if place.is_tied]
    numbers = map(str, range(job.model.layers, job.model.num_blocks))
    further = tuple(region for region in numbers if region in regions)
    bucket_size = bucket_elements(job.plan.bucket_mib, job.precision.compute_bytes)
    units, updates = [], Updates(job)
    for group in unit_groups(
        regions, late, lambda p: replicas[p.is_expert].zero == 3, bucket_size, lambda place: place, updates.is_by_matrix
    ):
        places, sharing = tuple(in_unit_order(group, lambda place: place)), replicas[group[0].is_expert]
        if places[0].is_frozen:  # values are shared only if they are gathered layer by layer
            sharing = replace(sharing, zero=3 if sharing.zero == 3 else 0)
        layout, by_matrix = unit_layout(places, sharing.num_shards), updates.is_by_matrix(places[0])
        is_late = not set(late).isdisjoint(places)
        units.append(UnitState(places, layout, is_late, sharing, by_matrix=by_matrix))
    number_of = {place.name: n for n, unit in enumerate(units) for place in unit.places}
    return StageState(
        stage=stage,
        like=stage,
        units=tuple(units),
        regions={region: tuple(places) for region, places in regions.items()},
        units_in={
            region: tuple(dict.fromkeys((stage, number_of[place.name]) for place in places))
            for region, places in regions.items()
        },
        own_gradient=own_gradient,
        updates=tuple(updates.groups([(unit.places, unit.layout) for unit in units])),
        further=further,
        added_before=_added_before(job, regions, further),
    )


def _added_before(
    job: JobSpec, regions: dict[str, list[ParameterShard]], further: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    """The parameters to whose gradients losses of further tokens add before the main loss: the head and the table."""
    if not further:
        return {}
    tables = [place.name for place in regions[further[0]] if place.is_tied]
    head = [place.name for place in regions["head"] if place.name in ("head.weight", "embedding.weight")]
    return dict.fromkeys(further[1:], tuple(tables)) | {"head": tuple(head)}
