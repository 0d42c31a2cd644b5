"""Configurations of training systems that are not read here, recognised by their keys."""

from collections.abc import Mapping
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.dotted_keys import flat_keys
from shardwright.interchange.reading.shell_words import ShellFault

# System -> sets of keys; a file with all keys of one set is the system's.
_SIGNS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "axolotl": (("base_model", "sequence_len"), ("base_model", "micro_batch_size"), ("base_model", "datasets")),
    "GPT-NeoX": (
        ("pipe-parallel-size", "num-layers"),
        ("pipe_parallel_size", "num_layers"),
        ("model-parallel-size", "num-layers"),
        ("model_parallel_size", "num_layers"),
    ),
    "nanotron": (("parallelism", "tokens"), ("parallelism", "checkpoints", "general")),
    "FlagScale": (("system", "model", "data"), ("experiment", "train", "defaults"), ("train.system",)),
    "Primus": (("modules.pre_trainer",), ("work_group", "user_name", "exp_name")),
    "picotron": (("distributed", "model", "training", "dataset"),),
    "torchtune": (("model._component_",), ("tokenizer._component_",)),
    "LLM Foundry": (("max_duration", "global_train_batch_size"), ("variables", "train_loader")),
    "verl": (("actor_rollout_ref",),),
    "OpenRLHF": (("actor_num_nodes",), ("ref_num_nodes",)),
    "LitGPT": (("train.global_batch_size", "train.micro_batch_size"),),
    "Lightning": (("trainer.strategy", "data.class_path"), ("model.class_path", "data.class_path")),
    "Megatron-Bridge": (("model._target_", "train.train_iters"),),
    "NeMo AutoModel": (("model._target_", "step_scheduler.global_batch_size"),),
    "ms-swift": (("train_type", "dataset"), ("tuner_type", "dataset")),
}


def refuse_other_system(name: str, data: Mapping[str, Any], title: str) -> None:
    """Raise ShellFault if the keys of a file are those of another system than the one with this title."""
    keys = flat_keys(dict(data))
    sections = {*data, *keys} | {".".join(key.split(".")[:depth]) for key in keys for depth in (1, 2)}
    for system, signs in _SIGNS.items():
        if any(sections >= {*sign} for sign in signs):
            raise ShellFault(
                f"{shortened(name, 80)} is a configuration of {system} by its keys, and none of {title}; {system} is "
                "not read here, so say the same by a configuration of a system that is, or as a job"
            )
