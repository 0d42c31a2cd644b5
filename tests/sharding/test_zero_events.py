"""When ZeRO moves what: the events of units and stages, played on names; and that nothing else decides it."""

import inspect
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwright
from shardwright.memory import module_account, zero_replay
from shardwright.parallel.zero.flat_unit import FlatUnit
from shardwright.parallel.zero.module_stage import ModuleStage, ModuleUnit
from shardwright.parallel.zero.sharded_stage import ShardedStage
from shardwright.sharding.buffer_pool import BufferPool, Loan
from shardwright.sharding.unit_sizes import UnitSizes
from shardwright.sharding.zero_events import MOST_REDUCING, Reductions, StageEvents, UnitEvents

SOURCE = Path(shardwright.__file__).parent
SIZE, SHARD = 12, 4


class Told(UnitEvents[None]):
    """A unit that writes down what happens to it."""

    def __init__(self, name: str, sizes: UnitSizes, pool: BufferPool[None], told: list[str]) -> None:
        super().__init__(sizes, pool)
        self.name, self.told = name, told

    def _say(self, what: str) -> None:
        self.told.append(f"{what} {self.name}")

    def _start_gather(self, values: Loan[None] | None) -> None:
        self._say("gather")

    def _finish_gather(self) -> None:
        self._say("gathered")

    def _drop_values(self) -> None:
        self._say("drop")

    def _open_gradients(self, gradients: Loan[None]) -> None:
        self._say("open")

    def _start_reduce(self, cast: Loan[None] | None, aside: Loan[None] | None) -> None:
        self._say("reduce" + " cast" * (cast is not None) + " aside" * (aside is not None))

    def _finish_reduce(self, has_sum: bool) -> None:
        self._say("add" if has_sum else "sum")

    def _drop_gradients(self) -> None:
        self._say("close")

    def _begin_update(self, gradients: Loan[None] | None, factor: float, rate: float) -> None:
        self._say("update" + " cast" * (gradients is not None))

    def _end_update(self) -> None:
        self._say("updated")


class ToldStage(StageEvents[Told]):
    """A stage that writes down when steps of matrices are made, and how much is borrowed by then."""

    def _make_steps(self, number: int, scratch: Loan[None]) -> None:
        unit = self.units[0]
        unit.told.append(f"steps {number} with {unit.pool.held_bytes}")


Stage = tuple[ToldStage, list[str], BufferPool[None]]


def stage_of(zero: int, num_units: int = 3, gradient_bytes: int = 4, reduce_bytes: int = 4) -> Stage:
    """A stage of regions "0", "1", ..., each with a unit of two parameters."""
    answer: list[str] = []
    pool = BufferPool[None](lambda num_bytes: None)
    sizes = UnitSizes(zero, SIZE, SHARD, 2, gradient_bytes, reduce_bytes, 4, num_parameters=2, num_put_off=1)
    units = [Told(str(n), sizes, pool, answer) for n in range(num_units)]
    regions = {unit.name: [unit] for unit in units}
    groups = [((number,), 0) for number in range(num_units)]
    return ToldStage(units, (), regions, is_shared=True, reductions=Reductions(), groups=groups), answer, pool


def backward(stage: ToldStage, gathers: bool = False) -> None:
    """A backward through all regions."""
    for unit in reversed(stage.units):
        if gathers:
            stage.begin_backward(unit.name)
        for _ in range(unit.sizes.num_parameters):
            unit.open()
            stage.gradient_arrived(unit)
        if gathers:
            stage.end_backward(unit.name)


def test_stage_3_by_layer() -> None:
    """The next layer's values come while one computes, and the last one's stay between forward and backward."""
    stage, answer, _ = stage_of(zero=3)
    stage.clear_gradients()
    for unit in stage.units:
        stage.begin_forward(unit.name)
        answer.append(f"F {unit.name}")
        stage.end_forward(unit.name, has_backward=True)
    assert answer == [
        "gather 0", "gathered 0", "gather 1", "F 0", "drop 0",
        "gathered 1", "gather 2", "F 1", "drop 1", "gathered 2", "F 2",
    ]  # fmt: skip
    answer.clear()
    stage.arm(is_last=True, is_split=False)
    backward(stage, gathers=True)
    stage.reduce()
    stage.wait()
    assert answer == [
        "gather 1", "open 2", "reduce 2", "drop 2",
        "gathered 1", "gather 0", "open 1", "reduce 1", "drop 1",
        "gathered 0", "open 0", "sum 2", "close 2", "reduce 0", "drop 0",
        "sum 1", "close 1", "sum 0", "close 0",
    ]  # fmt: skip
    answer.clear()
    stage.update(1.0, 0.1)
    assert answer == ["update 0", "updated 0", "update 1", "updated 1", "update 2", "updated 2"]


@pytest.mark.parametrize("zero", [1, 2])
def test_updated_values_are_gathered(zero: int) -> None:
    """The update of one unit hides the gather of the one before."""
    stage, answer, _ = stage_of(zero, num_units=2, gradient_bytes=2)
    stage.update(1.0, 0.1)
    assert answer == [
        "update cast 0", "updated 0", "gather 0", "update cast 1", "updated 1", "gather 1", "gathered 0", "gathered 1",
    ]  # fmt: skip


def test_units_that_are_updated_together() -> None:
    """Their gradients in float32 and the memory of their steps are there at once, and given back before others'."""
    answer, pool = list[str](), BufferPool[None](lambda num_bytes: None)
    units = [Told(str(n), UnitSizes(1, SIZE, SHARD, 2, 2, 2, 4, 1, 1), pool, answer) for n in range(3)]
    stage = ToldStage(units, (), {}, is_shared=True, reductions=Reductions(), groups=[((0, 2), 100), ((1,), 0)])
    for _ in range(2):
        answer.clear()
        stage.update(1.0, 0.1)
        assert answer == [
            "update cast 0", "update cast 2", f"steps 0 with {2 * 4 * SHARD + 100}",
            "updated 0", "gather 0", "updated 2", "gather 2",
            "update cast 1", "updated 1", "gather 1", "gathered 0", "gathered 1", "gathered 2",
        ]  # fmt: skip


def test_sums_are_added_aside() -> None:
    """The second reduction of a step adds to the shard, so its sum arrives beside it; and whole gradients wait."""
    stage, answer, _ = stage_of(zero=2, num_units=1)
    for is_last in (False, True):
        stage.arm(is_last, is_split=False)
        backward(stage)
        stage.reduce()
    stage.wait()
    assert answer == ["open 0", "reduce 0", "sum 0", "close 0", "open 0", "reduce aside 0", "add 0", "close 0"]
    stage, answer, _ = stage_of(zero=1, num_units=1)
    for is_last in (False, True):
        stage.arm(is_last, is_split=False)
        backward(stage)
        stage.reduce()
    assert answer == ["reduce 0"]


def test_stages_of_a_rank_reduce_in_turn() -> None:
    """Two reductions are under way on a rank, however many stages it has: more would hold memory."""
    reductions, answer = Reductions(), list[str]()
    pool, sizes = (
        BufferPool[None](lambda num_bytes: None),
        UnitSizes(2, SIZE, SHARD, 2, 4, 4, 4, num_parameters=1, num_put_off=1),
    )
    units = [Told(str(n), sizes, pool, answer) for n in range(4)]
    groups = [((0,), 0)]
    stages = [
        ToldStage([unit], (), {"0": [unit]}, is_shared=True, reductions=reductions, groups=groups) for unit in units
    ]
    for stage in stages:
        stage.arm(is_last=True, is_split=False)
        backward(stage)
        stage.reduce()
    assert answer == [
        "open 0", "reduce 0", "open 1", "reduce 1",
        "open 2", "sum 0", "close 0", "reduce 2", "open 3", "sum 1", "close 1", "reduce 3",
    ]  # fmt: skip
    stages[2].wait()
    assert answer[-2:] == ["sum 2", "close 2"]


def test_a_held_unit_stays() -> None:
    stage, answer, _ = stage_of(zero=3, num_units=1)
    stage.gather()
    stage.gather()
    stage.release()
    stage.begin_forward("0")
    stage.end_forward("0", has_backward=False)
    assert answer == ["gather 0", "gathered 0"]
    stage.release()
    assert answer[-1] == "drop 0"


@settings(max_examples=200, deadline=None)
@given(
    zero=st.sampled_from([0, 1, 2, 3]),
    num_units=st.integers(1, 6),
    number_bytes=st.sampled_from([(4, 4), (2, 2), (2, 4), (4, 2)]),
    microbatches=st.integers(1, 4),
    reduces_each=st.booleans(),
    without=st.sets(st.integers(0, 5)),
)
def test_every_step(
    zero: int, num_units: int, number_bytes: tuple[int, int], microbatches: int, reduces_each: bool, without: set[int]
) -> None:
    """Whatever gets no gradient: all is given back, each unit is summed as often as it should be and updated once, and
    no more than two reductions are under way."""
    stage, answer, pool = stage_of(zero, num_units, *number_bytes)
    for _ in range(2):
        answer.clear()
        stage.clear_gradients()
        for microbatch in range(microbatches):
            is_last = microbatch == microbatches - 1
            reduces = is_last or (reduces_each and zero >= 2)
            if reduces:
                stage.arm(is_last, is_split=False)
            for n, unit in reversed(list(enumerate(stage.units))):
                for _ in range(2 if n not in without else 0):
                    unit.open()
                    stage.gradient_arrived(unit)
            if reduces:
                stage.reduce()
        stage.wait()
        under_way = 0
        for event in answer:
            under_way += event.startswith("reduce") - event.startswith(("sum", "add"))
            assert 0 <= under_way <= MOST_REDUCING
        assert under_way == 0
        stage.update(1.0, 0.1)
        counts = Counter(event.split()[0] for event in answer)
        times = microbatches if reduces_each and zero >= 2 else 1
        assert counts["reduce"] == num_units * times
        assert counts["sum"] == num_units
        assert counts["add"] == num_units * (times - 1)
        assert counts["open"] == counts["close"] == (num_units * times if zero >= 2 else 0)
        assert counts["update"] == num_units
        reduced = [event.split()[-1] for event in answer if event.startswith("reduce")]
        assert reduced == [unit.name for unit in reversed(stage.units)] * times  # the same order on every replica
    # Nothing is lent any more: all that is held is free, and goes where more than ever is asked for.
    most = pool.peak_bytes + 1
    pool.borrow(most)
    assert pool.held_bytes == most


# --- there is one description ---


@pytest.mark.parametrize(
    ("events", "player"),
    [
        (UnitEvents, FlatUnit),
        (UnitEvents, zero_replay.SizedUnit),
        (StageEvents, ShardedStage),
        (StageEvents, zero_replay._SizedStage),
        (UnitEvents, ModuleUnit),
        (StageEvents, ModuleStage),
        (StageEvents, module_account._SizedModule),
    ],
)
def test_players_decide_nothing(events: type, player: type) -> None:
    """Engine and account say what an event does; when it happens is said by the base class alone."""
    deciding = {
        name
        for name, method in vars(events).items()
        if inspect.isfunction(method) and not getattr(method, "__isabstractmethod__", False) and name != "__init__"
    }
    overridden = deciding & set(vars(player))
    assert overridden <= {"clear_gradients"}, f"{player.__name__} says again when {sorted(overridden)} happens"


def test_nothing_else_borrows_or_counts_reductions() -> None:
    """Who borrows memory or counts what is being reduced has an order of events of his own."""
    tells = re.compile(r"\.(borrow|give_back)\(|MOST_REDUCING|\.holds [+-]=|\.num_missing\b|\b_has_sum\b")
    result = {
        str(path.relative_to(SOURCE)): line.strip()
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).as_posix() not in ("sharding/zero_events.py", "sharding/buffer_pool.py")
        for line in path.read_text().splitlines()
        if tells.search(line)
    }
    assert not result
