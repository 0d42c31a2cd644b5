"""The memory account of a job: what each pipeline rank will hold, by kind, before it runs.

Parameters, gradients and optimizer state are exact to the byte, padding included (Rajbhandari et al. 2020, arXiv
1910.02054, section 3.1: with 16-bit numbers and Adam 16 bytes a parameter, of which ZeRO shares some; parallel/unit.py
says which). Activations are what autograd keeps of all microbatches in flight; what an operator needs while it runs
is not counted.
"""

from collections.abc import Mapping

from shardwright.schedule.action import Kind
from shardwright.schedule.job import job_program
from shardwright.schedule.schedule import Program
from shardwright.schedule.versions import stashed_versions
from shardwright.spec.job import JobSpec
from shardwright.spec.memory import RankMemory
from shardwright.workload.replay import Replayed, replay
from shardwright.workload.saved import stage_activation_bytes
from shardwright.workload.state import rank_state

_FLOAT = 4  # bytes of a master weight, and of each of Adam's two moments


def job_memory(job: JobSpec) -> list[RankMemory]:
    """By pipeline rank, of the tensor-parallel rank that holds most: index 0 has the longer share of every split."""
    program = job_program(job, _num_steps(job))
    return [rank_memory(job, program, rank) for rank in range(job.plan.pp)]


def rank_memory(job: JobSpec, program: Program, pp_rank: int, tp_index: int = 0) -> RankMemory:
    """The account of one rank that runs its list of `program`."""
    held = rank_state(job, program, pp_rank, tp_index)
    compute, gradient = job.precision.compute_bytes, job.precision.gradient_bytes
    versions = stashed_versions(program)[pp_rank]
    parameters = gradients = optimizer = 0
    for stage in held.values():
        zero, whole, shard = stage.replicas.zero, stage.num_elements, stage.num_shard_elements
        parameters += versions * compute * (shard if zero == 3 else whole)
        gradients += gradient * ((shard if zero >= 2 else whole) + stage.own_gradient)
        optimizer += _FLOAT * shard * (2 if job.precision.compute == "float32" else 3)
    saved = {stage: stage_activation_bytes(job, stage, tp_index) for stage in held}
    return RankMemory(
        parameters, gradients, optimizer, peak_saved(program, pp_rank, saved),
        replay(job, program, pp_rank, held).buffers_bytes,
    )  # fmt: skip


def rank_replay(job: JobSpec, pp_rank: int, tp_index: int = 0) -> Replayed:
    """What a rank borrows and moves for ZeRO in one step of a schedule that drains."""
    program = job_program(job)
    return replay(job, program, pp_rank, rank_state(job, program, pp_rank, tp_index))


def peak_saved(program: Program, pp_rank: int, saved: Mapping[int, int]) -> int:
    """Most bytes of activations at once, if a microbatch keeps `saved[stage]` from F to the end of B, or of W."""
    alive = peak = 0
    for action in program.ranks[pp_rank]:
        parts = action.computes()
        # In an overlapped pair both are alive at once: what begins is counted before what ends.
        alive += sum(saved[part.stage] for part in parts if part.kind is Kind.FORWARD)
        peak = max(peak, alive)
        for part in parts:
            split = (part.stage, part.microbatch) in program.split_backwards
            if part.kind is Kind.WEIGHT_GRAD or (part.kind is Kind.BACKWARD and not split):
                alive -= saved[part.stage]
    return peak


def _num_steps(job: JobSpec) -> int:
    """Steps until the pipeline is as full as it gets: 1 if it drains, else enough for twice its depth."""
    if job.plan.schedule not in ("pipedream", "pipedream-2bw"):
        return 1
    undrained = min(n for n in (job.optimizer.steps, job.run.log_every, job.run.eval_every) if n)
    return min(undrained, 1 + -(-2 * job.plan.pp // job.num_microbatches))
