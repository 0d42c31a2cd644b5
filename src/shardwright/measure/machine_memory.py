"""Faults of a job whose ranks, all on this machine's CPU, will hold more than its memory: the system would end one of
them in the middle of a step."""

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.memory.first_fit import refusal_of_machine
from shardwright.train.launch.out_of_memory import machine_bytes
from shardwright.train.launch.this_machine import device_kind


def memory_faults(job: JobSpec) -> list[str]:
    """The fault, with the sum and a way out; none on CUDA, or where the system does not tell its memory."""
    room_bytes = machine_bytes()
    if not room_bytes or device_kind(job.run.device) == "cuda":
        return []
    fault = refusal_of_machine(job, room_bytes)
    return [fault] if fault else []


def refuse_small_machine(job: JobSpec) -> None:
    """Raise PlanError for a job that has the fault."""
    if faults := memory_faults(job):
        raise PlanError("this machine", faults)
