"""Every key of every family's configuration, changed: where transformers computes something else, so do we, or refuse;
and a model that is accepted has as many parameters as in transformers.

python tests/fuzz/configurations.py [NAME ...]     of some cases of released_models.py, or of all

A key that is marked as understood, and is not, shows itself here: with the same weights the logits of transformers are
others, and our fields are the same. Where transformers has other tensors, their number tells it. Keys that we read and
transformers' own configuration of a family does not have are set, too: they change both or neither.
"""

import argparse
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).parents[1])

from shardwright.config.base import PlanError
from shardwright.config.hugging_face.config_json import _read, fields_of
from shardwright.config.hugging_face.config_reader import _NO_ARITHMETIC
from shardwright.config.hugging_face.same_arithmetic import is_same
from shardwright.config.load import make_job
from shardwright.config.model import ModelSpec
from shardwright.sharding.stage_parameters import model_parameters
from support.released_models import RELEASED, SEQUENCE, no_tokens

# Of the largest logit: rounding of float32 is a thousandth of it.
_OTHER = 1e-4
_WORDS = {
    "hidden_act": ("silu", "relu", "gelu"), "hidden_activation": ("silu", "relu", "gelu"),
    "activation_function": ("silu", "relu", "gelu"), "activation": ("silu", "relu"),
    "scoring_func": ("softmax", "sigmoid"), "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
}  # fmt: skip
_SLIDING, _FULL = "sliding_attention", "full_attention"
_STRETCHED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
# Values of keys that a configuration does not have.
_FURTHER: dict[str, tuple[Any, ...]] = {
    "layer_types": ([_SLIDING] * 3 + [_FULL], [_FULL] * 4, [_SLIDING] * 4), "sliding_window": (4,),
    "rope_theta": (500.0,), "rope_scaling": (_STRETCHED,), "rope_parameters": (_STRETCHED,),
    "partial_rotary_factor": (0.5,), "head_dim": (16, 4), "mlp_only_layers": ([0],), "first_k_dense_replace": (0, 1, 2),
    "mlp_layer_types": (["dense", "dense", "sparse", "sparse"],), "no_rope_layers": ([1, 0, 1, 0],),
    "original_max_position_embeddings": (8,), "num_key_value_heads": (1, 4), "hidden_act": ("gelu", "relu"),
}  # fmt: skip
# Keys that transformers reads and we do by another way: ids of tokens that are not in the model, the order of keys of
# old releases, and what is only for training or another way to compute.
_LEFT = {*_NO_ARITHMETIC, "vocab_size", "max_position_embeddings", "n_positions", "torch_dtype"}


def main() -> int:
    """Change the keys of some cases. 1 if one changes what transformers computes and not what we do, or if a model has
    another number of parameters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases of released_models.py  [default: all]")
    names = parser.parse_args().names or list(RELEASED)
    silence()
    result = [answer for name in names for answer in (*overlooked(name), *miscounted(name), *invented(name))]
    print("\n".join(result) or f"{len(names)} cases: no key was overlooked, and all parameters are counted")
    return 1 if result else 0


def silence() -> None:
    """Have transformers keep its remarks on odd configurations to itself."""
    warnings.simplefilter("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
    logging.disable(logging.WARNING)


def overlooked(name: str) -> Iterator[str]:
    """A line for each changed key of a case that changes what transformers computes, and not our model."""
    family, keys = RELEASED[name]
    model, whole = made(family, keys)
    weights, wanted = model.state_dict(), logits(model)
    own = ModelSpec.model_validate(fields_of(whole)[0])
    for changed, what in changes(whole):
        try:
            other, _ = made(family, changed)
            other.load_state_dict(weights)
            result = logits(other)
        except Exception:  # it refuses the change, or has other tensors, which a folder's weights would not fit
            continue
        if float((result - wanted).abs().max() / wanted.abs().max()) < _OTHER:
            continue
        fields, faults = fields_of(changed | {"model_type": family})
        try:
            is_overlooked = not faults and is_same(ModelSpec.model_validate(fields), own)
        except ValidationError:  # refused by our fields
            continue
        if is_overlooked:
            yield f"{name}: {what} changes what transformers computes, and not what we do"


def invented(name: str) -> Iterator[str]:
    """A line for each key of a case that we read, and that its configuration does not have, if setting it changes our
    model and not that of transformers, or the other way round."""
    family, keys = RELEASED[name]
    model, whole = made(family, keys)
    weights, wanted = model.state_dict(), logits(model)
    reader, fields = _read(dict(whole), family)
    own = ModelSpec.model_validate(fields | {"mtp_layers": 0})
    other_names = getattr(type(model.config), "attribute_map", {})
    for key in sorted(reader.names_read - {*whole, *_LEFT, *other_names}):
        for value in _FURTHER.get(key, (True, False, 2, 0.5)):
            changed = whole | {key: value}
            fields, faults = fields_of(changed)
            try:
                is_ours_same = is_same(make_job({"model": fields | {"mtp_layers": 0}}).model, own)
                is_reference_same = _computes_the_same(made(family, changed)[0], weights, wanted)
            except Exception:  # one of the two refuses it
                continue
            if not faults and is_ours_same != is_reference_same:
                changing = "transformers" if is_ours_same else "our model"
                yield f"{name}: {key} = {json.dumps(value)} changes {changing} alone"


def _computes_the_same(model: Any, weights: dict[str, torch.Tensor], wanted: torch.Tensor) -> bool:
    """True if a model has tensors of these shapes, and computes these logits of their values."""
    if {one: tensor.shape for one, tensor in model.state_dict().items()} != {
        one: tensor.shape for one, tensor in weights.items()
    }:
        return False
    model.load_state_dict(weights)
    return float((logits(model) - wanted).abs().max() / wanted.abs().max()) < _OTHER


def miscounted(name: str) -> Iterator[str]:
    """A line for a case, and for each of its changed keys, of which we accept a model with another number of parameters
    than that of transformers. Nothing is computed, and no weight is made."""
    family, keys = RELEASED[name]
    whole = configured(family, keys).to_dict()
    for changed, what in ((whole, "nothing changed"), *changes(json.loads(json.dumps(whole)))):
        num_own = parameters(changed | {"model_type": family})
        if num_own is None:
            continue
        try:
            with torch.device("meta"):
                model = model_of(configured(family, changed))
        except Exception:  # it refuses the change
            continue
        num_reference = sum(tensor.numel() for tensor in model.parameters() if tensor.requires_grad)
        if num_own != num_reference:
            yield f"{name}: {what}: transformers has {num_reference:,} parameters, and we have {num_own:,}"


def parameters(keys: dict[str, Any]) -> int | None:
    """The parameters of the model that we read from a configuration, without those of further tokens, which
    transformers does not make; None if it is refused."""
    fields, faults = fields_of(keys)
    try:
        model = make_job({"model": fields | {"mtp_layers": 0}}).model
    except PlanError:
        return None
    return None if faults else sum(math.prod(place.full_shape) for place in model_parameters(model))


def configured(family: str, keys: dict[str, Any]) -> Any:
    """The configuration of transformers with some keys."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    options = no_tokens(family) | {k: v for k, v in keys.items() if k != "model_type"}
    return CONFIG_MAPPING[family](**json.loads(json.dumps(options)))


def model_of(config: Any) -> Any:
    """The model of transformers of a configuration."""
    from transformers import AutoModelForCausalLM

    way = "sdpa" if getattr(config, "alibi", False) else "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes that no model has
        return AutoModelForCausalLM.from_config(config, attn_implementation=way)


def made(family: str, keys: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A model of transformers', always with the same weights where they have the same shapes, and all of its keys."""
    config = configured(family, keys)
    whole = json.loads(json.dumps(config.to_dict())) | {"model_type": family}
    torch.manual_seed(0)
    model = model_of(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_((tensor.dim() == 1) + 0.2 * torch.randn(tensor.shape, generator=generator))
    return model, whole


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Of some tokens, [B, S, V]."""
    ids_BS = torch.randint(0, 90, (2, SEQUENCE), generator=torch.Generator().manual_seed(2))
    return model(ids_BS).logits


def changes(keys: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Configurations in which one key has another value, and in words which."""
    for name, value in keys.items():
        if name in _LEFT or name == "model_type":
            continue
        for other in other_values(name, value):
            yield keys | {name: other}, f"{name} = {json.dumps(other)} (was {json.dumps(value)})"


def other_values(name: str, value: Any) -> Iterator[Any]:
    """Values of the same kind that may mean something else."""
    if isinstance(value, dict):
        if "rope_type" in value:
            yield value | {"rope_type": "linear", "factor": 2.0}
        for inner, one in value.items():
            yield from (value | {inner: other} for other in other_values(inner, one))
    elif isinstance(value, list):
        if value and all(isinstance(one, str) for one in value):
            yield value[::-1]
            yield [value[0]] * len(value)
        elif value:
            yield [1 - one if one in (0, 1) else one + 1 for one in value]
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from {value + 1, max(0, value - 1), 2 * value} - {value}
    elif isinstance(value, float):
        yield from {value * 1.5, value + 0.5} - {value}
    elif isinstance(value, str):
        yield from {*_WORDS.get(name, ())} - {value}
    elif value is None:
        yield from (True, 2, 0.5, *_WORDS.get(name, ()))


if __name__ == "__main__":
    sys.exit(main())
