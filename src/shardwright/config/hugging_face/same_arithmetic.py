"""Compare two descriptions of a model by the fields that determine what its layers compute."""

import math
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.hugging_face.decoder_fields import Fields
from shardwright.config.model import ModelSpec
from shardwright.config.phrase import say

# Fields about training, names and initial weights, which do not change what the layers compute.
_OF_TRAINING = (
    "name",
    "sequence",
    "longest_sequence",
    "weights",
    "adapter",
    "dropout",
    "init_std",
    "mtp_weight",
    "told_parameters_b",
)
_OF_ROUTING = (
    "bias_update",
    "aux_loss",
    "aux_coefficient",
    "aux_scope",
    "z_coefficient",
    "capacity_factor",
    "overflow",
)


def arithmetic(model: ModelSpec) -> dict[str, Any]:
    """The fields of a model that determine what its layers compute, with their defaults filled in."""
    fields = model.model_dump(exclude={*_OF_TRAINING})
    fields |= {"kv_heads": model.num_kv_heads, "head_dim": model.head_size, "ffn": model.ffn_size}
    if model.is_latent:
        fields["latent"] |= {"norm_epsilon": model.latent.norm_epsilon or model.norm_epsilon}
    moe = model.moe
    fields["moe"] = {name: value for name, value in fields["moe"].items() if name not in _OF_ROUTING}
    if moe.experts:
        fields["moe"] |= {
            "ffn": moe.ffn_size(model.ffn_size),
            "top_k": moe.num_chosen,
            "shared_ffn": moe.shared_size(model.ffn_size),
            "shared_experts": int(moe.shared_experts > 0),
        }
        if all(map(moe.has_experts, range(model.layers))):
            del fields["ffn"]  # no layer has an MLP of that width
    return fields


def is_same(first: ModelSpec, second: ModelSpec) -> bool:
    """True if two models compute the same, given the same weights."""
    return is_close(arithmetic(first), arithmetic(second))


def differing_fields(fields: Fields, model: ModelSpec) -> list[str]:
    """A fault for each field that differs between a released model and a job's model."""
    weights_fields = arithmetic(ModelSpec.model_validate(fields | {"sequence": model.sequence}))
    model_fields = arithmetic(model)
    return [
        say(
            "model.{name} is {value}, and {weights} with the weights; leave the field out, or name other weights",
            name=name,
            value=shortened(str(model_fields.get(name))),
            weights=shortened(str(weights_fields.get(name))),
        )
        for name in sorted({*weights_fields, *model_fields})
        if not is_close(weights_fields.get(name), model_fields.get(name))
    ]


def is_close(first: Any, second: Any) -> bool:
    """True if two values are equal, floats up to rounding, because conversions divide factors and take roots."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(is_close(first[name], second[name]) for name in first)
    if isinstance(first, float) and isinstance(second, (int, float)):
        return math.isclose(first, second, rel_tol=1e-9)
    return bool(first == second)
