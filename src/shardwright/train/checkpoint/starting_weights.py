"""The initial weights of a run: random ones from its seed, or the weights of a released model."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from shardwright.config.adapter import AdapterSpec
from shardwright.config.base import PlanError
from shardwright.config.hugging_face.config_json import family_of, fields_of, path_of, read_keys
from shardwright.config.hugging_face.same_arithmetic import differing_fields
from shardwright.config.job import JobSpec
from shardwright.model.decoder import DecoderStage
from shardwright.parallel.tensor.initial_values import Initial, seeded
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.sharding.stage_parameters import is_of_adapter
from shardwright.train.checkpoint.kept import place_of, steps_kept
from shardwright.train.checkpoint.released_adapter import released_adapter
from shardwright.train.checkpoint.released_weights import ReleasedWeights
from shardwright.train.checkpoint.storage import open_storage


def released_weights_of(job: JobSpec) -> ReleasedWeights | None:
    """The released weights that a job names, None if it names none. Raises PlanError with every fault: a folder of
    another model, missing tensors, tensors of another shape."""
    if not job.model.weights:
        return None
    path = path_of(job.model.weights)
    keys = read_keys(path)
    fields, faults = fields_of(keys)
    faults = faults or differing_fields(fields, job.model)
    if faults:
        raise PlanError(f"model.weights {path.parent}", faults)
    return ReleasedWeights(Path(path.parent), family_of(keys), job.model.model_copy(update={"adapter": AdapterSpec()}))


def refuse_weights(job: JobSpec, folder: Path, is_anew: bool) -> None:
    """PlanError if a run starts from released weights that do not fit its model. A run with checkpoints in its folder
    resumes from them instead, unless it `is_anew`, or they have adapters alone."""
    is_needed = is_anew or job.model.is_adapted or not steps_kept(open_storage(place_of(job, folder)))
    if job.model.weights and is_needed:
        initial_values(job, released_weights_of(job))


def initial_values(job: JobSpec, released: ReleasedWeights | None) -> Initial:
    """The function that writes the initial values of any box of a job's weights: random ones, or released ones of its
    weights and of its adapters."""
    drawn = seeded(job.run.seed)
    of_weights, of_adapters = drawn if released is None else released.write, drawn
    if job.model.adapter.weights:
        family = family_of(read_keys(path_of(job.model.weights)))
        of_adapters = released_adapter(family, job.model).write

    def write(place: ParameterShard, start: int, out: Tensor) -> None:
        (of_adapters if is_of_adapter(place.name) else of_weights)(place, start, out)

    return write


def take_correction_biases(stages: Mapping[int, DecoderStage], released: ReleasedWeights | None) -> None:
    """Copy the score-correction biases of a released model, which are no parameters, to the routers."""
    for stage in stages.values() if released is not None else ():
        for block, state in stage.routers().items():
            bias_E = None if released is None else released.correction_bias(block)
            if bias_E is not None:
                with torch.no_grad():
                    state.bias_E.copy_(bias_E)
