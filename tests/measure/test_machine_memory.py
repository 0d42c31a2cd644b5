"""A job whose ranks will hold more than this machine's memory is refused by every command that would start them."""

from functools import partial
from pathlib import Path

import pytest

from shardwright.config.base import PlanError
from shardwright.config.load import load_job
from shardwright.config.units import memory_text
from shardwright.measure import machine_memory
from shardwright.measure.machine_memory import memory_faults
from shardwright.measure.step_time import compare_step_time
from shardwright.measure.verify import verify
from shardwright.memory.job_memory import job_memory

JOB = load_job("quickstart", ["run.device=cpu", "plan.microbatch_size=4"])
NEEDS = [memory.total_bytes for memory in job_memory(JOB)]
HELD_BYTES = sum(NEEDS) * JOB.plan.world // len(NEEDS)


def test_ranks_that_need_more_than_the_machine_are_refused_with_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends of the arithmetic: as much memory as they hold together is enough, and a byte less is not."""
    assert HELD_BYTES > max(NEEDS) * len(NEEDS) > 0
    for room_bytes in (HELD_BYTES, 0):  # 0: the system does not tell
        monkeypatch.setattr(machine_memory, "machine_bytes", lambda room=room_bytes: room)
        assert memory_faults(JOB) == []
    monkeypatch.setattr(machine_memory, "machine_bytes", lambda: HELD_BYTES - 1)
    (fault,) = memory_faults(JOB)
    assert f"the {JOB.plan.world} ranks will hold {memory_text(HELD_BYTES)}" in fault
    assert "; with plan." in fault and "no rank holds more than" in fault
    monkeypatch.setattr(machine_memory, "machine_bytes", lambda: 1000)
    assert memory_faults(JOB)[0].endswith("or torchrun over several machines")


def test_commands_that_start_its_ranks_refuse_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_memory, "machine_bytes", lambda: 1000)
    for command in (partial(verify, JOB, 1, 0.1), partial(compare_step_time, JOB, tmp_path)):
        with pytest.raises(PlanError) as refused:
            command()
        assert refused.value.subject == "this machine" and "will hold" in refused.value.faults[0]
    assert not list(tmp_path.iterdir())
