"""What the replicas of a stage exchange in one step: gradients and parameters, by collective and mesh axis.

Rajbhandari et al. 2020 (arXiv 1910.02054, section 7): with P the bytes of all parameters, an all-reduce of P without
ZeRO, a reduce-scatter and an all-gather of P in stages 1 and 2, and in stage 3 one more all-gather, of which the
engine here leaves out some (sharding/zero_events.py). A stage's own numbers are zero_replay.py's; here is also the
small all-reduce that each step ends with.
"""

from dataclasses import dataclass

from shardwright.account.rank_state import rank_state
from shardwright.account.zero_replay import replay
from shardwright.config.job import JobSpec
from shardwright.schedule.schedule import Program
from shardwright.sharding.groups import DP, REPLICAS, axis_groups

_NUMBER = 8  # bytes of a float64 or an int64


@dataclass(frozen=True)
class Traffic:
    """One collective on one axis in a step, on one rank.

    `payload_bytes` is what the ledger counts: bytes of the full tensor, the operand of an all-reduce or a
    reduce-scatter, the result of an all-gather.
    """

    calls: int
    payload_bytes: int


def replica_traffic(job: JobSpec, program: Program, pp_rank: int, tp_index: int = 0) -> dict[str, Traffic]:
    """All collectives of a step on the axes of data parallel, by "collective axis" as in the ledger's table. For
    schedules that drain. Axes are named as in sharding/groups.py."""
    assert program.weights == "current", "a schedule that does not drain has no single step"
    held = rank_state(job, program, pp_rank, tp_index)
    found = replay(job, program, pp_rank, held)
    moved = {key: (found.calls[key], num_bytes) for key, num_bytes in found.moved_bytes.items()}
    small = [axis_groups(job.plan, REPLICAS[False])]  # the loss
    small += [axis_groups(job.plan, DP)] if job.data.separate_documents else []  # how many targets have one
    for groups in small:
        if groups.size > 1:
            calls, before = moved.get(("all_reduce", groups.axis), (0, 0))
            moved["all_reduce", groups.axis] = calls + 1, before + _NUMBER
    return {f"{kind} {axis}": Traffic(*moved[kind, axis]) for kind, axis in sorted(moved)}
