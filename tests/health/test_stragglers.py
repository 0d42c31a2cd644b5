"""A rank that has become slow, or is slower than others at the same work, is named; uneven work is not slowness."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from health.watched import HERE, with_health
from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.build import build
from shardwright.train.health.run_health import RunHealth
from shardwright.train.health.stragglers import Straggler, Stragglers
from shardwright.train.train_step import train_step
from support.cases import my_tokens, small_job
from support.ranks import run_on_mesh


def looks(table: list[list[float]], peers: list[list[int]], share: float = 0.25) -> list[list[Straggler]]:
    stragglers = Stragglers(share, peers)
    return [stragglers.look(10 * i + 1, compute_s) for i, compute_s in enumerate(table)]


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4), st.floats(0, 0.1))
@settings(deadline=None)
def test_uneven_stages_with_noise_are_not_slow(seed: int, num_stages: int, num_replicas: int, noise: float) -> None:
    """Any stage may take as long as it likes."""
    rng = random.Random(seed)
    stage_s = [rng.uniform(0.1, 3.0) for _ in range(num_stages)]
    peers = [list(range(s * num_replicas, (s + 1) * num_replicas)) for s in range(num_stages)]
    table = [
        [stage_s[s] * (1 + rng.uniform(0, noise)) for s in range(num_stages) for _ in range(num_replicas)]
        for _ in range(12)
    ]
    assert looks(table, peers) == [[] for _ in table]


@given(st.integers(0, 7), st.floats(1.4, 10.0))
def test_a_rank_slower_than_its_peers_is_told_at_the_second_look(slow: int, factor: float) -> None:
    row = [factor if rank == slow else 1.0 for rank in range(8)]
    first, second, third = looks([row] * 3, [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert first == []
    for (result,) in (second, third):
        assert (result.rank, result.since_step) == (slow, 1)
        assert result.longer_than_others == pytest.approx(factor - 1)


def test_a_rank_alone_at_its_work_is_held_against_its_past() -> None:
    even, slow = [1.0, 2.0, 1.0, 1.0], [1.0, 4.0, 1.0, 1.0]
    results = looks([even] * 5 + [slow] * 3 + [even] * 3, [[0], [1], [2], [3]])
    assert [[s.rank for s in answer] for answer in results] == [[]] * 6 + [[1], [1]] + [[]] * 3
    assert results[6][0].since_step == 51
    assert results[6][0].longer_than_before == pytest.approx(1.0)
    assert "100 % longer than before, beside all others, since step 51" in results[6][0].sentence("rank 1")


def test_all_slower_is_nobodys_fault_and_a_recovery_neither() -> None:
    assert looks([[1.0, 1.0]] * 5 + [[3.0, 3.0]] * 5, [[0], [1]]) == [[]] * 10
    assert looks([[1.0, 5.0]] * 5 + [[1.0, 1.0]] * 5, [[0], [1]]) == [[]] * 10


def test_one_rank_or_no_share_says_nothing() -> None:
    assert looks([[1.0]] * 4, [[0]]) == [[]] * 4
    assert looks([[1.0, 9.0]] * 4, [[0, 1]], share=0.0) == [[]] * 4


def lines_of(mesh: Mesh, job: JobSpec, sleepy: int, num_steps: int) -> list[str]:
    """The lines of a run in which a rank sleeps after each forward, ten times as long as that took: ranks that share
    few cores with others are slow, too, but not so."""
    replica, lines = build(job, mesh), list[str]()
    health = RunHealth(replica, HERE)
    if mesh.rank == sleepy:
        stage = replica.stages[min(replica.stages)]
        began_s = [0.0]
        stage.register_forward_pre_hook(lambda *_: began_s.__setitem__(0, time.perf_counter()))
        stage.register_forward_hook(lambda *_: time.sleep(0.05 + 10 * (time.perf_counter() - began_s[0])))
    for step in range(num_steps):
        tokens = my_tokens(mesh, job, step)
        mesh.ledger.clear()
        start_s = time.perf_counter()
        result = train_step(replica, step, tokens, health.judge)
        compute_s = time.perf_counter() - start_s - sum(mesh.ledger.blocked_s().values())
        _, answer = health.after_span(step, [result], tokens)
        lines += answer + health.check_stragglers(step + 1, [compute_s])
    return lines


@pytest.mark.sampled(3)
@pytest.mark.processes
@pytest.mark.parametrize("plan", [{"dp": 2}, {"dp": 3, "batch": 6}, {"dp": 2, "pp": 2}])
def test_a_sleepy_rank_is_found(plan: dict[str, int]) -> None:
    job = with_health(small_job(**plan), slow_share=1.0)
    job = job.model_copy(update={"run": job.run.model_copy(update={"log_every": 4})})
    for lines in run_on_mesh(job, lines_of, job, 1, 8):
        assert len(lines) == 1
        assert lines[0].startswith("slow: rank 1 (")
        assert "since step 1" in lines[0]


@pytest.mark.processes
def test_none_is_found_in_an_undisturbed_run() -> None:
    """Ranks that share few cores, which others use too, are slow now and then; thirty times slower than another in the
    median of ten steps, and that twice in a row, they are not."""
    job = with_health(small_job(dp=2), slow_share=29.0)
    job = job.model_copy(update={"run": job.run.model_copy(update={"log_every": 10})})
    for lines in run_on_mesh(job, lines_of, job, -1, 40):
        assert lines == []
