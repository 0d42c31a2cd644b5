"""Notes on a prediction of a job, which are no faults.

Numbers that are told of a model or a cluster are checked by arithmetic: a story may give 100 layers with a hidden of
12,288 and call them 100 billion parameters; they are 181 billion.
"""

import math

from shardwright.config.cluster_facts import usual_link_notes
from shardwright.config.job import JobSpec
from shardwright.config.model import ModelSpec
from shardwright.config.model_job import sequence_notes
from shardwright.config.units import counted
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
        f"the batch grows from {batch.ramp.start:,} to {batch.global_batch_size:,} sequences over the first "
        f"{counted(batch.num_growing, 'step')}; a step is told of the full one, and a run with what smaller ones take"
    ]


def _parameter_notes(model: ModelSpec) -> list[str]:
    told_parameters = model.told_parameters_b * 1e9
    places = [place for place in model_parameters(model) if not place.name.startswith("mtp.")]
    layers = sum(p.num_elements for p in places if p.name.startswith("layers.") and p.init == "normal")
    remainder = sum(p.num_elements for p in places) - layers
    if not told_parameters or abs(layers + remainder - told_parameters) <= _ABOUT * told_parameters:
        return []
    # In proportion, matrices of layers grow with the square of the width, and the remainder with the width.
    ratio = (math.sqrt(remainder**2 + 4 * layers * told_parameters) - remainder) / (2 * layers)
    head_size = model.head_size
    near_hidden = max(head_size, round(model.hidden * ratio / head_size) * head_size)
    split_text = f"{layers / 1e9:,.1f} in matrices of layers, {remainder / 1e9:,.1f} in tables and vectors"
    return [
        f"model.told_parameters_b says {model.told_parameters_b:g} billion parameters, and {model.layers} layers of "
        f"hidden {model.hidden:,} have {(layers + remainder) / 1e9:,.1f} billion ({split_text}); with all widths in "
        f"proportion a hidden of {model.hidden * ratio:,.0f} would have them, or {near_hidden:,}, which splits into "
        f"heads of {head_size}"
    ]


def _device_notes(job: JobSpec) -> list[str]:
    told_devices, plan = job.cluster.told_devices, job.plan
    if told_devices in (0, plan.world):
        return []
    replica_ranks = plan.world // plan.dp
    way_out = (
        f"dp {told_devices // replica_ranks} would use them all"
        if told_devices % replica_ranks == 0
        else f"no dp does: {told_devices} / {replica_ranks} = {told_devices / replica_ranks:.2f}"
    )
    return [f"cluster.told_devices says {told_devices:,} devices, and {plan.degrees} = {plan.world:,} ranks; {way_out}"]
