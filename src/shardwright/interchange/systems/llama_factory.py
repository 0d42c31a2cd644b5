"""LLaMA-Factory: what its options mean beyond those of transformers' TrainingArguments."""

from collections.abc import Mapping
from typing import Any

from shardwright.interchange.reading.recognised_files import LLAMA_FACTORY, recognised


def own_options(data: Mapping[str, Any]) -> dict[str, Any]:
    """Options that follow from LLaMA-Factory's, if a file is its: it computes layers again unless that is disabled, and
    trains an adapter unless finetuning_type is another."""
    sign = recognised(data)
    if sign is None or sign.source != LLAMA_FACTORY:
        return {}
    options: dict[str, Any] = {"--gradient_checkpointing": data.get("disable_gradient_checkpointing") is not True}
    options |= {"--disable_gradient_checkpointing": None, "--do_train": None}
    if data.get("finetuning_type") is None:
        options["--finetuning_type"] = "lora"
    if data.get("fp8") is True:
        options |= {"--mixed_precision": "fp8", "--fp8": None}
    for name in ("adam_mini", "muon"):
        options |= {"--optim": name, f"--use_{name}": None} if data.get(f"use_{name}") is True else {}
    return options


def refusals(data: Mapping[str, Any]) -> list[str]:
    """A fault if a file of LLaMA-Factory trains nothing, such as one for inference or for merging an adapter."""
    if data.get("do_train") is True:
        return []
    return ["do_train is not true, so LLaMA-Factory trains nothing by this file; name one that trains"]
