"""Options that say the same as Accelerate's configuration: those of `accelerate launch`, and --fsdp of programs."""

import json
from typing import Any

from shardwright.config.base import shortened
from shardwright.interchange.launcher import Launched
from shardwright.interchange.reading.settings import Settings

# Prefixes of the keys of the sections.
PARALLEL, FSDP, MEGATRON, DEEPSPEED = (
    "parallelism_config.parallelism_config_",
    "fsdp_config.fsdp_",
    "megatron_lm_config.megatron_lm_",
    "deepspeed_config.",
)
# FSDP strategies in the order of their numbers, which begin at 1 -> (ZeRO stage, each machine has a full copy).
STRATEGIES = {
    "FULL_SHARD": (3, False),
    "SHARD_GRAD_OP": (2, False),
    "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True),
    "HYBRID_SHARD_ZERO2": (2, True),
}
# Keys of the file that --fsdp_config names.
FSDP_FILE_KEYS = (
    "reshard_after_forward", "fsdp_reshard_after_forward", "activation_checkpointing", "auto_wrap_policy",
    "transformer_layer_cls_to_wrap", "fsdp_transformer_layer_cls_to_wrap", "min_num_params", "version",
    "backward_prefetch", "fsdp_backward_prefetch", "forward_prefetch", "fsdp_forward_prefetch", "cpu_offload",
    "use_orig_params", "fsdp_use_orig_params", "state_dict_type", "limit_all_gathers", "xla",
    "cpu_ram_efficient_loading", "sync_module_states",
)  # fmt: skip
# Options of `accelerate launch`: those that say the kind, and beginnings of names with their sections.
_KINDS = {"--use_deepspeed": "DEEPSPEED", "--use_fsdp": "FSDP", "--use_megatron_lm": "MEGATRON_LM"}
_SECTIONS = {
    "fsdp_": FSDP,
    "megatron_lm_": MEGATRON,
    "parallelism_config_": PARALLEL,
    "offload_": DEEPSPEED + "offload_",
    "gradient_clipping": DEEPSPEED + "gradient_clipping",
    "zero_stage": DEEPSPEED + "zero_stage",
}


def put_options_of_launcher(settings: Settings, command: Launched | None) -> None:
    """Put the options of `accelerate launch` under the names that its configuration has for them."""
    if command is None or command.launcher != "accelerate":
        return
    for name in command.launcher_settings:
        option = name.replace("-", "_")
        beginning = next((beginning for beginning in _SECTIONS if option.startswith(beginning)), "")
        key = _SECTIONS[beginning] + option.removeprefix(beginning) if beginning else ""
        if key and f"--{option}" in settings.given:
            settings.given[key] = settings.given.pop(f"--{option}")
            settings.spelled = dict(settings.spelled) | {key: f"--{option}"}
    if kind := next((kind for option, kind in _KINDS.items() if settings.flag(option)), ""):
        settings.given["distributed_type"] = kind


def put_options_of_fsdp(settings: Settings) -> None:
    """Put the program's options --fsdp and --fsdp_config under Accelerate's names for them."""
    words = [word.strip("'\"") for word in settings.words("--fsdp")]
    if not words and settings.given.get("--fsdp") is not True:
        return
    settings.given["distributed_type"] = "FSDP"
    options: dict[str, Any] = {}
    for word in words:
        if word.upper() in STRATEGIES:
            options["sharding_strategy"] = word
        elif word == "offload":
            options["offload_params"] = True
        elif word.lower() not in ("auto_wrap", "true"):
            settings.faults.append(
                f"--fsdp {shortened(word)} can't be said here; use one of {', '.join(STRATEGIES).lower()}"
            )
    text = settings.text("--fsdp_config")
    try:
        file_options = json.loads(text) if text.lstrip().startswith("{") else {}
    except (ValueError, RecursionError):
        settings.faults.append(
            f"{settings.setting_text('--fsdp_config')}: it should be JSON, or the name of a file of it"
        )
        file_options = {}
    file_options |= {name: settings.given.pop(name) for name in FSDP_FILE_KEYS if name in settings.given}
    options |= {str(name).removeprefix("fsdp_"): value for name, value in file_options.items()}
    settings.spelled = dict(settings.spelled) | {
        FSDP + str(name).removeprefix("fsdp_"): f"fsdp_config.{name}" for name in file_options
    }
    names = {"cpu_offload": "offload_params", "fsdp_version": "version"}
    settings.given |= {FSDP + names.get(name, name): value for name, value in options.items()}
