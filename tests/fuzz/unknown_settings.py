"""Settings that nobody knows in files as people have them: those that could change the plan are refused with a way out.

python tests/fuzz/unknown_settings.py [--seed N] [--count N]

A job that is read means all that its files say: a setting that is told as without effect changes nothing where it is
left out, and an unknown one with a word such as `layer` or `batch`, in any section, is a fault that --set settles.
"""

import argparse
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).parents[1])

from fuzz.trainer_jobs import FILES, FOLDER, shown_name, trainer_files, trainer_jobs
from interchange.public_jobs import files_of, public_jobs
from interchange.wrapped_files import PROGRAM
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError
from shardwright.interchange.foreign_job import job_of_texts
from shardwright.interchange.imported import Asked, Imported, split_sets
from shardwright.interchange.meaning import differences
from shardwright.interchange.recognised import system_name_of
from shardwright.interchange.system import SOURCES

SECTIONS = {
    "megatron": ("",),
    "nemo": ("model.", "trainer.", "model.optim.", "model.peft.", "model.peft.lora_tuning."),
    "torchtitan": ("training.", "parallelism.", "model.", "optimizer.", "activation_checkpoint."),
    "deepspeed": ("", "zero_optimization.", "tensor_parallel.", "optimizer.params."),
    "accelerate": ("", "fsdp_config.", "parallelism_config.", "deepspeed_config.", "megatron_lm_config."),
} | {system: sections for system, (_, _, sections, _) in FILES.items()}
_BEGINNINGS = ("new", "my", "extra", "fused2", "q7")
_WORDS = (
    "layers", "num_experts", "kv_heads", "hidden_dim", "dense_layers", "block_size", "seq_length", "micro_batch",
    "offload_states", "swap_space", "sparse_ratio", "lora_rank", "load_in_4bit", "quant_bits", "adapter", "window",
    "freeze_layers", "expert_parallel", "sequence_parallel_degree", "recompute_every", "shard_degree", "mtp_depth",
    "vocab_rows", "mamba_ratio", "context_parallel", "head_width",
)  # fmt: skip
_VALUES: tuple[Any, ...] = (2, 3, 16, "block", "some")


def read(job: dict[str, Any], settings: dict[str, Any], sets: tuple[str, ...] = ()) -> Imported:
    """The job of some settings, on the devices that the public job is for. Raises PlanError."""
    variables, overrides = split_sets((*job["sets"], *sets))
    variables = {name: value for name, value in variables.items() if value == "ignore"}
    asked = Asked(variables, overrides, AskedCluster(job["devices"], job["device"]))
    write = trainer_files if job.get("is_trainer") else files_of
    return job_of_texts(SOURCES[job["system"]], write(job | {"settings": settings}), asked, job["name"])


def unknown_setting(system: str, random: Random) -> tuple[str, Any]:
    """The name and value of a setting that no release has, and that could change the plan by its name."""
    name = f"{random.choice(_BEGINNINGS)}_{random.choice(_WORDS)}"
    shown = name.replace("_", "-") if system == "megatron" else name
    value = random.choice(_VALUES)
    return random.choice(SECTIONS[system]) + shown, str(value) if system == "megatron" else value


def faults_of_unknown(job: dict[str, Any], random: Random) -> list[str]:
    """Faults of how a job with an unknown setting is read."""
    key, value = unknown_setting(job["system"], random)
    settings = job["settings"] | {key: value}
    name = shown_name(job["system"], key)
    try:
        read(job, settings)
    except PlanError as error:
        if not any(name in fault and f"--set {name}=ignore" in fault for fault in error.faults):
            return [f"{job['name']}: {name} = {value}: no fault names it with a way out: {error.faults}"]
    else:
        return [f"{job['name']}: {name} = {value} is read in silence"]
    settled = read(job, settings, (f"{name}=ignore",))
    changed = differences(read(job, job["settings"]).job, settled.job)
    return [f"{job['name']}: {name} = {value}: left out, it changes {changed}"] if changed else []


# A command of a program -> files behind it. Unknown settings stand in it as Hydra's words, or in an object of JSON.
_COMMANDS = (
    ("accelerate launch --num_processes 4 train.py --model_name_or_path a --per_device_train_batch_size 2", True),
    (f"torchrun --nproc_per_node 8 {' '.join(PROGRAM)}", False),
    ("NPROC_PER_NODE=8 megatron sft --model a --dataset harbour/letters --global_batch_size 32", True),
)


def faults_of_words(random: Random) -> list[str]:
    """Faults of how a command is read that has an unknown setting as a word of Hydra or in an object."""
    command, has_model = random.choice(_COMMANDS)
    name = f"{random.choice(_BEGINNINGS)}_{random.choice(_WORDS)}"
    section = random.choice(("", "model.", "trainer.optim."))
    value = random.choice(_VALUES)
    is_tool = " megatron sft " in command  # whose options are no words
    as_object = f"--own_kwargs '{{{json.dumps(name)}: {json.dumps(value)}}}'"
    word = as_object if is_tool or random.random() < 0.3 else f"{random.choice(('', '+', '++'))}{section}{name}={value}"
    texts = {"run.sh": f"#!/bin/bash\n{command} {word}\n"}
    texts |= {"config.json": (FOLDER / "config.json").read_text(encoding="utf-8")} if has_model else {}
    system = SOURCES[system_name_of("run.sh", texts["run.sh"])]
    try:
        job_of_texts(system, texts, Asked(), "run.sh")
    except PlanError as error:
        names = (name, name.replace("_", "-"), "own_kwargs", "own-kwargs")
        return [] if any(name in fault for fault in error.faults for name in names) else [f"{word}: {error.faults}"]
    return [f"{command} {word} is read in silence"]


def faults_of_dropped(job: dict[str, Any], random: Random) -> list[str]:
    """Faults of a setting that is told as without effect: the job without it is another."""
    whole = read(job, job["settings"])
    names = {name.lstrip("-") for names in whole.without_effect.values() for name in names}
    inert = [name for name in job["settings"] if shown_name(job["system"], name) in names]
    if not inert:
        return []
    name = random.choice(inert)
    fewer = {key: value for key, value in job["settings"].items() if key != name}
    changed = differences(whole.job, read(job, fewer).job)
    return [f"{job['name']}: {name} is told as without effect, and changes {changed}"] if changed else []


def faults_of_seed(seed: int, count: int) -> list[str]:
    """Faults in so many draws of a seed."""
    random = Random(seed)
    jobs = [*public_jobs().values(), *trainer_jobs()]
    return [
        fault
        for _ in range(count)
        for check in (faults_of_unknown, faults_of_dropped)
        for fault in check(random.choice(jobs), random)
    ] + [fault for _ in range(count) for fault in faults_of_words(random)]


def main() -> int:
    """Draw settings. 1 if one that could change the plan is read in silence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    faults = faults_of_seed(options.seed, options.count)
    print("\n".join(faults) or f"{options.count} unknown settings: each was refused, and settled by --set")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
