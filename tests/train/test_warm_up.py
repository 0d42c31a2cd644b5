"""Before the first step on CUDA every rank compiles its kernels and meets those that it will talk to."""

import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardwright.config.job import JobSpec
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.parallel.comm import collectives
from shardwright.parallel.comm.first_contact import axes, make_contact, ways
from shardwright.parallel.comm.process_groups import Mesh, StandIns
from shardwright.schedule.action import Kind
from shardwright.schedule.job_program import job_program
from shardwright.train import trainer
from shardwright.train.build import job_mesh
from shardwright.train.dry_steps import DrySteps
from shardwright.train.warm_up import BareTensor, KernelCall, KernelCalls, kernel_calls, warm_up
from support.cases import small_job
from support.ranks import run_on_mesh

JOBS = {
    "one rank": small_job(batch=2),
    "dp 2 x tp 2, sequence parallel": small_job(batch=4, dp=2, tp=2, sequence_parallel=True),
    "1f1b": small_job(batch=8, pp=4),
    "interleaved": small_job(batch=16, pp=2, virtual_stages=2, schedule="interleaved-1f1b"),
    "dualpipe": small_job(batch=16, pp=4, layers=4, schedule="dualpipe"),
    "pipedream": small_job(batch=4, pp=2, schedule="pipedream"),
    "experts": small_job("mixtral", batch=4, dp=2, ep=2),
    "gpt": small_job("gpt", batch=2),
}


def in_number(job: JobSpec, **precision: Any) -> JobSpec:
    return job.model_copy(update={"precision": job.precision.model_copy(update=precision)})


JOBS |= {
    "bf16": in_number(JOBS["one rank"], compute="bf16"),
    "fp8 of rows": in_number(JOBS["experts"], compute="bf16", float8="rowwise"),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_step_calls_no_kernel_that_was_not_called_before(name: str) -> None:
    """Each rank of a pipeline, and all of its step: what is compiled before is all that the step calls."""
    job = JOBS[name]
    for rank in range(0, job.plan.world, job.plan.world // job.plan.pp):
        steps = DrySteps(job, rank, "cuda")
        with KernelCalls() as noted:
            steps.run()
        assert set(kernel_calls(job, rank)) == set(noted.calls) != set()


@pytest.mark.parametrize("name", ["one rank", "experts", "gpt", "fp8 of rows"])
def test_each_call_can_be_made(name: str) -> None:
    """Layouts and other arguments are such as the operators take, of those that a CPU has too."""
    calls = [call for call in kernel_calls(JOBS[name], 0) if not call.operator.startswith("rms_norm")]
    assert calls
    for call in calls:
        call.make(torch.device("cpu"))


def test_few_microbatches_stand_for_many() -> None:
    """A dry step of a long batch would take as long as its microbatches."""
    few, many = (small_job(batch=batch, pp=4) for batch in (8, 256))
    calls = kernel_calls(many, 0)
    assert set(calls) == set(kernel_calls(few, 0))
    with KernelCalls() as noted, patch.object(DrySteps, "run", lambda steps: seen.append(steps.program)):
        seen: list[Any] = []
        kernel_calls(many, 0)
    assert [program.num_microbatches for program in seen] == [1] and not noted.calls


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "auto"])
def test_every_message_of_a_program_has_its_way(schedule: str) -> None:
    virtual = 1 if SCHEDULES[schedule].stages_per_rank else 2
    program = job_program(small_job(batch=16, pp=4, layers=8, schedule=schedule, virtual_stages=virtual))
    known = ways(program)
    assert known == sorted(set(known)) and known
    for rank, row in enumerate(program.ranks):
        for action in row:
            if action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                assert (action.kind is Kind.SEND_FORWARD, rank, action.peer) in known


def contact(mesh: Mesh, job: JobSpec) -> tuple[int, dict[str, Any], list[str]]:
    """The ways that a rank used, what was counted of them, and the axes whose communicators it has."""
    with_kind = job_mesh(job, mesh.rank, mesh.device, stand_ins=StandIns(kind="cuda"))
    time.sleep(0.02 * (mesh.rank % 3))  # ranks come when they come
    number = make_contact(with_kind, job_program(job))
    return number, with_kind.ledger.table(), [axis.name for axis in axes(with_kind) if axis.size > 1]


def test_places_in_others_are_there() -> None:
    """Memory that nobody wrote has numbers that are no places, at which a device ends the process."""
    call = KernelCall("any", (BareTensor((3, 2), (1, 3), torch.int64),), has_gradients=False)
    with patch.object(torch.ops.shardwright, "any", lambda ids: seen.append(ids), create=True):
        seen: list[torch.Tensor] = []
        call.make(torch.device("cpu"))
    assert torch.equal(seen[0], torch.zeros(3, 2, dtype=torch.int64)) and seen[0].stride() == (1, 3)


@pytest.mark.sampled(3)
@pytest.mark.processes
@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 2, "tp": 2}, {"pp": 4, "schedule": "dualpipe"},
        {"pp": 2, "dp": 2, "schedule": "zb-v", "zero": 1}, {"dp": 2, "cp": 2, "zero": 3},
        {"dp": 4, "zero": 2, "zero_ranks": 2},
        {"pp": 2, "virtual_stages": 2, "schedule": "interleaved-1f1b", "tp": 2},
    ],
    ids=str,
)  # fmt: skip
def test_ranks_use_every_communicator_once(plan: dict[str, Any]) -> None:
    job = small_job(batch=16, layers=8, **plan)
    met = run_on_mesh(job, contact, job)
    assert all(number >= len(set(names)) > 0 for number, _, names in met)
    assert all(counted == {} for _, counted, _ in met)  # a run's account has what its steps move


@pytest.mark.processes
def test_ranks_with_experts_use_every_communicator_once() -> None:
    job = small_job("mixtral", batch=8, dp=4, ep=2)
    assert all(number >= 2 for number, _, _ in run_on_mesh(job, contact, job))


def warmed(mesh: Mesh, job: JobSpec) -> tuple[list[str], int]:
    """The lines of a warm-up, and the number of kernels that it called."""
    lines, calls = list[str](), list[KernelCall]()
    as_cuda = job_mesh(job, mesh.rank, mesh.device, stand_ins=StandIns(kind="cuda"))
    with patch.object(KernelCall, "make", lambda call, device: calls.append(call)):
        warm_up(job, as_cuda, job_program(job), lines.append)
        warm_up(job, mesh, job_program(job), lambda _: pytest.fail("on a CPU there is nothing to warm up"))
    return lines, len(calls)


@pytest.mark.processes
def test_it_says_how_long_it_took(tmp_path: Path) -> None:
    job = small_job(batch=8, dp=2, pp=2)
    for lines, num_calls in run_on_mesh(job, warmed, job):
        first, last = lines
        assert num_calls and first.startswith("warm-up: every rank compiles its kernels")
        assert "compiled in " in last and "first contacts made in" in last


def test_messages_of_the_first_contact_have_a_tag_of_their_own() -> None:
    from shardwright.parallel.comm import first_contact

    assert first_contact._TAG != collectives.EXCHANGE_TAG


def test_a_run_warms_up_before_its_first_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done, job = list[str](), small_job(batch=2)
    replica = SimpleNamespace(program="the program")
    held_out, recorder = SimpleNamespace(losses={}), SimpleNamespace(measured=lambda: None)
    run = SimpleNamespace(
        replica=replica,
        batches=nullcontext(),
        done=0,
        losses=[],
        held_out=held_out,
        recorder=recorder,
        log=None,
        performed=[],
    )

    def warm(given: JobSpec, mesh: Mesh, program: Any, say: Any) -> None:
        assert given is job and program == "the program"
        done.append("warm-up")

    def steps(_: Any) -> bool:
        done.append("steps")
        return False

    monkeypatch.setattr(trainer, "TrainingRun", lambda *_: run)
    monkeypatch.setattr(trainer, "warm_up", warm)
    monkeypatch.setattr(trainer, "train_steps", steps)
    trainer.train(job, job_mesh(job, 0, torch.device("cpu")), tmp_path)
    assert done == ["warm-up", "steps"]
