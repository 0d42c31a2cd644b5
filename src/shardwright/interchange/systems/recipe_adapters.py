"""Adapters of recipes in Python, as Megatron-Bridge and NeMo have them: peft = LoRA(dim=8, target_modules=[...])."""

from typing import Any

from shardwright.interchange.reading.python_values import Named, ParsedCall

SWITCH = "recipe_lora"  # the name by which a recipe has adapters
_RENAMED = {"dim": "lora_rank", "alpha": "lora_alpha", "target_modules": "target_modules", "dropout": "lora_dropout"}
_DEFAULTS: dict[str, Any] = {
    "dim": 32,
    "alpha": 32,
    "target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
}
# They change neither how many weights are trained nor which.
_WITHOUT_EFFECT = (
    *("dropout_position", "lora_A_init_method", "lora_B_init_method", "a2a_experimental", "dropout_recompute"),
    *("sequence_parallel_input_regather", "lora_dtype"),
)


def default_peft_config(positional: list[Any], keywords: dict[str, Any]) -> ParsedCall | None:
    """The adapters that default_peft_config("lora", dim=8) of Megatron-Bridge makes; none for all weights."""
    named = dict(keywords)
    scheme = positional[0] if positional else named.pop("peft_scheme", None)
    if isinstance(scheme, ParsedCall):
        return scheme
    if scheme is None or str(scheme).lower() == "none":
        return None
    return ParsedCall("LoRA" if str(scheme).lower() == "lora" else str(scheme), named)


def class_of(call: ParsedCall | None) -> str:
    """The class that run.Config(CLASS, ...) makes, or that is called."""
    if call is None:
        return ""
    made = next((value.last for value in call.positional if isinstance(value, Named)), "")
    return made or call.callee.rpartition(".")[2]


def adapter_arguments(peft: Any) -> dict[str, Any]:
    """Arguments for what a recipe has as `peft`, for read_adapter(); another kind than LoRA keeps its name, which is
    refused. Empty if all weights are trained."""
    if peft is None or str(peft).lower() == "none":
        return {}
    call = peft if isinstance(peft, ParsedCall) else ParsedCall(str(peft))
    if class_of(call).lower() != "lora":
        return {"peft": class_of(call)}
    given = {name: value for name, value in call.keywords.items() if name not in _WITHOUT_EFFECT and value is not None}
    given = _DEFAULTS | {name: value for name, value in given.items() if value is not False}
    if not given.get("dropout"):
        given.pop("dropout", None)
    given.pop("share_expert_adapters", None)  # of experts, whose adapters are asked about
    return {SWITCH: "1"} | {_RENAMED.get(name, f"peft.{name}"): value for name, value in given.items()}
