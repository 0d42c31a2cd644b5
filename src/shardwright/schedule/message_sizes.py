"""How many bytes a program moves and keeps, on one device of each pipeline rank.

A collective's bytes are those of the full tensor that it is about, as the ledger counts them: the operand of a
reduction, the result of a gather, the message of a send. What an algorithm puts on the wire for it is another matter.
"""

from dataclasses import dataclass

from shardwright.config.job import JobSpec
from shardwright.sharding.groups import num_replicas
from shardwright.sharding.stage_parameters import stage_parameters
from shardwright.sharding.stage_placement import StagePlacement


@dataclass(frozen=True)
class Sizes:
    """Bytes; tuples are by stage.

    `message` is what passes a border between stages, either way. `reduce` is what the reduction of a stage's
    gradients is about and `gather` its parameters, both 0 where nobody shares them. `activations` is what one
    microbatch keeps for its backward; empty where that is not known.
    """

    message: int
    reduce: tuple[int, ...]
    gather: tuple[int, ...]
    activations: tuple[int, ...] = ()

    def stage_input(self, stage: int) -> int:
        """The bytes that a stage keeps of a microbatch that it will compute again. Token ids are there anyway."""
        return self.message if stage else 0

    def transfer(self, bytes_per_time: float) -> tuple[float, ...]:
        """`Costs.transfer` over links of a bandwidth, in bytes a unit of the costs' time."""
        return (self.message / bytes_per_time,) * (len(self.reduce) - 1)


def message_bytes(job: JobSpec) -> int:
    """Bytes of a message between two stages of a pipeline, either way: hidden states [s, B, H]. s is a cp-th of the
    sequence, or a tp-th of that under sequence parallel."""
    return job.precision.compute_bytes * job.tokens_between * job.plan.microbatch_size * job.model.hidden


def job_sizes(job: JobSpec, placement: StagePlacement, tp_index: int = 0) -> Sizes:
    """The sizes of a job's messages and state, on a device at `tp_index` of its tensor-parallel group. Shares differ if
    rows don't divide."""
    plan, model = job.plan, job.model
    held = [
        [place for places in stage_parameters(model, plan, stage, tp_index).values() for place in places]
        for stage in range(plan.num_stages)
    ]
    if model.shares_table and placement.holders[0][0] == placement.holders[0][-1]:
        # One memory for both uses, whose gradients are summed before they travel.
        held[-1].remove(next(place for place in reversed(held[-1]) if place.name == "embedding.weight"))
    # What a single replica holds for itself, such as an expert that no other rank has, is neither summed nor gathered.
    shared = {is_expert: num_replicas(plan, is_expert) > 1 for is_expert in (False, True)}
    elements = [sum(place.num_elements for place in places if shared[place.is_expert]) for places in held]
    numbers = job.precision
    return Sizes(
        message=message_bytes(job),
        reduce=tuple(numbers.gradient_bytes * count for count in elements),
        gather=tuple(numbers.compute_bytes * count for count in elements),
    )
