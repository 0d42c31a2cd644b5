"""The memory account of a module of the user's own: state by unit, and the buffers that ZeRO borrows in a step.

State is exact to the byte. Borrowed buffers follow from the events of ZeRO (sharding/zero_events.py), replayed for a
module whose regions are computed one after the other, each once. Activations are unknown without a run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.config.job import JobSpec
from shardwright.memory.job_memory import unit_memory
from shardwright.memory.rank_state import UnitState, replicas_of
from shardwright.memory.sized_unit import MovedCounts, SizedUnit
from shardwright.sharding.buckets import bucket_elements, in_unit_order, unit_groups, unit_layout
from shardwright.sharding.buffer_pool import Loan, OneBuffer
from shardwright.sharding.memory_account import RankMemory
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.sharding.zero_events import Reductions, StageEvents


@dataclass(frozen=True)
class UnitAccount:
    """The account of one unit on a rank: the names of its parameters, the number of their elements, and its memory."""

    names: tuple[str, ...]
    num_elements: int
    memory: RankMemory


@dataclass(frozen=True)
class ModuleAccount:
    """The account of a module on a rank, by unit; `buffers_bytes` are the most bytes borrowed at once in a step."""

    units: tuple[UnitAccount, ...]
    buffers_bytes: int

    @property
    def memory(self) -> RankMemory:
        """The memory of a rank: the sum over units, and the borrowed buffers; without activations."""
        memories = [unit.memory for unit in self.units]
        return RankMemory(
            parameters_bytes=sum(memory.parameters_bytes for memory in memories),
            gradients_bytes=sum(memory.gradients_bytes for memory in memories),
            optimizer_bytes=sum(memory.optimizer_bytes for memory in memories),
            activations_bytes=0,
            buffers_bytes=self.buffers_bytes,
            host_bytes=sum(memory.host_bytes for memory in memories),
        )


def module_account(job: JobSpec, regions: Mapping[str, Sequence[ParameterShard]]) -> ModuleAccount:
    """The account of a module. `regions` has the parameters of each region, in the order of computation; the first
    region contains all others."""
    sharing = replicas_of(job.plan)
    bucket_size = bucket_elements(job.plan.bucket_mib, job.precision.compute_bytes)
    units = []
    for group in unit_groups(regions, [], lambda place: sharing.zero == 3, bucket_size, lambda place: place):
        places = tuple(in_unit_order(group, lambda place: place))
        units.append(UnitState(places, unit_layout(places, sharing.num_shards), False, sharing))
    counts = MovedCounts(job)
    module = _SizedModule(units, regions, counts)
    before = -1
    while before < counts.pool.peak_bytes:  # a step begins with the buffers that the step before left
        before = counts.pool.peak_bytes
        module.step()
    accounts = tuple(
        UnitAccount(
            tuple(place.name for place in unit.places),
            sum(place.num_elements for place in unit.places),
            unit_memory(job, unit),
        )
        for unit in units
    )
    return ModuleAccount(accounts, counts.pool.peak_bytes)


class _SizedModule(StageEvents[SizedUnit]):
    """A module whose passes consist only of events, those of parallel/zero/module_stage.py."""

    def __init__(
        self, states: Sequence[UnitState], regions: Mapping[str, Sequence[ParameterShard]], counts: MovedCounts
    ) -> None:
        units = [SizedUnit(state, counts) for state in states]
        for unit in units:
            unit.borrow_values_from(OneBuffer(lambda _: None, lambda _, __: None, counting=counts.pool))
        unit_of = {shard: unit for state, unit in zip(states, units, strict=True) for shard in state.places}
        units_in = {name: list(dict.fromkeys(unit_of[shard] for shard in shards)) for name, shards in regions.items()}
        self._names = list(regions)
        super().__init__(
            units,
            late=(),
            reductions=Reductions(),
            units_in=units_in,
            is_shared=any(state.replicas.num_ranks * state.replicas.num_copies > 1 for state in states),
            groups=[((number,), 0) for number in range(len(units))],
        )

    def _make_steps(self, number: int, scratch: Loan[None]) -> None:
        raise AssertionError("optimizers that look at whole matrices are refused for such modules")

    def step(self) -> None:
        """Replay a forward, a backward and an update."""
        root, *inner = self._names
        self.begin_forward(root)
        for name in inner:
            self.begin_forward(name)
            self.end_forward(name, has_backward=True)
        self.arm(is_last=True, is_split=False)
        self.begin_backward(root)
        for unit in self._units_in[root]:  # some of its parameters are used last, so their gradients arrive first
            unit.open()
        for name in reversed(inner):
            self.begin_backward(name)
            self._arrive(name)
            self.end_backward(name)
        self._arrive(root)
        self.reduce()
        for unit in self.units:
            unit.release()
        self.wait()
        self.update(1.0, 0.0)
        self.clear_gradients()

    def _arrive(self, name: str) -> None:
        for unit in self._units_in[name]:
            for _ in range(unit.sizes.num_parameters):
                unit.open()
                self.gradient_arrived(unit)
