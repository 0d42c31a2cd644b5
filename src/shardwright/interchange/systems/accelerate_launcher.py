"""Options of `accelerate launch`, which say the same as Accelerate's configuration."""

from shardwright.interchange.launcher import Launched
from shardwright.interchange.reading.settings import Settings

# Prefixes of the keys of the configuration's sections.
PREFIXES = PARALLEL, FSDP, MEGATRON, DEEPSPEED = (
    "parallelism_config.parallelism_config_",
    "fsdp_config.fsdp_",
    "megatron_lm_config.megatron_lm_",
    "deepspeed_config.",
)
# Options that say the kind, and beginnings of the names of others with their sections.
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
