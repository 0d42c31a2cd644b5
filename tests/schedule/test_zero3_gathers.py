"""Gathering parameters as a pass over programs: how often, how many at once, and a run in which nothing else works."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.pipeline.executor import PipelineExecutor
from shardwright.parallel.tensor.parameter import PlacedParameter, placed_parameters
from shardwright.parallel.zero.sharded_stage import ShardedStage
from shardwright.schedule.action import Kind
from shardwright.schedule.buffer_lifetimes import Buffer, peak
from shardwright.schedule.job_program import job_program
from shardwright.schedule.lowering.zero3_gathers import add_gathers
from shardwright.schedule.program_check import program_faults
from shardwright.schedule.schedule import Program
from shardwright.schedule.shape_program import forward_of
from shardwright.schedule.timing import Costs, play
from shardwright.simulate.timeline import make_timeline
from shardwright.simulate.waits import Cause
from shardwright.train.build import build
from shardwright.train.train_step import evaluate, train_step
from support.cases import made_up_tokens, shapes, small_job
from support.programs import training_program
from support.ranks import run_on_mesh

ASYNCHRONOUS = ("pipedream", "pipedream-2bw")
drained = shapes().filter(lambda shape: shape[0] not in ASYNCHRONOUS)
eighths = st.integers(0, 16).map(lambda n: n / 8)


def count(program: Program, kind: Kind) -> list[int]:
    return [sum(action.kind is kind for action in row) for row in program.ranks]


@settings(max_examples=40, deadline=None)
@given(drained, st.sampled_from(["none", "stage"]), eighths, eighths)
def test_any_program_with_gathers_is_right(shape: Any, recompute: Any, latency: float, gather: float) -> None:
    """And has two stages at a time at most: no rank of a named schedule with pairs holds more."""
    program = training_program(*shape, recompute=recompute, gathers=True)
    assert program_faults(program) == []
    assert program_faults(forward_of(program)) == []
    assert count(program, Kind.GATHER) == count(program, Kind.RELEASE)
    assert max(peak(program, Buffer.PARAMETERS)) <= 2
    costs = replace(
        Costs.uniform(program.num_stages, latency=latency),
        gather=(gather,) * program.num_stages,
        reduce=(gather,) * program.num_stages,
    )
    times = play(program, costs, num_steps=2)
    for row in make_timeline(program, times).ranks:
        assert row.kept[Buffer.PARAMETERS].most <= 2
        assert all(0 <= held <= 2 for _, held in row.kept[Buffer.PARAMETERS].count)
        starts = [span.start for span in row.spans if span.action.computes()]
        assert starts == sorted(starts)
        assert row.busy + sum(row.idle_by_cause().values()) == pytest.approx(times.makespan)
        there: dict[int, float] = {}
        for span in row.spans:
            if span.action.kind is Kind.GATHER:
                there[span.action.stage] = span.end
            for part in span.action.computes():
                assert part.kind is Kind.WEIGHT_GRAD or span.start >= there[part.stage]


@settings(max_examples=40, deadline=None)
@given(drained)
def test_it_adds_to_a_program_and_moves_reductions_alone(shape: Any) -> None:
    added = {Kind.GATHER, Kind.RELEASE, Kind.REDUCE}
    with_it, without = training_program(*shape, gathers=True), training_program(*shape)
    for own, reference in zip(with_it.ranks, without.ranks, strict=True):
        assert [a for a in own if a.kind not in added] == [a for a in reference if a.kind is not Kind.REDUCE]
    if with_it.placement.num_copies > 1:
        assert count(with_it, Kind.REDUCE) == count(without, Kind.REDUCE)


# --- how often ---


@pytest.mark.parametrize("name", ["sequential", "gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_a_rank_with_one_stage_gathers_it_once(name: str) -> None:
    """So it is whole for all of the step: sharding saves such a rank the optimizer's memory and no more."""
    program = training_program(name, 4, 12, gathers=True)
    assert count(program, Kind.GATHER) == count(program, Kind.REDUCE) == [1] * 4


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(1, 40), st.integers(2, 6))
def test_breadth_first_gathers_each_stage_once_a_direction(p: int, m: int, v: int) -> None:
    """There and back, but for the last chunk, where the rank turns round. Whatever m."""
    program = training_program("looped-bfs", p, m, v, gathers=True)
    assert count(program, Kind.GATHER) == [2 * v - 1] * p
    assert count(program, Kind.REDUCE) == [v] * p


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 8), st.integers(1, 6), st.integers(2, 4))
def test_interleaved_gathers_at_every_change_of_chunk(p: int, groups: int, v: int) -> None:
    """Megatron's order by formula: chunks of the k-th forward and backward, and 2(p - 1 - r) + (v - 1)p of warm-up."""
    m = p * groups
    program = training_program("interleaved-1f1b", p, m, v, gathers=True)
    for rank, gathers in enumerate(count(program, Kind.GATHER)):
        there = [k // p % v for k in range(m * v)]
        back = [v - 1 - chunk for chunk in there]
        warm = min(m * v, 2 * (p - 1 - rank) + (v - 1) * p)
        steady = [chunk for pair in zip(there[warm:], back, strict=False) for chunk in pair]
        chunks = there[:warm] + steady + back[m * v - warm :]
        assert gathers == 1 + sum(left != right for left, right in pairwise(chunks))
        assert groups == 1 or gathers > 2 * v - 1  # more than breadth-first, and more with every group


def test_counts_of_the_docs() -> None:
    assert count(training_program("interleaved-1f1b", 4, 8, 2, gathers=True), Kind.GATHER) == [11, 19, 13, 5]
    assert count(training_program("looped-bfs", 4, 8, 2, gathers=True), Kind.GATHER) == [3] * 4


def test_reads_like_this() -> None:
    """Two chunks on one rank: the next gather is issued before the last computation of a run, and travels under it."""
    assert training_program("looped-bfs", 1, 2, 2, gathers=True).text() == (
        "rank 0: 0G 0F0 1G 0F1 0L 1F0 1F1 1B0 0G 1B1 1L 1R 0B0 0B1 0L 0R S"
    )


def test_weight_gradients_need_no_parameters() -> None:
    """The last W of a rank come after its release, and the reduction waits for them."""
    assert training_program("zb-h1", 2, 2, gathers=True).text().splitlines()[1] == (
        "rank 1: 1RF0<0 1G 1F0 1RF1<0 1I0 1SB0>0 1F1 1I1 1L 1SB1>0 1W0 1W1 1R S"
    )


def test_versions_of_weights_can_not_be_gathered() -> None:
    for name in ASYNCHRONOUS:
        with pytest.raises(ValueError, match="keeps older versions of the weights"):
            add_gathers(training_program(name, 2, 4))


# --- how long ---


def test_a_gather_travels_under_the_computation_before() -> None:
    """Rank 0 of two chunks, F = 1, gather 1.5: the first is waited for, the second half a unit beyond 0F1."""
    program = training_program("looped-bfs", 1, 2, 2, gathers=True)
    costs = replace(Costs.uniform(2), gather=(1.5, 1.5), reduce=(0.25, 0.25))
    times = play(program, costs)
    start = {str(action): times.start[0][n] for n, action in enumerate(program.ranks[0])}
    assert start["0F0"] == 1.5
    assert start["1G"] == start["0F1"] == 2.5
    assert start["1F0"] == 4.0
    row = make_timeline(program, times).ranks[0]
    assert row.idle_by_cause()[Cause.COMMUNICATION] == 0.5 + 0.25  # and the last reduction, for the optimizer
    assert row.kept[Buffer.PARAMETERS].count[:4] == ((0.0, 1), (2.5, 2), (3.5, 1), (8.0, 2))


def test_the_next_step_gathers_what_the_optimizer_changed() -> None:
    program = training_program("1f1b", 1, 1, gathers=True)
    costs = replace(Costs.uniform(1), gather=(0.5,), step=2.0)
    times = play(program, costs, num_steps=2)
    assert [times.start[0][n] for n, action in enumerate(times.rows[0]) if action.kind is Kind.GATHER] == [0.0, 5.5]


# --- in a real run ---


class LostUnlessGathered:
    """A stage whose parameters are wiped out by L and come back with G. It records what it is told."""

    def __init__(self, shards: ShardedStage, parameters: list[PlacedParameter]) -> None:
        self._whole, self._parameters = shards, parameters
        self._shards = [p.detach().clone() for p in parameters]
        self.told: list[str] = []
        self._wipe()

    def _wipe(self) -> None:
        for parameter in self._parameters:
            parameter.data.fill_(torch.nan)

    def gather(self) -> None:
        self.told.append("G")
        for parameter, shard in zip(self._parameters, self._shards, strict=True):
            parameter.data.copy_(shard)

    def release(self) -> None:
        self.told.append("L")
        self._shards = [p.detach().clone() for p in self._parameters]
        self._wipe()

    def arm(self, is_last: bool, is_split: bool) -> None:
        self.told.append("arm")
        self._whole.arm(is_last, is_split)

    def reduce(self) -> None:
        self.told.append("R")
        self._whole.reduce()

    def wait(self) -> None:
        self._whole.wait()
        self.restore()

    def restore(self) -> None:
        for parameter, shard in zip(self._parameters, self._shards, strict=True):
            parameter.data.copy_(shard)

    def keep_as_shards(self) -> None:
        self._shards = [p.detach().clone() for p in self._parameters]
        self._wipe()

    def clear_gradients(self) -> None:
        self._whole.clear_gradients()

    def reduce_late(self) -> None:
        self._whole.reduce_late()

    def update(self, factor: float, rate: float) -> None:
        self._whole.update(factor, rate)


def train(mesh: Mesh, job: JobSpec, gathers: bool) -> tuple[list[float], list[torch.Tensor], list[str], Any]:
    """Two steps and an evaluation: losses, weights, actions of the last step, and what each stage's holder was told."""
    replica = build(job, mesh)
    parameters = {stage: list(placed_parameters(module).values()) for stage, module in replica.stages.items()}
    holders = {}
    if gathers:
        program = add_gathers(job_program(job))
        holders = {stage: LostUnlessGathered(replica.shards[stage], held) for stage, held in parameters.items()}
        executor = PipelineExecutor(dict(replica.stages), holders, mesh)
        replica = replace(
            replica, program=program, evaluation=forward_of(program), executor=executor, shards=holders  # type: ignore[arg-type]
        )  # fmt: skip
    losses = []
    for step in range(2):
        for holder in holders.values():
            holder.told.clear()
        losses.append(train_step(replica, step, made_up_tokens(job, step)).loss)
        for holder in holders.values():
            holder.keep_as_shards()
    answer = {stage: list(holder.told) for stage, holder in holders.items()}
    performed = [str(entry.action) for entry in replica.executor.performed]
    losses.append(evaluate(replica, made_up_tokens(job, 2)))
    for holder in holders.values():
        holder.restore()
    return losses, [p.detach().clone() for held in parameters.values() for p in held], performed, answer


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "looped-bfs", "zb-v", "dualpipev"])
@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_computes_the_same_where_parameters_are_lost_between(schedule: str, recompute: str) -> None:
    """One action outside of its gather would leave nothing but NaN. On one replica, so that R changes no gradient."""
    chunks = {"virtual_stages": 2} if schedule in ("interleaved-1f1b", "looped-bfs") else {}
    job = small_job(batch=6, pp=2, schedule=schedule, recompute=recompute, **chunks)
    program = add_gathers(job_program(job))
    results = run_on_mesh(job, train, job, True), run_on_mesh(job, train, job, False)
    for rank, (with_it, without) in enumerate(zip(*results, strict=True)):
        assert with_it[0] == without[0]
        assert all(torch.equal(left, right) for left, right in zip(with_it[1], without[1], strict=True))
        assert with_it[2] == [str(action) for action in program.ranks[rank]]
        for stage, answer in with_it[3].items():
            planned = [str(a.kind) for a in program.ranks[rank] if a.stage == stage and a.kind in "GLR"]
            assert [word for word in answer if word != "arm"] == planned
            assert answer.count("arm") == answer.count("R")
