"""An adapter that peft wrote, as the initial values of a job's adapters."""

from pathlib import Path
from typing import Any

from shardwright.config.base import PlanError, shortened
from shardwright.config.hugging_face.config_json import ADAPTER, read_keys
from shardwright.config.model import ModelSpec
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
        faults.append(f"it has no {listed(missing)}; set model.adapter.targets to its target_modules")
    if unknown := [name for name in files.tensors if name not in pieces]:
        faults.append(f"it has {listed(unknown)}, of maps that are no targets; add them to model.adapter.targets")
    for name, piece in pieces.items():
        stored = files.tensors.get(name)
        if stored is not None and (stored.shape != piece.shape or not is_floating(stored)):
            faults.append(
                f"{name} is {list(stored.shape)} of {stored.dtype} and should be {list(piece.shape)} of floating "
                "numbers; name an adapter of this model"
            )
    if faults:
        raise PlanError(f"model.adapter.weights {folder}", faults)
    return ReleasedTensors(files, layout)


def _faults_of_keys(keys: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Faults of an adapter's configuration beside a job's."""
    fields = (("r", "rank"), ("lora_alpha", "alpha"))
    faults = [
        f"its {key} is {shortened(repr(keys.get(key)))}, and model.adapter.{field} {expected[key]}; set it to that"
        for key, field in fields
        if keys.get(key) != expected[key]
    ]
    if keys.get("peft_type") != "LORA":
        faults.append(f"its peft_type is {shortened(repr(keys.get('peft_type')))}, and LORA alone is read")
    return faults + [
        f"its {key} is {shortened(repr(keys[key]))}, which is not read here; name a plain adapter"
        for key, allowed in _WITHOUT_EFFECT.items()
        if key in keys and keys[key] not in allowed
    ]
