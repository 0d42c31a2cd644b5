"""Notes, not faults, that belong beside a prediction of a job.

What is often told of a model or a cluster is held against the arithmetic: a story may give 100 layers with a hidden of
12,288 and call them 100 billion parameters; they are 181 billion.
"""

import math

from shardwright.config.job import JobSpec
from shardwright.config.model import ModelSpec
from shardwright.config.model_job import sequence_notes
from shardwright.config.units import counted
from shardwright.config.usual_links import usual_link_notes
from shardwright.sharding.stage_parameters import model_parameters

# "About 100 billion" is kept by what is within this share of it.
_ABOUT = 0.05


def job_notes(job: JobSpec) -> list[str]:
    """Sentences: told numbers that contradict the others, each with its arithmetic and what would give them."""
    links = usual_link_notes(job.cluster, job.plan.world)
    return [*_parameter_notes(job.model), *sequence_notes(job.model), *_device_notes(job), *links]


def batch_notes(job: JobSpec) -> list[str]:
    """A sentence on steps whose batch has not grown yet."""
    batch = job.batch
    if not batch.grows:
        return []
    return [
        f"the batch grows from {batch.ramp.start:,} to {batch.global_batch_size:,} sequences over the first "
        f"{counted(batch.num_growing, 'step')}; a step is told of the full one, and a run with what smaller ones take"
    ]


def _parameter_notes(model: ModelSpec) -> list[str]:
    told = model.told_parameters_b * 1e9
    places = [place for place in model_parameters(model) if not place.name.startswith("mtp.")]
    layers = sum(p.num_elements for p in places if p.name.startswith("layers.") and p.init == "normal")
    rest = sum(p.num_elements for p in places) - layers
    if not told or abs(layers + rest - told) <= _ABOUT * told:
        return []
    # In proportion, matrices of layers grow with the square of the width, and the rest with the width.
    ratio = (math.sqrt(rest**2 + 4 * layers * told) - rest) / (2 * layers)
    width = model.head_size
    near = max(width, round(model.hidden * ratio / width) * width)
    made = f"{layers / 1e9:,.1f} in matrices of layers, {rest / 1e9:,.1f} in tables and vectors"
    return [
        f"model.told_parameters_b says {model.told_parameters_b:g} billion parameters, and {model.layers} layers of "
        f"hidden {model.hidden:,} have {(layers + rest) / 1e9:,.1f} billion ({made}); with all widths in proportion a "
        f"hidden of {model.hidden * ratio:,.0f} would have them, or {near:,}, which splits into heads of {width}"
    ]


def _device_notes(job: JobSpec) -> list[str]:
    told, plan = job.cluster.told_devices, job.plan
    if told in (0, plan.world):
        return []
    rest = plan.world // plan.dp
    way_out = (
        f"dp {told // rest} would use them all"
        if told % rest == 0
        else f"no dp does: {told} / {rest} = {told / rest:.2f}"
    )
    return [f"cluster.told_devices says {told:,} devices, and {plan.degrees} = {plan.world:,} ranks; {way_out}"]
