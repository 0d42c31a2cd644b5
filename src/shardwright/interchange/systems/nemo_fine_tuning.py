"""NeMo's fine-tuning: the model that a .nemo file has, and adapters (LoRA), as flags of Megatron-LM."""

from collections.abc import Mapping
from typing import Any

from shardwright.config.base import shortened
from shardwright.interchange.imported import Asked
from shardwright.interchange.named_model import asks_for_shape, shape_fields
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.training_programs import other_loss_fault, program_fault

_PEFT = "model.peft."
_LORA = _PEFT + "lora_tuning."
_SCHEME = _PEFT + "peft_scheme"
_TIED = _LORA + "weight_tying"
# Flags by which adapters are read -> NeMo's keys.
KEYS_OF_ADAPTERS = {
    "peft-scheme": _SCHEME,
    "lora-r": _LORA + "adapter_dim",
    "lora-alpha": _LORA + "alpha",
    "lora-dropout": _LORA + "adapter_dropout",
    "lora-target-modules": _LORA + "target_modules",
}
_TARGETS = {
    "attention_qkv": "linear_qkv",
    "attention_dense": "linear_proj",
    "mlp_fc1": "linear_fc1",
    "mlp_fc2": "linear_fc2",
    "attention": "linear_qkv,linear_proj",
    "mlp": "linear_fc1,linear_fc2",
    "all": "all",
}
# Keys that say how adapters begin, or something of another scheme.
_OF_ADAPTERS = ("variant", "column_init_method", "row_init_method", "position_embedding_strategy")
_OTHER_SCHEMES = ("p_tuning.", "ia3_tuning.", "adapter_tuning.", "selective_tuning.", "restore_from_")
# Sections of NeMo-Aligner's stages that learn by preferences or rewards.
_STAGES = ("dpo", "ppo", "reinforce", "rs", "spin", "rm", "kd", "knowledge_distillation")
_OTHER_LOSSES = (*(f"{part}.{stage}." for part in ("model", "trainer") for stage in _STAGES), "remote_critic_rm.")
_SHAPE = ("model.num_layers", "model.hidden_size", "model.num_attention_heads")
_RESTORED = ("model.restore_from_path", "model.restore_path")


def other_training(flat: Mapping[str, Any], asked: Asked) -> str:
    """The fault of a file of NeMo's or NeMo-Aligner's that trains no decoder of text by next tokens; "" if none."""
    of_others = [name for name in flat if name.startswith(_OTHER_LOSSES) or name == "model.reward_model_type"]
    if of_others:
        return other_loss_fault([f"{of_others[0]} = {shortened(str(flat[of_others[0]]), 40)}"])
    of_runs = [str(flat.get(name, "")) for name in ("run.name", "exp_manager.name")]
    names = [str(flat.get("name", "")), *(name for name in of_runs if "mamba" in name.lower())]
    return next(filter(None, (program_fault(name, asked.variables) for name in names)), "")


def without_unused_adapters(flat: dict[str, Any]) -> dict[str, Any]:
    """Settings without those of adapters, if the scheme of adapters is said and is none."""
    if str(flat.get(_SCHEME, "lora")).lower() not in ("none", "null"):
        return flat
    return {name: value for name, value in flat.items() if not name.startswith(_PEFT)}


def _is_lora(flat: Mapping[str, Any]) -> bool:
    return str(flat.get(_SCHEME, "")).lower() == "lora" and flat.get(_LORA + "layer_selection") is None


def adapter_flags(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of LoRA in all layers; none of another scheme, which stays unread."""
    if not _is_lora(flat):
        return {}
    flags = {flag: flat[key] for flag, key in KEYS_OF_ADAPTERS.items() if flat.get(key) is not None}
    if flags.get("lora-dropout") == 0:
        del flags["lora-dropout"]
    modules = flags.get("lora-target-modules", [])
    words = [str(module) for module in (modules if isinstance(modules, list) else [modules])]
    if words:
        flags["lora-target-modules"] = ",".join(_TARGETS.get(word, word) for word in words)
    if "lora-r" in flags:
        flags.setdefault("lora-alpha", flags["lora-r"])
    return flags


def adapter_keys(flat: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys that are read with LoRA, or that mean nothing beside it."""
    if not _is_lora(flat):
        return ()
    unused = tuple(_PEFT + name for name in _OTHER_SCHEMES)
    named = (*KEYS_OF_ADAPTERS.values(), *(_LORA + name for name in _OF_ADAPTERS), _LORA + "layer_selection")
    tied = () if flat.get(_TIED) else (_TIED,)  # all layers have the same adapters with it
    return (*named, *tied, *(name for name in flat if name.startswith(unused)))


def restored_shape(flat: Mapping[str, Any], settings: Settings, asked: Asked) -> Flat | None:
    """The fields of a model that a .nemo file has and no key says: those of --set, or a fault that asks for them. None
    if the keys say the shape, or no file is named."""
    name = next((name for name in _RESTORED if flat.get(name)), "")
    if not name or any(flat.get(key) is not None for key in _SHAPE):
        return None
    setting = f"{name} = {shortened(str(flat[name]), 60)}"
    return {} if asks_for_shape(setting, settings, asked) else shape_fields({}, asked)
