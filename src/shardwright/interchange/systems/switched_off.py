"""Options of trainers that mean nothing where the option that switches them on is absent or has another value, such as
galore_rank without use_galore. Files are copied from others, and keep them."""

from dataclasses import dataclass

from shardwright.interchange.reading.settings import Flat, Settings

_TRUE = ("true", "1", "yes")


@dataclass(frozen=True)
class _Family:
    """Options with one of some beginnings, and the switch with one of some words that they need. Without `is_default`
    an absent switch is off; with it, only another word than these switches them off."""

    switch: str
    words: tuple[str, ...]
    beginnings: tuple[str, ...]
    is_default: bool = False


_BITS = ("2", "3", "4", "5", "6", "8")
_OF_QUANTISED = ("quantization_type", "quantization_method", "double_quantization")
_OF_PREFERENCES = ("pref_", "dpo_label", "kto_", "ppo_", "simpo_", "ld_alpha", "ref_model", "reward_model")
# Fields of LLaMA-Factory's classes of arguments, and settings of axolotl's.
_FAMILIES = (
    _Family("use_galore", _TRUE, ("galore_",)),
    _Family("use_apollo", _TRUE, ("apollo_",)),
    _Family("use_badam", _TRUE, ("badam_",)),
    _Family("use_kt", _TRUE, ("kt_",)),
    _Family("use_hyper_parallel", _TRUE, ("hyper_parallel_",)),
    _Family("finetuning_type", ("freeze",), ("freeze_trainable_", "freeze_extra_"), is_default=True),
    _Family("finetuning_type", ("oft",), ("oft_",), is_default=True),
    _Family("load_in_4bit", _TRUE, ("bnb_4bit_", "use_bnb_nested_quant"), is_default=True),
    _Family("quantization_bit", _BITS, _OF_QUANTISED),
    _Family("stage", ("rm", "ppo", "dpo", "kto"), _OF_PREFERENCES, is_default=True),
    _Family("use_unsloth", _TRUE, ("unsloth_",), is_default=True),
    # relora_steps, of releases before 2025-08, is itself the switch there
    _Family("relora", _TRUE, ("relora_warmup", "relora_anneal", "relora_prune", "relora_cpu", "jagged_restart_")),
    _Family("use_pose", _TRUE, ("pose_",)),
)


def ignore_switched_off(settings: Settings, _: Flat) -> None:
    """Mark as read the options that another one switches off."""
    for family in _FAMILIES:
        value = settings.given.get(f"--{family.switch}")
        is_on = str(value).strip("'\"").lower() in family.words
        if is_on or (value is None and family.is_default):
            continue
        beginnings = tuple(f"--{beginning}" for beginning in family.beginnings)
        settings.ignore(*(name for name in settings.given if name.startswith(beginnings)))
