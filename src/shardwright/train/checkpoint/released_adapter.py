"""An adapter that peft wrote, as the initial values of a job's adapters."""

from pathlib import Path
from typing import Any

from shardwright.config.base import PlanError, shortened
from shardwright.config.hugging_face.config_json import ADAPTER, read_keys
from shardwright.config.model import ModelSpec
from shardwright.config.phrase import say
from shardwright.sharding.hugging_face.adapter_layout import adapter_keys, adapter_layout
from shardwright.train.checkpoint.released_files import ReleasedFiles, is_floating, listed
from shardwright.train.checkpoint.released_weights import ReleasedTensors
from shardwright.train.checkpoint.safetensors_folder import ADAPTER_FILE

# Keys of adapter_config.json that change what an adapter adds, and the values without effect.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none",),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
    "exclude_modules": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
}


def released_adapter(family: str, model: ModelSpec) -> ReleasedTensors:
    """The adapter in the folder `model.adapter.weights`, for a model of a family. Raises PlanError with every fault:
    another rank, factor or kind of adapter, tensors that are missing, of another shape or of other maps."""
    folder = Path(model.adapter.weights)
    layout = adapter_layout(family, model)
    faults = _faults_of_keys(read_keys(folder / ADAPTER), adapter_keys(family, model))
    if faults:
        raise PlanError(f"model.adapter.weights {folder}", faults)
    files = ReleasedFiles(folder, ADAPTER_FILE)
    pieces = {piece.name: piece for of_tensor in layout.values() for piece in of_tensor}
    if missing := [name for name in pieces if name not in files.tensors]:
        faults.append(
            say("it has no {missing}; set model.adapter.targets to its target_modules", missing=listed(missing))
        )
    if unknown := [name for name in files.tensors if name not in pieces]:
        faults.append(
            say(
                "it has {unknown}, of maps that are no targets; add them to model.adapter.targets",
                unknown=listed(unknown),
            )
        )
    for name, piece in pieces.items():
        stored = files.tensors.get(name)
        if stored is not None and (stored.shape != piece.shape or not is_floating(stored)):
            faults.append(
                say(
                    "{name} is {shape} of {dtype} and should be {wanted} of floating numbers; name an adapter of "
                    "this model",
                    name=name,
                    shape=list(stored.shape),
                    dtype=stored.dtype,
                    wanted=list(piece.shape),
                )
            )
    if faults:
        raise PlanError(f"model.adapter.weights {folder}", faults)
    return ReleasedTensors(files, layout)


def _faults_of_keys(keys: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Faults of an adapter's configuration beside a job's."""
    fields = (("r", "rank"), ("lora_alpha", "alpha"))
    faults: list[str] = [
        say(
            "its {key} is {value}, and model.adapter.{field} {expected}; set it to that",
            key=key,
            value=shortened(repr(keys.get(key))),
            field=field,
            expected=expected[key],
        )
        for key, field in fields
        if keys.get(key) != expected[key]
    ]
    if keys.get("peft_type") != "LORA":
        faults.append(
            say("its peft_type is {kind}, and LORA alone is read", kind=shortened(repr(keys.get("peft_type"))))
        )
    return faults + [
        say(
            "its {key} is {value}, which is not read here; name a plain adapter",
            key=key,
            value=shortened(repr(keys[key])),
        )
        for key, allowed in _WITHOUT_EFFECT.items()
        if key in keys and keys[key] not in allowed
    ]
