"""DeepSpeed's settings under Accelerate's names for them, read as DeepSpeed's own."""

from typing import Any

from shardwright.interchange.reading.settings import Settings
from shardwright.interchange.systems.accelerate_launcher import PREFIXES

_, _, _MEGATRON, _PREFIX = PREFIXES
# Accelerate's names for settings of DeepSpeed -> DeepSpeed's.
_NAMES = {
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "gradient_clipping": "gradient_clipping",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}


def take_over(settings: Settings, renamed: Settings) -> None:
    """Take over what was found and read under DeepSpeed's names."""
    for name in ("faults", "notes", "lost"):
        getattr(settings, name).extend(getattr(renamed, name))
    settings.needed |= {_own_name(settings, key): text for key, text in renamed.needed.items()}
    settings.names_read |= renamed.names_read
    settings.ignore(*(_PREFIX + name for name, key in _NAMES.items() if key in renamed.names_read))


def _own_name(settings: Settings, key: str) -> str:
    """The name that a setting has in the files, of DeepSpeed's key for it."""
    names = (f"--{key}", *(_PREFIX + name for name, other in _NAMES.items() if other == key))
    return next((name for name in names if settings.given.get(name) is not None), key)


def deepspeed_keys(given: dict[str, Any]) -> dict[str, Any]:
    """Settings under DeepSpeed's names for them, beside the original names."""
    keys = given | {key: given[_PREFIX + name] for name, key in _NAMES.items() if _PREFIX + name in given}
    if "--gradient_accumulation_steps" in given:
        keys["gradient_accumulation_steps"] = given["--gradient_accumulation_steps"]
    elif _MEGATRON + "num_micro_batches" in given:
        keys["gradient_accumulation_steps"] = given[_MEGATRON + "num_micro_batches"]
    return keys
