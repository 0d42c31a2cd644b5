"""Configurations of training systems, recognised by their keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.dotted_keys import flat_keys
from shardwright.interchange.reading.shell_words import ShellFault


@dataclass(frozen=True)
class FileSign:
    """A system whose files have all keys of one of `keys`. `source` is the name by which its files are read; empty if
    they are not read here."""

    title: str
    source: str
    keys: tuple[tuple[str, ...], ...]


LLAMA_FACTORY = "llamafactory"  # whose options the readers of DeepSpeed's and Accelerate's files take, too
_SIGNS = (
    FileSign(
        "axolotl",
        "axolotl",
        (
            ("base_model", "sequence_len"),
            ("base_model", "micro_batch_size"),
            ("base_model", "datasets"),
        ),
    ),
    FileSign(
        "GPT-NeoX",
        "gpt-neox",
        (
            ("pipe-parallel-size", "num-layers"),
            ("pipe_parallel_size", "num_layers"),
            ("pos_emb", "num_layers"),
            ("model-parallel-size", "num-layers"),
            ("model_parallel_size", "num_layers"),
            ("pos-emb", "num-layers"),
        ),
    ),
    FileSign("nanotron", "nanotron", (("parallelism", "tokens"), ("parallelism", "checkpoints", "general"))),
    FileSign(
        "FlagScale",
        "flagscale",
        (
            ("system", "model", "data"),
            ("system.tensor_model_parallel_size", "model"),
            ("system.pipeline_model_parallel_size", "model"),
            ("system.precision", "model.num_layers"),
            ("experiment", "train", "defaults"),
            ("train.system",),
            ("experiment.task", "defaults"),
        ),
    ),
    FileSign("Primus", "primus", (("modules.pre_trainer",), ("work_group", "user_name", "exp_name"))),
    FileSign("picotron", "picotron", (("distributed", "model", "training", "dataset"),)),
    FileSign("torchtune", "", (("model._component_",), ("tokenizer._component_",))),
    FileSign("LLM Foundry", "", (("max_duration", "global_train_batch_size"), ("variables", "train_loader"))),
    FileSign("verl", "", (("actor_rollout_ref",),)),
    FileSign("OpenRLHF", "", (("actor_num_nodes",), ("ref_num_nodes",))),
    FileSign("LitGPT", "", (("train.global_batch_size", "train.micro_batch_size"),)),
    FileSign("Lightning", "", (("trainer.strategy", "data.class_path"), ("model.class_path", "data.class_path"))),
    FileSign("Megatron-Bridge", "", (("model._target_", "train.train_iters"),)),
    FileSign("NeMo AutoModel", "", (("model._target_", "step_scheduler.global_batch_size"),)),
    FileSign(
        "ms-swift",
        "ms-swift",
        (
            ("train_type", "dataset", "model"),
            ("tuner_type", "dataset", "model"),
            ("global_batch_size", "micro_batch_size", "lr", "model"),
        ),
    ),
    FileSign(
        "LLaMA-Factory",
        LLAMA_FACTORY,
        (
            ("finetuning_type",),
            ("stage", "template"),
            ("do_train", "template"),
            ("model_name_or_path", "template"),
        ),
    ),
)
# Programs over transformers' Trainer, whose options other systems' readers take too.
_OF_TRL = FileSign(
    "TRL",
    "trl",
    (
        ("per_device_train_batch_size", "learning_rate"),
        ("model_name_or_path", "output_dir"),
        ("model_name_or_path", "learning_rate"),
    ),
)
_OF_ENGINES = ("distributed_type", "compute_environment", "zero_optimization")


def recognised(data: Mapping[str, Any]) -> FileSign | None:
    """The system whose files have such keys; None if none of those that stand here."""
    keys = flat_keys({str(key): value for key, value in data.items()})
    sections = {*map(str, data), *keys} | {".".join(key.split(".")[:depth]) for key in keys for depth in (1, 2)}
    signs = _SIGNS if sections & {*_OF_ENGINES} else (*_SIGNS, _OF_TRL)
    return next((sign for sign in signs if any(sections >= {*names} for names in sign.keys)), None)


def refuse_other_system(name: str, data: Mapping[str, Any], title: str) -> None:
    """Raise ShellFault if the keys of a file are those of another system than the one with this title."""
    sign = recognised(data)
    if sign is None or sign is _OF_TRL or sign.title == title or sign.source == LLAMA_FACTORY:
        return
    way_out = (
        f"read it by shardwright import {sign.source}"
        if sign.source
        else f"{sign.title} is not read here, so say the same by a configuration of a system that is, or as a job"
    )
    raise ShellFault(
        f"{shortened(name, 80)} is a configuration of {sign.title} by its keys, and none of {title}; {way_out}"
    )
