"""LLaMA-Factory: what its options mean beyond those of transformers' TrainingArguments."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from shardwright.config.phrase import say
from shardwright.interchange.reading.file_signs import FileSigns

_NAMED = tuple(("finetuning_type", name) for name in ("stage", "do_train", "template", "dataset", "lora_target"))
SIGNS = (
    FileSigns(
        (*_NAMED, ("stage", "template"), ("do_train", "template"), ("model_name_or_path", "template")),
        commands=(
            r"\bllamafactory-cli\s+train\b",
            r"\bsrc/(llamafactory/launcher|train)\.py\s+\S+\.ya?ml\b",
            r"-m\s+llamafactory\.(launcher\s+\S+\.ya?ml|cli\s+train)\b",
        ),
    ),
)


def own_options(data: Mapping[str, Any]) -> dict[str, Any]:
    """Options that follow from LLaMA-Factory's, if a file is its: it computes layers again unless that is disabled, and
    trains an adapter unless finetuning_type is another."""
    if not SIGNS[0].fit_keys(data):
        return {}
    options: dict[str, Any] = {"--gradient_checkpointing": not _is_true(data.get("disable_gradient_checkpointing"))}
    options |= {"--disable_gradient_checkpointing": None, "--do_train": None}
    if data.get("finetuning_type") is None:
        options["--finetuning_type"] = "lora"
    if _is_true(data.get("fp8")):
        options |= {"--mixed_precision": "fp8", "--fp8": None}
    if _is_true(data.get("pure_bf16")):
        options |= {"--bf16": True, "--torch_dtype": "bfloat16", "--pure_bf16": None}  # the type of the weights, too
    for name in ("adam_mini", "muon"):
        options |= {"--optim": name, f"--use_{name}": None} if _is_true(data.get(f"use_{name}")) else {}
    return options


def length_of_samples(program: str, options: Mapping[str, Any]) -> dict[str, int]:
    """The option for the length of samples that a command of LLaMA-Factory has where it says none: 1,024 tokens in
    releases whose program is train_bash (to 0.7), and 2,048 in later ones."""
    names = {name.removeprefix("--") for name in options}
    if not SIGNS[0].fit_keys(dict.fromkeys(names, "")) or "cutoff_len" in names:
        return {}
    return {"--cutoff_len": 1024 if PurePath(program).stem == "train_bash" else 2048}


def refusals(data: Mapping[str, Any]) -> list[str]:
    """A fault if a file of LLaMA-Factory trains nothing, such as one for inference or for merging an adapter."""
    if _is_true(data.get("do_train")):
        return []
    return [say("do_train is not true, so LLaMA-Factory trains nothing by this file; name one that trains")]


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"
