"""Pairs on a device with streams: on which stream operators are launched, in which order, and what waits for what."""

from itertools import pairwise
from unittest.mock import patch

import pytest
import torch

from shardwright.config.job import JobSpec
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.parallel.comm import process_groups
from shardwright.parallel.comm.compute_turns import IssueTurns
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.schedule.action import Kind
from shardwright.schedule.job_program import job_program
from shardwright.schedule.lowering.overlap_pairs import split_pairs
from shardwright.train.build import build
from shardwright.train.train_step import microbatches
from support.cases import made_up_tokens, small_job
from support.launch_log import PRODUCT, WAIT, Launched, launched
from support.ranks import run_on_mesh

TP = small_job(pp=2, tp=2, schedule="dualpipev", batch=6)
EP = small_job("mixtral", pp=2, dp=2, ep=2, schedule="dualpipev", batch=12)
JOBS = {
    "tp": TP,
    "ep": EP,
    "dualpipe": small_job(pp=2, tp=2, schedule="dualpipe", batch=8, sequence_parallel=True),
    "recomputed": small_job(pp=2, tp=2, schedule="dualpipev", batch=6, recompute="full"),
}


def pairs_of(lines: list[Launched]) -> list[list[Launched]]:
    """The launches of each pair: between the fork of two streams and their join."""
    results, begin = [], 0
    for at, line in enumerate(lines):
        if line.what == "fork" and " " in line.about:
            begin = at
        if line.what == "join" and " " in line.about:
            results.append(lines[begin + 1 : at])
    return results


@pytest.mark.parametrize("name", JOBS)
def test_each_wait_of_a_pass_hands_over_to_the_other(name: str) -> None:
    lines = launched(JOBS[name], 0)
    assert all(line.stage is not None for line in lines if line.what == PRODUCT), "a product is no stage's"
    pairs = pairs_of(lines)
    assert pairs
    for pair in pairs:
        stage_of = {line.beside: line.stage for line in pair}
        assert set(stage_of) == {"forward", "backward"} and len(set(stage_of.values())) == 2
        assert all(line.stage == stage_of[line.beside] for line in pair), "a pass left its stream"
        last_of = {line.beside: at for at, line in enumerate(pair)}
        for at, (line, following) in enumerate(pairwise(pair)):
            other_goes_on = any(end > at for beside, end in last_of.items() if beside != line.beside)
            gives_up = at == last_of[line.beside] or line.what == WAIT
            assert (following.beside != line.beside) == (other_goes_on and gives_up), f"{line} at {at}"


@pytest.mark.parametrize("name", JOBS)
def test_one_pass_of_a_pair_computes_while_the_other_waits(name: str) -> None:
    for pair in pairs_of(launched(JOBS[name], 0)):
        assert products_under_waits(pair) > 1


def products_under_waits(pair: list[Launched]) -> int:
    """Products that one pass launches between a wait of the other and what that launches next."""
    num = 0
    for at, line in enumerate(pair):
        if line.what == WAIT:
            for following in pair[at + 1 :]:
                if following.beside == line.beside:
                    break
                num += following.what == PRODUCT
    return num


@pytest.mark.parametrize("name", JOBS)
def test_ranks_of_a_group_launch_in_one_order(name: str) -> None:
    """So collectives of two communicators, which share a device, never wait for each other in a circle."""
    first, second = ([line for line in launched(JOBS[name], rank) if line.what == WAIT] for rank in (0, 1))
    assert first == second


def test_streams_begin_after_what_came_before_and_end_before_what_follows() -> None:
    begun: set[str] = set()
    for line in launched(TP, 0):
        if line.what == "fork":
            assert not begun
            begun = set(line.about.split())
        elif line.what == "join":
            assert set(line.about.split()) == begun
            begun = set()
        elif line.what == PRODUCT:
            assert str(line.stage) in begun
    # The turn of the V is on one rank: outputs and gradients pass from stream to stream there.
    handed = [(line.stage, line.about) for line in launched(TP, 2) if line.what == "handed on"]
    assert handed.count((1, "2")) == handed.count((2, "1")) == TP.num_microbatches
    assert len(handed) == 2 * TP.num_microbatches


def test_pairs_have_two_stages() -> None:
    """A stage has one stream: two passes of one could not be side by side."""
    num_pairs = 0
    for name in SCHEDULES:
        for p, m in ((2, 4), (4, 8), (4, 12)):
            try:
                program = job_program(small_job(pp=p, batch=2 * m, schedule=name))
            except ValueError:
                continue  # it wants another number of stages or microbatches
            pairs = [action.parts for row in program.ranks for action in row if action.kind is Kind.OVERLAP]
            num_pairs += len(pairs)
            assert all(one.stage != other.stage for one, other in pairs)
    assert num_pairs


def bits_of_pairs(mesh: Mesh, job: JobSpec) -> list[list[torch.Tensor]]:
    """Losses and gradients of a step with pairs whose passes hand over at each wait, and of one without pairs."""
    with patch.object(process_groups, "Turns", IssueTurns):
        mesh = process_groups.make_mesh(
            process_groups.MeshNeeds(job.plan, side_by_side=True), mesh.rank, mesh.device, 60.0, mesh.watch
        )
    replica = build(job, mesh)
    tokens = microbatches(made_up_tokens(job, 0), job.plan.microbatch_size)
    results = []
    for program in (replica.program, split_pairs(replica.program)):
        for shards in replica.shards.values():
            shards.clear_gradients()
        losses = replica.executor.run(program, tokens, lambda _: replica.finish_gradients())
        parameters = [p for stage in replica.stages.values() for p in placed_parameters(stage).values()]
        results.append([losses[i] for i in sorted(losses)] + [p.gradient.clone() for p in parameters])
    return results


def test_handing_over_at_each_wait_changes_no_bit() -> None:
    for side_by_side, in_turn in run_on_mesh(TP, bits_of_pairs, TP):
        assert all(torch.equal(one, other) for one, other in zip(side_by_side, in_turn, strict=True))
