"""What the replicas of a stage exchange in one step: gradients and parameters, by collective and mesh axis.

Rajbhandari et al. 2020 (arXiv 1910.02054, section 7): with P the bytes of all parameters, an all-reduce of P without
ZeRO, a reduce-scatter and an all-gather of P in stages 1 and 2, and in stage 3 one more all-gather, of which the
engine here leaves out some (replay.py). A stage's own numbers are replay.py's; here are also the small all-reduce
that each step ends with, and what all of it puts on the wire.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.account.rank_state import rank_state
from shardwright.account.zero_replay import replay
from shardwright.config.job import JobSpec
from shardwright.schedule.job_program import job_program
from shardwright.schedule.schedule import Program

_NUMBER = 8  # bytes of a float64 or an int64

# How often the ring algorithm sends a payload of n bytes, of which each of d ranks sends (d - 1) / d: an all-reduce
# is a reduce-scatter and then an all-gather (Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69, section 3).
_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclass(frozen=True)
class Traffic:
    """One collective on one axis in a step, on one rank.

    `payload_bytes` is what the ledger counts: bytes of the full tensor, the operand of an all-reduce or a
    reduce-scatter, the result of an all-gather.
    """

    calls: int
    payload_bytes: int


def replica_traffic(job: JobSpec, pp_rank: int, tp_index: int = 0) -> dict[str, Traffic]:
    """By "collective axis", as in the ledger's table: all of a step on the axes of data parallel.

    For schedules that drain. The axes are "dp", or "dp cp" where cp is not 1, and "edp" for experts; where sharding is
    hybrid "dp shards" and "dp copies" and so on.
    """
    return program_traffic(job, job_program(job), pp_rank, tp_index)


def program_traffic(job: JobSpec, program: Program, pp_rank: int, tp_index: int = 0) -> dict[str, Traffic]:
    """The same, where the job's program is there already."""
    assert program.weights == "current", "a schedule that does not drain has no single step"
    held = rank_state(job, program, pp_rank, tp_index)
    found = replay(job, program, pp_rank, held)
    moved = {key: (found.calls[key], num_bytes) for key, num_bytes in found.moved_bytes.items()}
    small = ["dp" if job.plan.cp == 1 else "dp cp"] if job.plan.replicas > 1 else []  # the loss
    small += ["dp"] if job.plan.dp > 1 and job.data.separate_documents else []  # how many targets have one
    for axis in small:
        calls, before = moved.get(("all_reduce", axis), (0, 0))
        moved["all_reduce", axis] = calls + 1, before + _NUMBER
    return {f"{kind} {axis}": Traffic(*moved[kind, axis]) for kind, axis in sorted(moved)}


def wire_bytes(traffic: Mapping[str, Traffic], num_ranks: Mapping[str, int]) -> float:
    """What this rank sends if every collective is a ring; `num_ranks` is by axis.

    A ring of d ranks sends (d - 1) / d of the payload in an all-gather or a reduce-scatter, and twice that in an
    all-reduce. So an all-reduce of n bytes, which is recorded as n, costs what a reduce-scatter and an all-gather of
    n do together, which are recorded as 2n.
    """
    total = 0.0
    for name, entry in traffic.items():
        collective, axis = name.split(" ", 1)
        ranks = num_ranks[axis]
        total += _PASSES[collective] * entry.payload_bytes * (ranks - 1) / ranks
    return total
