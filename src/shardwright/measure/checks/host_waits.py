"""The number of times that the host waits for the device in a step of the loop of `train`: nothing is launched
meanwhile, so each wait costs its length.

The loss, the norm, the routers' counts of their tokens and the votes on saves are one wait, before the update; the
number of targets in all documents is another, before the step. Steps of a pipeline that does not drain are read in one
wait at its end, and one more tells if their weights are finite. At a progress line the host waits for the end of the
step, for the measurements of all ranks since the last line, and for their comparison. Experts wait once in each pass of
a layer, because the counts are the shapes of the following tensors; three times if tokens travel by nodes, and once
more if experts choose. In each microbatch with documents they wait for its number of real tokens, if the room depends
on it. An optimizer on the host waits for gradients. If tokens without room look for another expert (model.moe.overflow
"reroute") the host waits in each round; a dry run does not know the number of rounds.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.model.gates.choice import make_gate
from shardwright.schedule.action import Action, Kind

# The forward pass waits for its number of real tokens, which only experts with room ask for.
EXPERT_LINES = ("parallel/expert/", "model/gates/", "model/forward_pass.py")
_HOST_MEMORY = ("parallel/zero/master_weights.py", "parallel/zero/host_link.py")

_LEDGER = "parallel/comm/ledger.py"  # waits for the end of a step


@dataclass(frozen=True)
class ExpertPasses:
    """The number of times that `layers` with experts computed, and the number of `microbatches` of stages and further
    tokens in which they did."""

    layers: int = 0
    microbatches: int = 0


def wait_faults(job: JobSpec, waits: Sequence[str], num_steps: int, passes: ExpertPasses) -> list[str]:
    """Faults if the host waited too often in some steps, with the lines at which it waited."""
    lines = Counter(waits)
    of_experts = {line: count for line, count in lines.items() if line.startswith(EXPERT_LINES)}
    has_host_memory = job.plan.offload_optimizer > 0 or job.plan.offload_parameters
    elsewhere = (*EXPERT_LINES, *_HOST_MEMORY) if has_host_memory else EXPERT_LINES
    of_step = {line: count for line, count in lines.items() if not line.startswith(elsewhere)}
    most_of_step = num_steps * (1 + job.data.separate_documents)
    if not SCHEDULES[job.plan.schedule].drains:
        most_of_step = 2 + num_steps * job.data.separate_documents
    by_nodes = job.plan.dispatch == "node-aware"
    # By nodes, the layer also reads the widest choice, and the counts of two trips.
    moe = job.model.moe
    most_of_experts = passes.layers * ((3 if by_nodes else 1) + (moe.experts > 0 and make_gate(moe).sees_all))
    if moe.experts and job.data.separate_documents and moe.capacity(1) is not None:
        most_of_experts += passes.microbatches
    if by_nodes:
        of_experts |= {line: of_step.pop(line) for line in list(of_step) if line.startswith("parallel/comm/coll")}
    return [
        *_too_many(of_step, most_of_step, say("{number} steps", number=num_steps) if num_steps > 1 else say("a step")),
        *_too_many(of_experts, most_of_experts, say("{number} passes of layers with experts", number=passes.layers)),
    ]


def reading_faults(job: JobSpec, waits: Sequence[str], num_lines: int) -> list[str]:
    """Faults if the host waited too often for measurements in steps with so many progress lines."""
    lines, during = Counter(waits), say("reading {number} progress lines", number=num_lines)
    ends = {line: count for line, count in lines.items() if line.startswith(_LEDGER)}
    others = {line: count for line, count in lines.items() if not line.startswith(_LEDGER)}
    has_peers = job.plan.world > 1
    return [
        *_too_many(ends, num_lines * has_peers, during),
        *_too_many(others, num_lines * (1 + has_peers), during),
    ]


def _too_many(lines: Mapping[str, int], allowed: int, during: str) -> list[str]:
    number = sum(lines.values())
    if number <= allowed:
        return []
    return [
        say(
            "the host waits {number} times in {during}, and {allowed} would do: {lines}",
            number=number,
            during=during,
            allowed=allowed,
            lines=tuple(f"{line} ({count})" for line, count in sorted(lines.items())),
        )
    ]


def expert_passes(row: Iterable[Action], num_layers: Mapping[int, int], num_recomputed: Mapping[int, int]) -> int:
    """Passes of layers with experts in a rank's list of actions. A stage has `num_layers` of them, and recomputes
    `num_recomputed` of them in its backward."""
    passes = 0
    for action in row:
        for part in action.parts or (action,):
            if part.kind in (Kind.FORWARD, Kind.RECOMPUTE):
                passes += num_layers[part.stage]
            elif part.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
                passes += num_recomputed[part.stage]
    return passes
