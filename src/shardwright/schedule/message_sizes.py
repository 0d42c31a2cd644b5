"""The bytes that a program moves and keeps, on one device of each pipeline rank.

The bytes of a collective are the bytes of its full tensor, as the ledger counts them: the operand of a reduction, the
result of an all-gather, the message of a send. They are not the bytes that an algorithm puts on the wire.
"""

from dataclasses import dataclass

from shardwright.config.job import JobSpec
from shardwright.config.nf4_rows import WORD_BYTES
from shardwright.config.precision import PrecisionSpec
from shardwright.sharding.groups import num_replicas
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.sharding.stage_parameters import alike_stages, stage_parameters
from shardwright.sharding.stage_placement import StagePlacement


@dataclass(frozen=True)
class Sizes:
    """Sizes in bytes; tuples are by stage.

    `message` passes a border between stages, either way. `reduce` are the gradients of a stage that are reduced, and
    `gather` its parameters that are gathered; both are 0 if no other rank shares them. `activations` are kept by one
    microbatch for its backward; empty if unknown.
    """

    message: int
    reduce: tuple[int, ...]
    gather: tuple[int, ...]
    activations: tuple[int, ...] = ()

    def stage_input(self, stage: int) -> int:
        """The bytes that a stage keeps of a microbatch that it will recompute: 0 for the first stage, whose token ids
        stay in memory anyway."""
        return self.message if stage else 0

    def transfer(self, bytes_per_time: float) -> tuple[float, ...]:
        """`Costs.transfer` over links of a bandwidth, in bytes per unit of the costs' time."""
        return (self.message / bytes_per_time,) * (len(self.reduce) - 1)


def message_bytes(job: JobSpec) -> int:
    """Bytes of a message between two stages of a pipeline, either way: hidden states [s, B, H]. s is sequence / cp, and
    sequence / (cp x tp) under sequence parallelism."""
    return job.precision.compute_bytes * job.tokens_between * job.plan.microbatch_size * job.model.hidden


def job_sizes(job: JobSpec, placement: StagePlacement, tp_index: int = 0) -> Sizes:
    """The sizes of a job's messages and state, on a device at `tp_index` of its tensor-parallel group. Devices of a
    group differ if rows don't divide evenly."""
    plan, model = job.plan, job.model
    alike = alike_stages(model, plan)
    places_by_stage = {
        stage: [place for places in stage_parameters(model, plan, stage, tp_index).values() for place in places]
        for stage in dict.fromkeys(alike)
    }
    if model.shares_table and placement.holders[0][0] == placement.holders[0][-1]:
        # One tensor serves both uses, and its gradients are summed before they travel.
        last_places = places_by_stage[alike[-1]]
        table = next(place for place in reversed(last_places) if place.name == "embedding.weight")
        last_places.remove(table)
    # A parameter of a single replica, such as an expert that no other rank has, is neither reduced nor gathered.
    shared = {is_expert: num_replicas(plan, is_expert) > 1 for is_expert in (False, True)}
    bytes_of = {
        stage: [_collective_bytes(place, job.precision) for place in places if shared[place.is_expert]]
        for stage, places in places_by_stage.items()
    }
    reduced, gathered = ([sum(pair[which] for pair in bytes_of[stage]) for stage in alike] for which in (0, 1))
    return Sizes(message=message_bytes(job), reduce=tuple(reduced), gather=tuple(gathered))


def _collective_bytes(place: ParameterShard, numbers: PrecisionSpec) -> tuple[int, int]:
    """Bytes of a parameter in (a reduction of gradients, which frozen ones lack; an all-gather of values)."""
    values = WORD_BYTES * place.num_words if place.row_format else numbers.compute_bytes * place.num_elements
    return (0 if place.is_frozen else numbers.gradient_bytes * place.num_elements), values
