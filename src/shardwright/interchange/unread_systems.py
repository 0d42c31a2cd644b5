"""Training systems whose files are known by their signs and not read: they are refused by name."""

from dataclasses import dataclass

from shardwright.config.phrase import say
from shardwright.interchange.reading.file_signs import FileSigns

_COMMAND = r"^[ \t]*(?:\w+=\S*[ \t]+)*(?:srun[ \t]+)?"  # the beginning of a command in a script


@dataclass(frozen=True)
class UnreadSystem:
    """A system that is not read; `title` may say which of its files are."""

    title: str
    signs: FileSigns


def _system(
    title: str, *keys: tuple[str, ...], commands: tuple[str, ...] = (), imports: tuple[str, ...] = ()
) -> UnreadSystem:
    return UnreadSystem(title, FileSigns(keys, commands=commands, imports=imports))


UNREAD_SYSTEMS = (
    _system(
        "torchtune",
        ("model._component_",),
        ("tokenizer._component_",),
        commands=(_COMMAND + r"tune[ \t]+run\b",),
    ),
    _system(
        "LLM Foundry",
        ("max_duration", "global_train_batch_size"),
        ("variables", "train_loader"),
        commands=(_COMMAND + r"composer[ \t]+\S",),
    ),
    _system("verl", ("actor_rollout_ref",), commands=(r"(?<=\s)-?-m(?:odule)?[ \t]+verl\.",)),
    _system(
        "OpenRLHF",
        ("actor_num_nodes",),
        ("ref_num_nodes",),
        commands=(r"\bopenrlhf\.(?:cli|trainer)\.",),
    ),
    _system(
        "LitGPT",
        ("train.global_batch_size", "train.micro_batch_size", "precision"),
        commands=(_COMMAND + r"litgpt[ \t]+(?:pretrain|finetune)",),
    ),
    _system(
        say("Lightning's command line"),
        ("trainer.strategy", "data.class_path"),
        ("model.class_path", "data.class_path"),
    ),
    _system(
        say("Megatron-Bridge in YAML"),
        ("model._target_", "train.train_iters"),
        ("train.train_iters", "train.global_batch_size"),
        ("model.tensor_model_parallel_size", "train.global_batch_size"),
    ),
    _system(
        say("Megatron-Bridge's scripts (its recipes in Python are read)"),
        commands=(
            r"\bscripts/performance/\w+\.(?:py|sh)\b",
            r"\b(?:run_recipe|pretrain_decoder|finetune_decoder|launch_with_nemo_run)\.py\b",
        ),
    ),
    _system(
        say("NeMo's launcher (the YAML of conf/training is)"),
        commands=(r"\blauncher_scripts/main\.py\b",),
    ),
    _system("NeuronX Distributed Training", ("distributed_strategy.tensor_model_parallel_size",)),
    _system(
        "MaxText", ("base_emb_dim",), ("per_device_batch_size", "base_num_decoder_layers"), ("ici_fsdp_parallelism",)
    ),
    _system("NeMo AutoModel", ("model._target_", "step_scheduler.global_batch_size")),
    _system(
        say("ms-swift's training by preferences or rewards"),
        commands=(_COMMAND + r"swift[ \t]+rlhf\b",),
    ),
    _system("XTuner", commands=(_COMMAND + r"xtuner[ \t]+train\b",), imports=(r"^[ \t]*from xtuner\b",)),
    _system("InternEvo", imports=(r"^hybrid_zero_optimizer[ \t]*=",)),
    _system(
        "PaddlePaddle",
        commands=(_COMMAND + r"paddleformers-cli\s", _COMMAND + r"python3?\s.*-m[ \t]+paddle\.distributed\.launch\b"),
    ),
)
