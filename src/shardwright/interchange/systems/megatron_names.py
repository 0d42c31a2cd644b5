"""Names of Megatron-LM's arguments in configurations, which have underscores, and true or false, and its flags."""

from collections.abc import Mapping
from typing import Any

# Arguments that are true by default -> the flag that switches them off.
_SWITCHED_OFF = {
    "add_bias_linear": "disable-bias-linear",
    "bias_gelu_fusion": "no-bias-gelu-fusion",
    "bias_swiglu_fusion": "no-bias-swiglu-fusion",
    "bias_dropout_fusion": "no-bias-dropout-fusion",
    "bias_activation_fusion": "no-bias-swiglu-fusion",
    "masked_softmax_fusion": "no-masked-softmax-fusion",
    "apply_rope_fusion": "no-rope-fusion",
    "gradient_accumulation_fusion": "no-gradient-accumulation-fusion",
    "fp8_wgrad": "no-fp8-wgrad",
    "add_position_embedding": "no-position-embedding",
    "overlap_p2p_comm": "no-overlap-p2p-communication",
    "async_tensor_model_parallel_allreduce": "no-async-tensor-model-parallel-allreduce",
    "scatter_gather_tensors_in_pipeline": "no-scatter-gather-tensors-in-pipeline",
    "perform_initialization": "no-initialization",
    "share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
}
# Other names of arguments -> flags with the same values.
_RENAMED = {
    "fp8": "fp8-format",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "num_moe_experts": "num-experts",
    "layernorm_epsilon": "norm-epsilon",
    "cp_size": "context-parallel-size",
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
}
# The options of _SWITCHED_OFF that a job decides.
_WRITTEN_OFF = {
    name: _SWITCHED_OFF[name]
    for name in ("add_bias_linear", "bias_gelu_fusion", "fp8_wgrad", "gradient_accumulation_fusion")
}
_WRITTEN = {"fp8-format": "fp8"}  # flag -> argument of another name
_WITHOUT_VALUE = ("none", "null", "")


def flags_of(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(Megatron-LM's flags, their names as the configuration has them). Options that are off or null are left out."""
    flags: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for name, written in arguments.items():
        value = {"true": True, "false": False}.get(written.lower(), written) if isinstance(written, str) else written
        flag = _SWITCHED_OFF.get(name)
        if flag is not None:
            value = value is False or None
        else:
            flag = _RENAMED.get(name, name.replace("_", "-"))
        if flag == "num-virtual-stages-per-pipeline-rank" and value == 1:
            value = None
        if isinstance(value, dict) and value.get("enabled") is False:
            value = None
        if value is None or value is False or (isinstance(value, str) and value.lower() in _WITHOUT_VALUE):
            continue
        flags[flag] = value
        spelled[flag] = name
    return flags, spelled


def is_said(flag: str, arguments: Mapping[str, Any]) -> bool:
    """True if arguments give a flag a value, even one that switches it off: a default counts without it alone."""
    return any(
        value is not None and _RENAMED.get(name, _SWITCHED_OFF.get(name) or name.replace("_", "-")) == flag
        for name, value in arguments.items()
    )


def arguments_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Megatron-LM's flags: with underscores, and what is on by default as true or false."""
    on = {name: flag not in flags for name, flag in _WRITTEN_OFF.items()}
    off = {*_WRITTEN_OFF.values()}
    kept = {flag: value for flag, value in flags.items() if flag not in off}
    return on | {_WRITTEN.get(flag, flag.replace("-", "_")): value for flag, value in kept.items()}
