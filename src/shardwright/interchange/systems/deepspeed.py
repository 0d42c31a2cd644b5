"""DeepSpeed's configuration, with its launch script and config.json: to a job, and from a job."""

import json
from collections.abc import Mapping
from typing import Any

from shardwright.config import largest
from shardwright.config.dotted_keys import nested_keys
from shardwright.config.job import JobSpec
from shardwright.config.number_types import number_called
from shardwright.config.phrase import both, say
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.known_settings import program
from shardwright.interchange.reading.file_signs import GENERAL, FileSigns
from shardwright.interchange.reading.loose_words import loose_faults
from shardwright.interchange.reading.script_text import RENDEZVOUS, nodes_of, torchrun_line
from shardwright.interchange.reading.setting_notes import none_of_few, priced_as, wrong_value
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.rows import Rule, Table, degree, read_row, write_table
from shardwright.interchange.system import System
from shardwright.interchange.systems import alpaca_lora
from shardwright.interchange.systems.deepspeed_batch import WORLD, read_batch
from shardwright.interchange.systems.liger import with_liger
from shardwright.interchange.systems.training_arguments import (
    OPTIONS,
    RING_SIZE,
    SHARD_SIZES,
    TENSOR_SIZE,
    FileParts,
    model_file,
    option_lines,
    read_model,
    read_parts,
)

SIGNS = (
    FileSigns(
        (("zero_optimization",), ("train_batch_size",), ("train_micro_batch_size_per_gpu",)),
        commands=(
            r"--deepspeed(_config)?[ =]\S+\.json",
            r"^[ \t]*deepspeed\b[^;&|]{0,600}?\.py[ \t\\\n]+[\w./-]{1,200}\.ya?ml\b",  # with the options of a Trainer
            r"(?s)--per_device_train_batch_size\b.*--deepspeed\b|--deepspeed\b.*--per_device_train_batch_size\b",
        ),
        weight=GENERAL,
    ),
)
OPTION_SYSTEMS = ("trl", "llamafactory")  # programs whose options go with the files of an engine
SOFTWARE = "deepspeed-2025"  # as which jobs of this engine are priced, whatever program they run
_ZERO = "zero_optimization."
STAGE = (_ZERO + "stage",)
_OFFLOADED = ("none", "cpu", "nvme")  # words for where something is offloaded
_TOP_LEVEL_KEYS = frozenset((
    "train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "bf16", "fp16", "gradient_clipping",
    "gradient_accumulation_steps", "optimizer", "scheduler", "steps_per_print",
))  # fmt: skip


def _write_batch(job: JobSpec, settings: dict[str, Any]) -> None:
    plan, size = job.plan, job.batch.global_batch_size
    settings |= {"train_batch_size": size, "train_micro_batch_size_per_gpu": plan.microbatch_size}
    settings["gradient_accumulation_steps"] = job.num_microbatches


def read_zero(settings: Settings, fields: Flat) -> None:
    """Read the ZeRO stage, what is offloaded, and over how many ranks ZeRO shards."""
    is_on = settings.flag(_ZERO.removesuffix("."))  # true in place of a section is stage 1 (older files)
    stage = settings.count((_ZERO + "stage", "--zero_stage"), int(is_on))
    if stage > 3:
        settings.faults.append(wrong_value(f"zero_optimization.stage = {stage}", say("0 to 3")))
        stage = 0
    fields["plan.zero"] = stage
    _read_open(settings)
    if (stage and settings.text(_ZERO + "offload_optimizer.device", "none") != "none") or settings.flag(
        _ZERO + "cpu_offload"
    ):
        fields["plan.offload_optimizer"] = settings.number(_ZERO + "offload_optimizer.ratio", 1.0)
    if settings.flag("--offload") and stage:  # of DeepSpeed's own programs
        fields |= {"plan.offload_optimizer": 1.0, "plan.offload_parameters": stage == 3}
    are_parameters_offloaded = settings.flag(
        tuple(_ZERO + name for name in ("cpu_offload_param", "cpu_offload_params"))
    )
    if (are_parameters_offloaded or settings.text(_ZERO + "offload_param.device", "none") != "none") and stage == 3:
        fields["plan.offload_parameters"] = True
    elif stage < 3 and settings.text(_ZERO + "offload_param.device", "none") != "none":
        settings.lose(_ZERO + "offload_param.device", say("parameters are offloaded by stage 3 alone"))
    devices = [settings.text(_ZERO + name, "none") for name in ("offload_optimizer.device", "offload_param.device")]
    for name, device in zip(("offload_optimizer", "offload_param"), devices, strict=True):
        if device not in _OFFLOADED:
            settings.faults.append(none_of_few(settings.setting_text(f"{_ZERO}{name}.device"), [*_OFFLOADED]))
    if "nvme" in devices:
        settings.lost.append(say("what is offloaded to NVMe there is in host memory here"))
    if stage == 3 and settings.has(_ZERO + "mics_shard_size"):  # a setting of releases before 2026
        fields["plan.zero_ranks"] = settings.count(_ZERO + "mics_shard_size", 0)
    for name in SHARD_SIZES:
        if settings.count(name, 0) not in (0, 1, fields["plan.dp"]):
            settings.lost.append(say("{setting}: DeepSpeed shards over all ranks", setting=settings.setting_text(name)))
    settings.lose(
        _ZERO + "zero_hpz_partition_size", say("a second copy of the parameters in each node is not made here")
    )
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        if settings.flag(_ZERO + name):
            settings.lost.append(
                say("{setting}: what travels is not quantised here", setting=settings.setting_text(_ZERO + name))
            )


def _read_open(settings: Settings) -> None:
    """Ask for a stage that is "auto", which the program's launcher fills in, and tell that nothing is offloaded where
    the device is."""
    if _ZERO + "stage" in settings.automatic and "plan.zero" not in settings.overrides:
        setting = f"{_ZERO}stage = auto"
        settings.faults.append(
            say("{setting}: the launcher fills it in; say the stage with --set plan.zero=N", setting=setting)
        )
    devices = [f"{_ZERO}{name}.device" for name in ("offload_optimizer", "offload_param")]
    if automatic := tuple(f"{name} = auto" for name in devices if name in settings.automatic):
        settings.note(say("{settings}: nothing is offloaded, as Accelerate fills it in", settings=automatic))


def _write_zero(job: JobSpec, settings: dict[str, Any]) -> None:
    plan = job.plan
    settings[_ZERO + "stage"] = plan.zero if plan.replicas > 1 else 0
    if plan.pp > 1:
        settings[_ZERO + "stage"] = min(1, settings[_ZERO + "stage"])
    if plan.offload_optimizer and settings[_ZERO + "stage"]:
        settings[_ZERO + "offload_optimizer.device"] = "cpu"
        if plan.offload_optimizer != 1.0 and settings[_ZERO + "stage"] == 3:  # partial offload: ZeRO-Offload++
            settings[_ZERO + "offload_optimizer.ratio"] = plan.offload_optimizer
    if plan.offload_parameters and plan.zero == 3:
        settings[_ZERO + "offload_param.device"] = "cpu"


def tell_open_numbers(settings: Settings) -> None:
    """Tell that numbers are float32 where a program's option would say them, and is not there."""
    names = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")
    open_names = [name for name in names if name in settings.automatic]
    if open_names and not settings.has("--bf16", "--fp16"):
        settings.note(
            say(
                "{names} is auto, and no option --bf16 or --fp16 of the program is there, so numbers are float32 "
                "(--set precision.compute=bf16)",
                names=both(open_names),
            )
        )


def tell_own_numbers(settings: Settings) -> None:
    """Tell that DeepSpeed passes over a section fp8, which people write beside fp16 and bf16."""
    names = tuple(name for name in settings.given if name.startswith("fp8."))
    settings.ignore(*names)
    if settings.flag("fp8.enabled"):
        settings.lost.append(
            say(
                "{setting}: DeepSpeed has no section fp8, so numbers are as the other settings say",
                setting="fp8.enabled = True",
            )
        )


def read_numbers(settings: Settings, fields: Flat) -> None:
    """Read the number types of compute, gradients, and their reduction, and the loss scale."""
    tell_open_numbers(settings)
    tell_own_numbers(settings)
    bf16 = settings.flag(("bf16.enabled", "bfloat16.enabled", "--bf16"))
    fp16 = settings.flag(("fp16.enabled", "--fp16")) and not bf16
    if settings.has("--zero_stage") and not bf16 and not fp16:  # DeepSpeed's own programs, whose default is fp16
        bf16 = settings.one_of("--dtype", {"fp16": False, "bf16": True}, "fp16", "precision.compute")
        fp16 = not bf16
        settings.note(
            say(
                "numbers are {number}, as of DeepSpeed-Chat's programs (--set precision.compute=NAME)",
                number="bf16" if bf16 else "fp16",
            )
        )
    fields["precision.compute"] = "bf16" if bf16 else "fp16" if fp16 else _autocast(settings)
    read_gradients(settings, fields)
    _read_narrow_state(settings, fields)
    if fp16:
        constant = settings.number("fp16.loss_scale", 0.0)
        fields["precision.loss_scale"] = constant or 2.0 ** min(63, settings.count("fp16.initial_scale_power", 16))
        fields["precision.loss_scale_growth_steps"] = 0 if constant else settings.count("fp16.loss_scale_window", 1000)


def _autocast(settings: Settings) -> str:
    """The numbers of compute where the engine's are float32: those of torch.autocast, if it is on."""
    if not settings.flag("torch_autocast.enabled"):
        settings.ignore("torch_autocast.dtype")
        return "float32"
    words = {"bfloat16": "bf16", "float16": "fp16", "float32": "float32"}
    word = settings.text("torch_autocast.dtype", "bfloat16").removeprefix("torch.")
    settings.lost.append(say("{setting}: gradients are float32 here", setting="torch_autocast.enabled = True"))
    return words.get(word, "bf16")


def _read_narrow_state(settings: Settings, fields: Flat) -> None:
    """Read that weights and gradients, or moments too, have the optimizer's numbers of 16 bits (since release 0.18)."""
    number = str(fields["precision.compute"])
    if settings.flag(f"{number}.{number}_master_weights_and_grads"):
        fields |= {"precision.master": "none", "precision.gradients": "compute"}
    if number == "bf16" and settings.flag("bf16.bf16_optimizer_states"):
        fields["precision.moments"] = "bf16"


_GRADIENTS = {"fp32": "float32", "float32": "float32", "bf16": "compute", "bfloat16": "compute", "fp16": "compute"}


def read_gradients(settings: Settings, fields: Flat) -> None:
    """Read the number types in which gradients add up and travel; by default that of compute."""
    is_wide = fields["precision.compute"] == "float32" or settings.flag("torch_autocast.enabled")
    default = "fp32" if is_wide else "bf16"
    fields["precision.gradients"] = settings.one_of("data_types.grad_accum_dtype", _GRADIENTS, default)
    _read_reduce_type(settings, fields)


def _read_reduce_type(settings: Settings, fields: Flat) -> None:
    word = settings.text("communication_data_type", "")
    adds_up_in = fields["precision.compute"] if fields["precision.gradients"] == "compute" else "float32"
    number = number_called(word)
    if number == "float32" and adds_up_in != "float32":
        fields["precision.reduce"] = "float32"
    elif word and number != adds_up_in:
        settings.lost.append(
            say(
                "{setting}: gradients travel here in the numbers in which they add up, or in float32; plan.compress "
                "sends them in fewer bits",
                setting=f"communication_data_type = {word[:40]}",
            )
        )


def _write_numbers(job: JobSpec, settings: dict[str, Any]) -> None:
    precision = job.precision
    for name in ("bf16", "fp16"):
        if precision.compute == name:
            settings |= {f"{name}.enabled": True, f"--{name}": True}
    if precision.compute != "float32":
        settings["data_types.grad_accum_dtype"] = (
            "fp32" if precision.gradient_number == "float32" else precision.compute
        )
        if precision.reduce_number == "float32" and precision.gradient_number != "float32":
            settings["communication_data_type"] = "fp32"
    if precision.compute == "fp16" and precision.loss_scale:
        power = precision.loss_scale.hex()
        if precision.loss_scale_growth_steps and power.startswith("0x1.0000000000000p"):
            settings["fp16.initial_scale_power"] = int(power.partition("p")[2])
            settings["fp16.loss_scale_window"] = precision.loss_scale_growth_steps
        elif not precision.loss_scale_growth_steps:
            settings["fp16.loss_scale"] = precision.loss_scale


def _read_degrees(settings: Settings, fields: Flat) -> None:
    """Read the degrees of tensor and pipeline parallelism."""
    # Sequence parallelism there is context parallelism in a job; programs over it have ring attention of their own.
    fields["plan.cp_method"] = "ring" if settings.has(RING_SIZE) else "ulysses"
    fields["plan.tp"] = settings.count(("tensor_parallel.autotp_size", TENSOR_SIZE), 1, largest.RANKS) or 1  # 0: none
    fields["plan.pp"] = settings.count("pipeline.stages", 1, largest.PIPELINE_RANKS) or 1
    fields["plan.schedule"] = "1f1b"


def _write_degrees(job: JobSpec, settings: dict[str, Any]) -> None:
    settings |= {"pipeline.stages": job.plan.pp} if job.plan.pp > 1 else {}
    settings |= {"tensor_parallel.autotp_size": job.plan.tp} if job.plan.tp > 1 else {}


def _read_clip(settings: Settings, fields: Flat) -> None:
    if settings.is_open("gradient_clipping", "--max_grad_norm"):
        settings.note(
            say(
                "nothing says gradient_clipping; 1.0 is taken, as by releases since 0.19, and earlier ones do not clip "
                "(--set optimizer.clip_grad_norm=NORM)"
            )
        )
    fields["optimizer.clip_grad_norm"] = settings.number(("gradient_clipping", "--max_grad_norm"), 1.0)


def _write_clip(job: JobSpec, settings: dict[str, Any]) -> None:
    settings |= {"gradient_clipping": job.optimizer.clip_grad_norm, "--max_grad_norm": job.optimizer.clip_grad_norm}


def _write_options(job: JobSpec, settings: dict[str, Any]) -> None:
    settings |= {
        "--per_device_train_batch_size": job.plan.microbatch_size,
        "--gradient_accumulation_steps": job.num_microbatches,
    }


TABLE: Table = (
    degree(f"sequence_parallel_size --sequence_parallel_size {RING_SIZE}", "plan.cp", largest.RANKS),
    Rule(("pipeline.stages",), _read_degrees, _write_degrees),
    Rule(("train_batch_size",), read_batch, _write_batch),
    Rule((_ZERO + "stage",), read_zero, _write_zero),
    Rule(("bf16.enabled", "fp16.enabled"), read_numbers, _write_numbers),
    Rule(("gradient_clipping",), _read_clip, _write_clip),
    Rule(("--per_device_train_batch_size",), None, _write_options),
    *OPTIONS,
)


def is_own(data: dict[str, Any]) -> bool:
    """True if a file with these keys is a configuration of DeepSpeed's."""
    return bool(_TOP_LEVEL_KEYS & data.keys())


def read(texts: Mapping[str, str], asked: Asked) -> ReadResult:
    """Read a configuration, with a launch script and a config.json. Raises ShellFault."""
    return result_of(read_parts(texts, asked, is_own), asked)


def ignore_disabled(settings: Settings) -> None:
    """Mark as read the sections of DeepSpeed's configuration that their own `enabled` switches off, where a program
    copies all of them."""
    sections = tuple(
        name.removesuffix("enabled")
        for name, value in settings.given.items()
        if name.endswith(".enabled") and str(value).lower() == "false"
    )
    settings.ignore(*(name for name in settings.given if sections and name.startswith(sections)))


def result_of(parts: FileParts, asked: Asked, *systems: str) -> ReadResult:
    """The result of reading the contents of files; `systems` are further ones of known.toml whose names they have."""
    command = parts.command
    nodes, devices_per_node = (
        (command.nodes, command.devices_per_node) if command and not asked.cluster.devices else (0, 0)
    )
    world = asked.cluster.devices or nodes * devices_per_node
    settings = parts.settings(asked, world)
    fields: Flat = {}
    read_model(parts.model, asked, settings, fields)
    for row in TABLE:
        read_row(row, settings, fields)
    settings.faults += loose_faults(command.loose if command else (), settings, "deepspeed", "options", *systems)
    settings.ignore(WORLD)
    ignore_disabled(settings)
    software = with_liger(SOFTWARE, settings)
    settings.note(priced_as(software))
    return ReadResult(fields, settings, software, nodes, devices_per_node, ("deepspeed", "options", *systems))


def settings_of(job: JobSpec) -> dict[str, Any]:
    """A job's settings: keys of DeepSpeed's configuration, and options of the program (names with --)."""
    return write_table(TABLE, job)


def write(job: JobSpec) -> dict[str, str]:
    """The launch script, DeepSpeed's configuration, and config.json of the model, by file name."""
    flat = settings_of(job)
    configuration = nested_keys({name: value for name, value in flat.items() if not name.startswith("--")})
    return {
        "run.sh": launch_text(job, flat, _launcher(job), "DeepSpeed", ["--deepspeed ds_config.json"]),
        "ds_config.json": json.dumps(configuration, indent=2) + "\n",
        "config.json": model_file(job),
    }


def _launcher(job: JobSpec) -> str:
    """The launcher: DeepSpeed's on one node; torchrun on several, because DeepSpeed's needs a hostfile there."""
    nodes, devices_per_node = nodes_of(job)
    return (
        torchrun_line(str(nodes), str(devices_per_node))
        if nodes > 1
        else f"deepspeed --num_nodes 1 --num_gpus {devices_per_node}"
    )


def launch_text(job: JobSpec, options: dict[str, Any], launcher: str, system: str, first_lines: list[str]) -> str:
    """The script that each node runs to start the program. The arguments begin with `first_lines`."""
    lines = [
        *first_lines,
        "--config_name config.json",
        "--dataset_name wikitext",
        "--output_dir out",
        "--do_train",
        *option_lines(options),
    ]
    words = " \\\n".join(f"    {line}" for line in lines)
    heading = f"#!/bin/bash\n# {' '.join(job.name.split())}, for {system}, written by shardwright.\n"
    rendezvous = "".join(f"{line}\n" for line in RENDEZVOUS) if nodes_of(job)[0] > 1 else ""
    return f"{heading}set -euo pipefail\n{rendezvous}\n{launcher} {program('options')} \\\n{words}\n"


FACTS = System(
    name="deepspeed",
    place=60,
    title="DeepSpeed",
    read=read,
    write=write,
    settings=settings_of,
    software=SOFTWARE,
    signs=SIGNS,
    variables=(alpaca_lora.ADAPTERS,),
    takes=OPTION_SYSTEMS,
    leaves_out=True,
)
