"""How often the host waits for the device in a step: nothing is launched meanwhile, so each wait costs its length.

The loss and the norm of a step are one wait; the targets that count in all documents another, before the step; and what
routers saw of their tokens, which their biases learn from, a third. Experts wait once in each pass of a layer, for the
counts are the shapes of what follows; three times where tokens travel by nodes, and once more where experts choose. In
each microbatch with documents they wait for its number of tokens that are real, where room depends on it. An optimizer
on the host waits for gradients. Where tokens without room look for another expert (model.moe.overflow "reroute") the
host waits in each round; how many there are no dry run knows.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.config.job import JobSpec
from shardwright.model.gates.make import make_gate
from shardwright.schedule.action import Action, Kind

_EXPERTS, _HOST_MEMORY = ("parallel/expert/", "model/gates/"), ("parallel/zero/",)


@dataclass(frozen=True)
class ExpertPasses:
    """How often layers with experts computed something, `layers`, and in how many `microbatches` of stages and further
    tokens these were."""

    layers: int = 0
    microbatches: int = 0


def wait_faults(job: JobSpec, waits: Sequence[str], num_steps: int, passes: ExpertPasses) -> list[str]:
    """The waits of some steps that are too many, by the line at which the host waited."""
    lines = Counter(waits)
    of_experts = {line: count for line, count in lines.items() if line.startswith(_EXPERTS)}
    of_step = {line: count for line, count in lines.items() if not line.startswith((*_EXPERTS, *_HOST_MEMORY))}
    most_of_step = num_steps * (1 + job.data.separate_documents + bool(job.model.blocks_with_experts))
    by_nodes = job.plan.dispatch == "node-aware"
    # By nodes the widest choice is asked for, too, and counts are of two trips.
    moe = job.model.moe
    most_of_experts = passes.layers * ((3 if by_nodes else 1) + (moe.experts > 0 and make_gate(moe).sees_all))
    if moe.experts and job.data.separate_documents and moe.capacity(1) is not None:
        most_of_experts += passes.microbatches
    if by_nodes:
        of_experts |= {line: of_step.pop(line) for line in list(of_step) if line.startswith("parallel/comm/coll")}
    return [
        *_too_many(of_step, most_of_step, f"{num_steps} steps" if num_steps > 1 else "a step"),
        *_too_many(of_experts, most_of_experts, f"{passes.layers} passes of layers with experts"),
    ]


def _too_many(lines: Mapping[str, int], most: int, during: str) -> list[str]:
    number = sum(lines.values())
    if number <= most:
        return []
    where = ", ".join(f"{line} ({count})" for line, count in sorted(lines.items()))
    return [f"the host waits {number} times in {during}, and {most} would do: {where}"]


def expert_passes(row: Iterable[Action], num_layers: Mapping[int, int], again: Mapping[int, int]) -> int:
    """Passes of layers with experts in a rank's list of actions: a stage has `num_layers` of them, of which so many are
    computed `again` in its backward."""
    passes = 0
    for action in row:
        for part in action.parts or (action,):
            if part.kind in (Kind.FORWARD, Kind.RECOMPUTE):
                passes += num_layers[part.stage]
            elif part.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
                passes += again[part.stage]
    return passes
