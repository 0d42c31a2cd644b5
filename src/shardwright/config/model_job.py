"""A job for a model of the catalog: what it does not say, and what that is then.

A step has about as many tokens as models of its size were trained with, in whole sequences, as many for each device; a
run has 1e12 tokens; and it is computed in 16 bits where the device does so.
"""

import math
from typing import Any

from shardwright.config.cluster import ClusterSpec
from shardwright.config.model import ModelSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.units import counted
from shardwright.config.usual_links import device_entry

# Most parameters of a model, and tokens of its step: Brown et al. 2020 (arXiv 2005.14165), table 2.1, to powers of two.
_TOKENS = ((1e9, 2**19), (4e9, 2**20), (30e9, 2**21), (float("inf"), 2**22))
_RUN_TOKENS = 1e12
_BATCH_FROM = "Brown et al. 2020, table 2.1"


def usual_batch(model: ModelSpec, num_devices: int) -> int:
    """Sequences of a step. Where there are fewer than devices, degrees that are not powers of two still divide them.

    A device has 1, 2, 3, 4, 6, 8, 12 and so on of them, for of a prime number no microbatch but 1 or all could be made.
    """
    parameters = shape_of(model).parameters
    tokens = next(tokens for most, tokens in _TOKENS if parameters <= most)
    sequences = max(1, tokens // model.sequence)
    devices = max(1, num_devices)
    unit = devices if sequences >= devices else devices // (devices & -devices)
    each = max(1.0, sequences / unit)
    below = 1 << int(math.log2(each))
    return unit * min((below, 3 * below // 2 if below > 1 else 1, 2 * below), key=lambda n: abs(math.log(n / each)))


def usual_compute(cluster: ClusterSpec) -> str:
    """The number type of the products: the narrowest of 16 bits and more that the device has a rate for."""
    device = device_entry(cluster.device)
    return next((number for number in ("bf16", "fp16") if device.peak_flops(number)), "float32")


def with_usual(
    fields: dict[str, Any], model: ModelSpec, cluster: ClusterSpec, world: int
) -> tuple[dict[str, Any], str]:
    """Fields of a job with what they do not say of its batch and its numbers; and what was filled in, as a sentence.

    `world` are the ranks of its plan.
    """
    filled, notes = dict(fields), []
    if "global_batch_size" not in fields.get("batch", {}):
        devices = cluster.num_devices or world
        size, usual = usual_batch(model, devices), usual_batch(model, 1)
        filled["batch"] = fields.get("batch", {}) | {"global_batch_size": size}
        why = f"as is usual for models of its size ({_BATCH_FROM}"
        if size != usual:
            why = f"so that {devices:,} devices share them: {usual:,} are usual for models of its size ({_BATCH_FROM}"
        notes.append(
            f"a step has {counted(size, 'sequence')}, {size * model.sequence:,} tokens, {why}; "
            "--set batch.global_batch_size=N for another)"
        )
    tokens = filled["batch"]["global_batch_size"] * model.sequence
    if "steps" not in fields.get("optimizer", {}):
        filled["optimizer"] = fields.get("optimizer", {}) | {"steps": max(1, round(_RUN_TOKENS / tokens))}
        notes.append("a run has 1e12 tokens")
    if "compute" not in fields.get("precision", {}):
        compute = usual_compute(cluster)
        filled["precision"] = fields.get("precision", {}) | {"compute": compute}
        notes.append(f"it is computed in {compute}")
    return filled, ", ".join(notes)


def sequence_notes(model: ModelSpec) -> list[str]:
    """A sentence where samples are longer or shorter than what a model is made for."""
    longest, sequence = model.longest_sequence, model.sequence
    if longest in (0, sequence):
        return []
    most = f"at most {longest:,}" if sequence > longest else f"up to {longest:,}"
    return [f"samples have {sequence:,} tokens, and the model is made for {most} (model.sequence)"]
