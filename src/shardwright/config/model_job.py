"""The usual values of a job for a model of the catalog.

A step has about as many tokens as usual for models of its size, far fewer for adapters, as an integer number of
sequences, equally many for each device. A run has 1e12 tokens, one of adapters 1e8. Numbers have 16 bits if the device
computes in 16 bits.
"""

import math
from functools import reduce
from typing import Any

from shardwright.config import largest
from shardwright.config.cluster import ClusterSpec
from shardwright.config.cluster_facts import device_entry
from shardwright.config.model import ModelSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.number_types import half_numbers
from shardwright.config.phrase import say
from shardwright.config.units import counted_phrase, tokens_text

# (most parameters of a model, tokens of its step): Brown et al. 2020 (arXiv 2005.14165), table 2.1, as powers of two.
_TOKENS = ((1e9, 2**19), (4e9, 2**20), (30e9, 2**21), (float("inf"), 2**22))
_ADAPTER_TOKENS = 2**17  # of a step: adapters of few values take small batches
_RUN_TOKENS = 1e12
_ADAPTER_RUN_TOKENS = 1e8  # 100,000 samples of 1,000 tokens
_BATCH_SOURCE = "Brown et al. 2020, table 2.1"


def usual_batch(model: ModelSpec, num_devices: int) -> int:
    """Number of sequences in a step. If there are fewer than devices, degrees that are not powers of two still divide
    them.

    Each device has 1, 2, 3, 4, 6, 8, 12, ... sequences, because a prime number would only allow microbatches of one
    sequence or of all.
    """
    parameters = shape_of(model).parameters
    tokens = next(tokens for most, tokens in _TOKENS if parameters <= most)
    tokens = _ADAPTER_TOKENS if model.is_adapted else tokens
    sequences = max(1, tokens // model.sequence)
    devices = max(1, num_devices)
    unit = devices if sequences >= devices else devices // (devices & -devices)
    target = max(1.0, sequences / unit)
    power = 1 << int(math.log2(target))
    candidates = (power, 3 * power // 2 if power > 1 else 1, 2 * power)
    return unit * min(candidates, key=lambda n: abs(math.log(n / target)))


def _usual_run_tokens(model: ModelSpec) -> float:
    """Tokens of a run of which nobody says how long it is: adapters are trained on far fewer than whole models."""
    return _ADAPTER_RUN_TOKENS if model.is_adapted else _RUN_TOKENS


def usual_compute(cluster: ClusterSpec) -> str:
    """The number type of the products: one of 16 bits if the device has a rate for it, else float32."""
    device = device_entry(cluster.device)
    return next((number.name for number in half_numbers() if device.peak_flops(number.name)), "float32")


def with_usual(
    fields: dict[str, Any], model: ModelSpec, cluster: ClusterSpec, world: int, run_tokens: float = 0.0
) -> tuple[dict[str, Any], str]:
    """(fields of a job with usual values for batch, steps and number type filled in, a sentence about these values).

    `world` is the number of ranks of its plan, and `run_tokens` are the tokens of its run, 0 if no user states them.
    """
    filled, notes = dict(fields), list[str]()
    if "global_batch_size" not in fields.get("batch", {}):
        devices = cluster.num_devices or world
        size, usual = usual_batch(model, devices), usual_batch(model, 1)
        filled["batch"] = fields.get("batch", {}) | {"global_batch_size": size}
        reason = say("as is usual for models of its size ({source}", source=_BATCH_SOURCE)
        if model.is_adapted:
            reason = say("as small as is usual for adapters (some 130,000 tokens")
        elif size != usual:
            reason = say(
                "so that {devices:,} devices share them: {usual:,} are usual for models of its size ({source}",
                devices=devices,
                usual=usual,
                source=_BATCH_SOURCE,
            )
        notes.append(
            say(
                "a step has {sequences}, {tokens:,} tokens, {reason}; {option} for another)",
                sequences=counted_phrase(size, "sequence"),
                tokens=size * model.sequence,
                reason=reason,
                option="--set batch.global_batch_size=N",
            )
        )
    tokens = filled["batch"]["global_batch_size"] * model.sequence
    if "steps" not in fields.get("optimizer", {}):
        usual_tokens = _usual_run_tokens(model)
        steps = (run_tokens if run_tokens > 0 else usual_tokens) / tokens
        filled["optimizer"] = fields.get("optimizer", {}) | {"steps": max(1, round(min(steps, largest.STEPS)))}
        if not run_tokens > 0:
            notes.append(
                say(
                    "a run has {tokens} tokens where nobody states their number (--tokens N, or --set "
                    "optimizer.steps=N)",
                    tokens=tokens_text(usual_tokens),
                )
            )
    if "compute" not in fields.get("precision", {}):
        compute = usual_compute(cluster)
        filled["precision"] = fields.get("precision", {}) | {"compute": compute}
        notes.append(say("it is computed in {compute}", compute=compute))
    return filled, reduce(lambda listed, note: say("{note}, {other}", note=listed, other=note), notes) if notes else ""


def sequence_notes(model: ModelSpec) -> list[str]:
    """A sentence if samples are longer or shorter than the sequences for which a model is made; else an empty list."""
    longest, sequence = model.longest_sequence, model.sequence
    if longest in (0, sequence):
        return []
    template = "at most {longest:,}" if sequence > longest else "up to {longest:,}"
    return [
        say(
            "samples have {sequence:,} tokens, and the model is made for {most} (model.sequence)",
            sequence=sequence,
            most=say(template, longest=longest),
        )
    ]
