"""The system whose file a text is, by its suffix and the tables, keys or programs that it names."""

import re
from pathlib import PurePath
from typing import Any

from shardwright.config.base import PlanError
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.recognised_files import recognised
from shardwright.interchange.reading.shell_words import ShellFault

JOB = "shardwright"  # a job of this package, or a model as transformers describes it
_TITAN_TABLES = {"parallelism", "training", "activation_checkpoint", "job"}
_DEEPSPEED_KEYS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}
_ACCELERATE_KEYS = {"distributed_type", "compute_environment", "fsdp_config", "deepspeed_config"}
# Words of Python files -> the system whose functions they call.
_IMPORTED = (
    (r"\bmegatron\.bridge\b", "megatron-bridge"),
    (r"^\s*(import|from)\s+(pytorch_)?lightning\b", "lightning"),
)
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
# Words of launch scripts -> the system that they start; Megatron-LM's otherwise.
_STARTED = (
    (r"\bllamafactory-cli\s+train\b", "llamafactory"),
    (r"\baxolotl(\.cli\.|\s+)train\b", "axolotl"),
    (r"\btrl\s+(sft|dpo|kto|grpo|rloo|reward)\b", "trl"),
    (r"\bmegatron\s+(sft|pt|rlhf)\b", "ms-swift"),
    (r"torchtitan", "torchtitan"),
    (r"\baction=run\b", "flagscale"),
    (r"\s\+{0,2}(trainer|model)\.[a-z_.]+=", "nemo"),
    (r"--(num[-_]layers|hidden[-_]size|tensor[-_]model[-_]parallel[-_]size)\b", "megatron"),
    (r"\baccelerate\s+launch\b", "accelerate"),
    (r"\bsrc/(llamafactory/launcher|train)\.py\s+\S+\.ya?ml\b", "llamafactory"),
    (r"--deepspeed(_config)?[ =]\S+\.json", "deepspeed"),
)


# Commands at the beginning of a line -> the program that they start, which is not read.
_NOT_READ = (
    (r"swift\s+(sft|pt|rlhf)\b", "ms-swift over transformers' Trainer (of ms-swift, megatron sft and megatron pt are)"),
    (r"tune\s+run\b", "torchtune"),
    (r"xtuner\s+train\b", "XTuner"),
    (r"litgpt\s+(pretrain|finetune)", "LitGPT"),
    (r"composer\s+\S", "LLM Foundry"),
    (r"python3?\s+-m\s+verl\.", "verl"),
    (r"(deepspeed|python3?)\s.*-?-m(odule)?\s+openrlhf\.", "OpenRLHF"),
    (r"paddleformers-cli\s|python3?\s.*-m\s+paddle\.distributed\.launch\b", "PaddlePaddle"),
)


def system_name_of(path: str, text: str) -> str:
    """The name of the system, or `JOB`. Raises PlanError for a text that no system is known to write."""
    suffix = PurePath(path).suffix.lower()
    if suffix in (".toml", ".json", ".yaml", ".yml"):
        try:
            data = read_data(path, text)
        except ShellFault as error:
            raise PlanError(path, [str(error)]) from None
        if name := _of_data(path, suffix, data):
            return name
    elif suffix == ".py":
        return next((system for pattern, system in _IMPORTED if re.search(pattern, text, re.MULTILINE)), "torchtitan")
    elif text.startswith("#!") or suffix in _SCRIPTS:
        before = r"^[ \t]*(?:\w+=\S*[ \t]+)*(?:srun[ \t]+)?"
        other = next((title for pattern, title in _NOT_READ if re.search(before + pattern, text, re.MULTILINE)), "")
        if other:
            raise PlanError(path, [f"it starts {other}, which is not read here; say it as a job"])
        return next((system for pattern, system in _STARTED if re.search(pattern, text)), "megatron")
    raise PlanError(path, ["no system is known to write such a file; name the system, such as megatron"])


def _of_data(path: str, suffix: str, data: dict[str, Any]) -> str:
    """The name of the system that keys belong to; empty if none is known. Raises PlanError for one that is not read."""
    if suffix == ".toml":
        return "torchtitan-0.2" if _TITAN_TABLES & data.keys() else JOB
    sign = recognised(data)
    if sign is not None and not sign.source:
        raise PlanError(
            path, [f"it is a configuration of {sign.title} by its keys, which is not read here; say it as a job"]
        )
    if sign is not None:
        return sign.source
    if _DEEPSPEED_KEYS & data.keys():
        return "deepspeed"
    if suffix == ".json":
        return JOB
    if _ACCELERATE_KEYS & data.keys():
        return "accelerate"
    return "nemo" if {"model", "trainer"} <= data.keys() or "trainer" in data else ""
