"""Notes on a prediction of a job, which are no faults.

Numbers that are told of a model or a cluster are checked by arithmetic: a story may give 100 layers with a hidden of
12,288 and call them 100 billion parameters; they are 181 billion.
"""

import math

from shardwright.config.cluster_facts import usual_link_notes
from shardwright.config.job import JobSpec
from shardwright.config.model import ModelSpec
from shardwright.config.model_job import sequence_notes
from shardwright.config.phrase import say
from shardwright.config.units import counted_phrase
from shardwright.sharding.stage_parameters import model_parameters

# "About 100 billion" is true of numbers that differ by at most this share.
_ABOUT = 0.05


def job_notes(job: JobSpec) -> list[str]:
    """Sentences about told numbers that contradict others, each with its arithmetic and a field that would agree."""
    return [*told_notes(job), *usual_link_notes(job.cluster, job.plan.world)]


def told_notes(job: JobSpec) -> list[str]:
    """The notes of `job_notes` but those on links."""
    return [*_parameter_notes(job.model), *sequence_notes(job.model), *_device_notes(job)]


def batch_notes(job: JobSpec) -> list[str]:
    """A sentence about a batch that grows."""
    batch = job.batch
    if not batch.grows:
        return []
    return [
        say(
            "the batch grows from {start:,} to {size:,} sequences over the first {steps}; a step is told of the full "
            "one, and a run with what smaller ones take",
            start=batch.ramp.start,
            size=batch.global_batch_size,
            steps=counted_phrase(batch.num_growing, "step"),
        )
    ]


def _parameter_notes(model: ModelSpec) -> list[str]:
    told_parameters = model.told_parameters_b * 1e9
    if not told_parameters:
        return []
    places = [place for place in model_parameters(model) if not place.name.startswith("mtp.")]
    layers = sum(p.num_elements for p in places if p.name.startswith("layers.") and p.init == "normal")
    remainder = sum(p.num_elements for p in places) - layers
    if abs(layers + remainder - told_parameters) <= _ABOUT * told_parameters:
        return []
    # In proportion, matrices of layers grow with the square of the width, and the remainder with the width.
    ratio = (math.sqrt(remainder**2 + 4 * layers * told_parameters) - remainder) / (2 * layers)
    head_size = model.head_size
    near_hidden = max(head_size, round(model.hidden * ratio / head_size) * head_size)
    return [
        say(
            "model.told_parameters_b says {told:g} billion parameters, and {layers} layers of hidden {hidden:,} have "
            "{all:,.1f} billion ({matrices:,.1f} in matrices of layers, {others:,.1f} in tables and vectors); with all "
            "widths in proportion a hidden of {exact:,.0f} would have them, or {near:,}, which splits into heads of "
            "{head_size}",
            told=model.told_parameters_b,
            layers=model.layers,
            hidden=model.hidden,
            all=(layers + remainder) / 1e9,
            matrices=layers / 1e9,
            others=remainder / 1e9,
            exact=model.hidden * ratio,
            near=near_hidden,
            head_size=head_size,
        )
    ]


def _device_notes(job: JobSpec) -> list[str]:
    told_devices, plan = job.cluster.told_devices, job.plan
    if told_devices in (0, plan.world):
        return []
    replica_ranks = plan.world // plan.dp
    way_out = (
        say("dp {dp} would use them all", dp=told_devices // replica_ranks)
        if told_devices % replica_ranks == 0
        else say(
            "no dp does: {devices} / {ranks} = {quotient:.2f}",
            devices=told_devices,
            ranks=replica_ranks,
            quotient=told_devices / replica_ranks,
        )
    )
    return [
        say(
            "cluster.told_devices says {told:,} devices, and {degrees} = {ranks:,} ranks; {way_out}",
            told=told_devices,
            degrees=plan.degrees,
            ranks=plan.world,
            way_out=way_out,
        )
    ]
