"""Both passes of a step that is computed twice take kernels that add in one order, and no others do."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils import deterministic

from health.watched import watched_run, with_health
from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.precision import fused_operator
from shardwright.precision.fixed_order import in_any_order, in_fixed_order
from shardwright.train.health import repeated_step, run_health
from shardwright.train.health.repeated_step import GradientHashes
from support.cases import small_job
from support.ranks import run_on_mesh


def state() -> tuple[bool, bool, bool, str | None]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = state()
    yield
    assert state() == before


def test_a_device_is_asked_strictly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = state()
    with in_fixed_order(torch.device("cuda")):
        assert state() == (True, False, False, ":4096:8")  # attention's backward changes only where it is strict
        with in_any_order():
            assert state()[0] is False
        assert state()[:2] == (True, False)
    assert state() == before


def fail_in_fixed_order() -> None:
    with in_fixed_order(torch.device("cuda")):
        raise ZeroDivisionError


def test_it_ends_where_a_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = state()
    with pytest.raises(ZeroDivisionError):
        fail_in_fixed_order()
    assert state() == before


def test_what_the_user_asked_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before = state()
        with in_fixed_order(torch.device("cuda")):
            assert state() == (True, False, False, ":16:8")
        assert state() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_cpu_is_not_asked() -> None:
    before = state()
    with in_fixed_order(torch.device("cpu")):
        assert state() == before


def test_the_compiler_makes_its_kernels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(
        fused_operator, "compiled", lambda work: lambda *_: seen.append(torch.are_deterministic_algorithms_enabled())
    )
    with in_fixed_order(torch.device("cuda")):
        fused_operator.compute_at_once(lambda x: None, torch.zeros(1))
    assert seen == [False]


def orders_of_passes(mesh: Mesh, job: JobSpec, num_steps: int) -> list[bool]:
    """True for each look at gradients that was at a pass in a fixed order."""
    inside, seen = [False], list[bool]()

    @contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    class Hashes(GradientHashes):
        def __call__(self, *args: Any) -> None:
            seen.append(inside[0])
            super().__call__(*args)

    for module in (repeated_step, run_health):
        vars(module).update(in_fixed_order=entered, GradientHashes=Hashes)
    watched_run(mesh, job, num_steps)
    return [*seen, inside[0]]


def test_both_passes_have_one_order() -> None:
    job = with_health(small_job(), repeat_every=2)
    (seen,) = run_on_mesh(job, orders_of_passes, job, 2)
    *looks, after = seen
    assert looks and all(looks) and len(looks) % 2 == 0
    assert not after
