"""Options of `accelerate launch`, which say the same as Accelerate's configuration."""

from shardwright.config.phrase import say
from shardwright.interchange.known_settings import subject_of
from shardwright.interchange.launcher import Launched
from shardwright.interchange.reading.settings import Settings, plain_text
from shardwright.interchange.reading.shell_marks import unknown_names

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
_WORDS_OF_NO = ("distributed_type", "mixed_precision")
_FILE = "deepspeed_config_file"
_COUNTS = ("--num_machines", "--num_processes")
# Sections of DeepSpeed's own configuration, in which its known keys may stand.
_OF_DEEPSPEED = ("", "zero_optimization.")


def put_options_of_launcher(settings: Settings, command: Launched | None, devices: int) -> None:
    """Put the options of `accelerate launch` under the names that its configuration has for them, and keys of the
    section fsdp_config, which may lack their prefix, under whole names. Counts of processes that depend on unknown
    variables are left out if the user says how many `devices` there are."""
    for name in _WORDS_OF_NO:
        if settings.given.get(name) is False:  # the word no, which YAML takes for false
            settings.given[name] = "NO"
    section = FSDP.removesuffix("fsdp_")
    whole = {name: FSDP + name.removeprefix(section) for name in settings.given if _lacks_prefix(name, section)}
    settings.given = {whole.get(name, name): value for name, value in settings.given.items()}
    settings.spelled = dict(settings.spelled) | {key: name for name, key in whole.items()}
    if settings.has(_FILE) and not settings.has(DEEPSPEED + _FILE):  # at the top of the file, where people write it
        settings.given[DEEPSPEED + _FILE] = settings.given.pop(_FILE)
    if settings.flag("use_cpu"):
        settings.lose("use_cpu", say("it computes on processors there, and on the devices of the job here"))
    for name in _COUNTS if devices else ():
        if unknown_names(plain_text(settings.given.get(name, ""))):
            del settings.given[name]
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


def _lacks_prefix(name: str, section: str) -> bool:
    return name.startswith(section) and not name.startswith(FSDP)


def tell_dropped(settings: Settings) -> None:
    """Tell which keys of DeepSpeed's own stand in the section deepspeed_config and have no effect there. Call it after
    the settings are read."""
    dropped = [
        name
        for name in settings.unread()
        if name.startswith(DEEPSPEED)
        and not subject_of("accelerate", name)
        and _is_of_deepspeed(name.removeprefix(DEEPSPEED))
    ]
    if dropped:
        settings.ignore(*dropped)
        settings.lost.append(
            say(
                "{settings}: Accelerate takes none of this from its section deepspeed_config; a file of DeepSpeed's "
                "that deepspeed_config_file names may say it",
                settings=tuple(map(settings.setting_text, dropped)),
            )
        )


def _is_of_deepspeed(key: str) -> bool:
    return key.startswith(("tensor_parallel.", "zero_optimization.")) or any(
        subject_of("deepspeed", f"{part}{key}") for part in _OF_DEEPSPEED
    )


def uneven_processes(processes: int, machines: int) -> list[str]:
    """A fault if machines do not have the same number of processes each, or none."""
    if processes % machines == 0:
        return []
    return [
        say(
            "num_processes counts the processes of all machines, and {processes} on {machines} machines are "
            "{processes} / {machines} = {share:.2f} of each; say how many GPUs there are with --devices",
            processes=processes,
            machines=machines,
            share=processes / machines,
        )
    ]
