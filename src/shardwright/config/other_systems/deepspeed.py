"""DeepSpeed's configuration, with the launch script and the config.json that belong to it."""

import json
from collections.abc import Mapping
from typing import Any

from shardwright.config import largest
from shardwright.config.dotted_keys import nested_keys
from shardwright.config.job import JobSpec
from shardwright.config.other_systems.imported import Asked, Told
from shardwright.config.other_systems.known_settings import program, subjects
from shardwright.config.other_systems.loose_words import loose_faults
from shardwright.config.other_systems.rows import Rule, Table, read_row, write_table
from shardwright.config.other_systems.script_text import MEETING, nodes_of, torchrun_line
from shardwright.config.other_systems.settings import Flat, Settings
from shardwright.config.other_systems.training_arguments import (
    OPTIONS,
    WORLD,
    model_file,
    option_lines,
    read_model,
    read_parts,
)
from shardwright.config.usual_links import USUAL_NODE, filled_nodes

_ZERO = "zero_optimization."
STAGE = (_ZERO + "stage",)
_MICRO = ("train_micro_batch_size_per_gpu", "--per_device_train_batch_size")
_OWN = frozenset((
    "train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "bf16", "fp16", "gradient_clipping",
    "gradient_accumulation_steps", "optimizer", "scheduler", "steps_per_print",
))  # fmt: skip


def read_batch(settings: Settings, fields: Flat) -> None:
    """dp, the microbatch and the batch: of their three numbers two make the third."""
    shared = fields["plan.tp"] * fields["plan.pp"] * fields["plan.cp"]
    world = settings.count(WORLD, 0)
    micro = settings.overridden("plan.microbatch_size") or settings.count(_MICRO, 0)
    whole = settings.count("train_batch_size", 0)
    times = settings.count(("gradient_accumulation_steps", "--gradient_accumulation_steps"), 0)
    if not micro and whole and times and world:
        micro = whole // max(1, times * (world // shared))
    if not micro:
        micro, whose = (8, ", the program's default,") if _MICRO[0] in settings.automatic else (1, "")
        settings.note(
            f"nothing says how many sequences a device takes at once; {micro}{whose} is taken (--set "
            "plan.microbatch_size=N)"
        )
    if world and world % shared == 0:
        dp = world // shared
    elif whole and times and whole % (micro * times) == 0:
        dp = whole // (micro * times)
        settings.note(
            f"{dp * shared} GPUs, for a batch of {whole} is {micro} x {times} x {dp} (--devices N for others)"
        )
    else:
        dp = 1
        ways = f"say how many with --devices, such as {filled_nodes(shared, world or USUAL_NODE)}"
        settings.faults.append(
            f"{world} GPUs are not a multiple of {shared} that share a replica; {ways}"
            if world
            else f"nothing says how many GPUs there are; {ways}"
        )
    fields |= {"plan.dp": dp, "plan.microbatch_size": micro}
    fields["batch.global_batch_size"] = whole or micro * max(1, times) * dp


def _write_batch(job: JobSpec, settings: dict[str, Any]) -> None:
    plan, size = job.plan, job.batch.global_batch_size
    settings |= {"train_batch_size": size, "train_micro_batch_size_per_gpu": plan.microbatch_size}
    settings["gradient_accumulation_steps"] = job.num_microbatches


def read_zero(settings: Settings, fields: Flat) -> None:
    """The stage, what is offloaded, and over how many ranks is sharded."""
    stage = settings.count(_ZERO + "stage", 0)
    if stage > 3:
        settings.faults.append(f"zero_optimization.stage = {stage}: it should be 0 to 3")
        stage = 0
    fields["plan.zero"] = stage
    if (stage and settings.text(_ZERO + "offload_optimizer.device", "none") != "none") or settings.flag(
        _ZERO + "cpu_offload"
    ):
        fields["plan.offload_optimizer"] = settings.number(_ZERO + "offload_optimizer.ratio", 1.0)
    if settings.text(_ZERO + "offload_param.device", "none") != "none" and stage == 3:
        fields["plan.offload_parameters"] = True
    if "nvme" in (
        settings.given.get(_ZERO + "offload_optimizer.device"),
        settings.given.get(_ZERO + "offload_param.device"),
    ):
        settings.lost.append("what is offloaded to NVMe there is in host memory here")
    if stage == 3 and settings.has(_ZERO + "mics_shard_size"):  # which releases had until 2026
        fields["plan.zero_ranks"] = settings.count(_ZERO + "mics_shard_size", 0)
    settings.lose(_ZERO + "zero_hpz_partition_size", "a second copy of the parameters in each node is not made here")
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        if settings.flag(_ZERO + name):
            settings.lost.append(f"{settings.said(_ZERO + name)}: what travels is not quantised here")


def _write_zero(job: JobSpec, settings: dict[str, Any]) -> None:
    plan = job.plan
    settings[_ZERO + "stage"] = plan.zero if plan.replicas > 1 else 0
    if plan.pp > 1:
        settings[_ZERO + "stage"] = min(1, settings[_ZERO + "stage"])
    if plan.offload_optimizer and settings[_ZERO + "stage"]:
        settings[_ZERO + "offload_optimizer.device"] = "cpu"
        if plan.offload_optimizer != 1.0 and settings[_ZERO + "stage"] == 3:  # a part alone: ZeRO-Offload++
            settings[_ZERO + "offload_optimizer.ratio"] = plan.offload_optimizer
    if plan.offload_parameters and plan.zero == 3:
        settings[_ZERO + "offload_param.device"] = "cpu"


def read_numbers(settings: Settings, fields: Flat) -> None:
    """Number types of what is computed and of gradients."""
    names = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")
    left = [name for name in names if name in settings.automatic]
    if left and not settings.has("--bf16", "--fp16"):
        settings.note(
            f"{' and '.join(left)} is auto, and no option --bf16 or --fp16 of the program is there, so numbers are "
            "float32 (--set precision.compute=bf16)"
        )
    bf16 = settings.flag(("bf16.enabled", "bfloat16.enabled", "--bf16"))
    fp16 = settings.flag(("fp16.enabled", "--fp16")) and not bf16
    fields["precision.compute"] = "bf16" if bf16 else "fp16" if fp16 else "float32"
    numbers = {"fp32": "float32", "float32": "float32", "bf16": "compute", "bfloat16": "compute", "fp16": "compute"}
    default = "fp32" if not (bf16 or fp16) else "bf16"
    fields["precision.gradients"] = settings.one_of("data_types.grad_accum_dtype", numbers, default)
    travels = settings.text("communication_data_type", "")
    if travels in ("fp32", "float32") and fields["precision.gradients"] == "compute":
        fields["precision.reduce"] = "float32"
    if fp16:
        constant = settings.number("fp16.loss_scale", 0.0)
        fields["precision.loss_scale"] = constant or 2.0 ** min(63, settings.count("fp16.initial_scale_power", 16))
        fields["precision.loss_scale_growth_steps"] = 0 if constant else settings.count("fp16.loss_scale_window", 1000)


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
    """Ulysses' sequence parallelism is context parallelism here."""
    fields["plan.cp"] = settings.count(("sequence_parallel_size", "--sequence_parallel_size"), 1, largest.RANKS, 1)
    fields["plan.cp_method"] = "ulysses"
    fields["plan.tp"] = settings.count("tensor_parallel.autotp_size", 1, largest.RANKS) or 1  # 0 is none
    fields["plan.pp"] = settings.count("pipeline.stages", 1, largest.PIPELINE_RANKS) or 1
    fields["plan.schedule"] = "1f1b"


def _write_degrees(job: JobSpec, settings: dict[str, Any]) -> None:
    settings |= {"sequence_parallel_size": job.plan.cp} if job.plan.cp > 1 else {}
    settings |= {"pipeline.stages": job.plan.pp} if job.plan.pp > 1 else {}
    settings |= {"tensor_parallel.autotp_size": job.plan.tp} if job.plan.tp > 1 else {}


def _read_clip(settings: Settings, fields: Flat) -> None:
    if settings.is_open("gradient_clipping", "--max_grad_norm"):
        settings.note(
            "nothing says gradient_clipping; 1.0 is taken, as by releases since 0.19, and earlier ones do not clip "
            "(--set optimizer.clip_grad_norm=NORM)"
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
    Rule(("sequence_parallel_size", "pipeline.stages"), _read_degrees, _write_degrees),
    Rule(("train_batch_size",), read_batch, _write_batch),
    Rule((_ZERO + "stage",), read_zero, _write_zero),
    Rule(("bf16.enabled", "fp16.enabled"), read_numbers, _write_numbers),
    Rule(("gradient_clipping",), _read_clip, _write_clip),
    Rule(("--per_device_train_batch_size",), None, _write_options),
    *OPTIONS,
)


def is_own(data: dict[str, Any]) -> bool:
    """True if keys are of a configuration of DeepSpeed's."""
    return bool(_OWN & data.keys())


def read(texts: Mapping[str, str], asked: Asked) -> Told:
    """Read a configuration, with a launch script and a config.json. Raises ShellFault."""
    parts = read_parts(texts, asked, is_own)
    given, command = parts.given, parts.command
    nodes, each = (command.nodes, command.each) if command and not asked.cluster.devices else (0, 0)
    world = asked.cluster.devices or nodes * each
    settings = parts.settings(asked, world)
    fields: Flat = {}
    read_model(parts.model, asked, settings, fields)
    for row in TABLE:
        read_row(row, settings, fields)
    settings.faults += loose_faults(command.loose if command else (), settings, "deepspeed", "options")
    settings.ignore(WORLD)
    settings.note(
        "priced as fsdp-2024 software: the catalog has none of DeepSpeed of these years (--as NAME for another)"
    )
    without = subjects(given, "deepspeed", "options")
    return Told(fields, settings, "fsdp-2024", nodes, each, without)


def settings_of(job: JobSpec) -> dict[str, Any]:
    """DeepSpeed's keys of a job, and options of the program."""
    return write_table(TABLE, job)


def write(job: JobSpec) -> dict[str, str]:
    """A launch script, DeepSpeed's configuration, and the model's, by their names."""
    flat = settings_of(job)
    own = nested_keys({name: value for name, value in flat.items() if not name.startswith("--")})
    return {
        "run.sh": launch_text(job, flat, _launcher(job), "DeepSpeed", ["--deepspeed ds_config.json"]),
        "ds_config.json": json.dumps(own, indent=2) + "\n",
        "config.json": model_file(job),
    }


def _launcher(job: JobSpec) -> str:
    """DeepSpeed's own launcher on one node. On several it reads a file of their names; torchrun needs none."""
    nodes, each = nodes_of(job)
    return torchrun_line(str(nodes), str(each)) if nodes > 1 else f"deepspeed --num_nodes 1 --num_gpus {each}"


def launch_text(job: JobSpec, options: dict[str, Any], launcher: str, system: str, first: list[str]) -> str:
    """The script that starts the program, on each node."""
    lines = [
        *first,
        "--config_name config.json",
        "--dataset_name wikitext",
        "--output_dir out",
        "--do_train",
        *option_lines(options),
    ]
    words = " \\\n".join(f"    {line}" for line in lines)
    heading = f"#!/bin/bash\n# {' '.join(job.name.split())}, for {system}, written by shardwright.\n"
    meeting = "".join(f"{line}\n" for line in MEETING) if nodes_of(job)[0] > 1 else ""
    return f"{heading}set -euo pipefail\n{meeting}\n{launcher} {program('options')} \\\n{words}\n"
