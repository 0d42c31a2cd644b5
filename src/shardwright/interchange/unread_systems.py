"""Training systems whose files are known by their signs and not read: they are refused by name."""

from dataclasses import dataclass

from shardwright.config.phrase import say
from shardwright.interchange.reading.file_signs import CONFIGURATIONS, FileSigns

SUFFIXES = (*CONFIGURATIONS, ".toml")

_COMMAND = r"^[ \t]*(?:\w+=\S*[ \t]+)*(?:srun[ \t]+)?"  # the beginning of a command in a script


@dataclass(frozen=True)
class UnreadSystem:
    """A system that is not read; `title` may say which of its files are."""

    title: str
    signs: FileSigns
    read_as: str = ""  # the system that reads its scripts beside a file in Python of that system


_IMPORT = r"^[ \t]*(?:from|import)[ \t]+"  # the beginning of an import in Python


def _system(
    title: str, *keys: tuple[str, ...], commands: tuple[str, ...] = (), imports: tuple[str, ...] = (), read_as: str = ""
) -> UnreadSystem:
    return UnreadSystem(title, FileSigns(keys, commands=commands, imports=imports, suffixes=SUFFIXES), read_as)


UNREAD_SYSTEMS = (
    _system(
        "torchtune",
        ("model._component_",),
        ("tokenizer._component_",),
        commands=(_COMMAND + r"tune[ \t]+run\b",),
    ),
    _system(
        "OLMo",
        ("tokenizer.identifier", "global_train_batch_size"),
        ("model.d_model", "device_train_microbatch_size", "fsdp.wrapping_strategy"),
        imports=(_IMPORT + r"olmo\b",),
    ),
    _system("OLMo-core", imports=(_IMPORT + r"olmo_core\b",)),
    _system(
        "LLM Foundry",
        ("max_duration", "global_train_batch_size"),
        ("variables", "train_loader"),
        commands=(r"(?:^|[;&|\s])composer[ \t]+-", _COMMAND + r"composer[ \t]+\S", r"\bllm-?foundry/\S*train\.py\b"),
        imports=(_IMPORT + r"llmfoundry\b",),
    ),
    _system(
        "verl",
        ("actor_rollout_ref",),
        ("model.partial_pretrain",),
        ("data.train_files", "data.prompt_key"),
        commands=(
            r"(?<=\s)-?-m(?:odule)?[ \t]+verl\.",
            r"\bverl\.trainer\.\w",
            r"(?<=\s)\+{0,2}(?:actor_rollout_ref|algorithm\.adv_estimator|model\.partial_pretrain)[.=]",
        ),
    ),
    _system(
        "HALOs",
        ("loss.trainer", "loss.dataloader"),
        commands=(r"\blaunch\.py[ \t]+(?:[^\n]*[ \t])?loss=\w",),
    ),
    _system(
        "qlora-pipe",
        ("pipeline_stages", "sequence_len"),
        ("pipeline_stages", "datasets"),
        ("full_fine_tune", "sequence_len"),
    ),
    _system(
        "Colossal-AI",
        commands=(r"(?:^|[;&|\s])colossalai[ \t]+run\b", r"\bColossalAI/(?:applications|examples)/"),
        imports=(_IMPORT + r"colossalai\b",),
    ),
    _system(
        say("LLaMA-Factory 1.0 (files of its releases before are)"),
        ("model", "dist_config"),
        ("model", "kernel_config"),
        ("model", "peft_config", "train_dataset"),
    ),
    _system(
        "dolomite-engine",
        ("model_args.model_class", "tuning_args"),
        ("model_args.model_class", "training_parameters"),
        commands=(r"(?<=\s)-m[ \t]+(?:dolomite_engine|lm_engine)\.",),
        imports=(_IMPORT + r"(?:dolomite_engine|lm_engine)\b",),
    ),
    _system("fairseq", commands=(_COMMAND + r"fairseq-(?:hydra-)?train\b",), imports=(_IMPORT + r"fairseq\b",)),
    _system("EasyLM", commands=(r"(?<=\s)-m[ \t]+EasyLM\.",), imports=(_IMPORT + r"EasyLM\b",)),
    _system("slime", commands=(r"(?<=\s)--(?:rollout-function-path|rollout-batch-size|actor-num-gpus-per-node)\b",)),
    _system(
        "prime-rl",
        ("data.micro_batch_size", "data.batch_size", "optim.lr"),
        ("orchestrator.model", "trainer"),
        ("orchestrator", "inference"),
        ("model.lora.rank", "data.micro_batch_size"),
        commands=(r"\buv[ \t]+run[ \t]+(?:sft|rl|trainer|orchestrator)\b",),
        imports=(_IMPORT + r"prime_rl\b",),
    ),
    _system(
        "NeMo RL",
        ("policy.megatron_cfg",),
        ("policy.dtensor_cfg",),
        ("policy.train_global_batch_size", "policy.train_micro_batch_size"),
        ("sft.max_num_steps",),
        ("grpo.num_generations_per_prompt",),
        commands=(r"\bexamples/run_(?:sft|grpo\w*|dpo|rm|distillation\w*)\.py\b",),
        imports=(_IMPORT + r"nemo_rl\b",),
    ),
    _system(
        "Lingua",
        ("distributed.fsdp_type", "optim.lr"),
        ("grad_acc_steps", "data.n_views"),
        commands=(r"(?<=\s)-m[ \t]+(?:lingua\.\w+|apps\.(?:main|mamba|mtp|fastRNN|aunet)\.)",),
        imports=(_IMPORT + r"lingua\b",),
    ),
    _system(
        "Levanter",
        ("trainer.train_batch_size", "trainer.num_train_steps"),
        ("trainer.mp", "trainer.train_batch_size"),
        ("trainer.mp", "trainer.per_device_parallelism"),
        commands=(r"\blevanter[./]main[./]\w+",),
        imports=(_IMPORT + r"levanter\b",),
    ),
    _system(
        "Modalities",
        ("settings.training_target",),
        ("settings.referencing_keys", "settings.cuda_env"),
        ("settings.step_profile", "settings.training_progress"),
        commands=(r"\bmodalities[ \t]+run\b",),
        imports=(_IMPORT + r"modalities\b",),
    ),
    _system(
        say("NeMo 2 without the file of its recipe (with it, it is)"),
        commands=(r"(?<=\s)--factory[= ]", r"\bnemo[ \t]+llm[ \t]+(?:pretrain|finetune)\b"),
        imports=(r"(?s)\A(?!.*\bnemo_run\b).*^[ \t]*from nemo\.collections(?:\.llm[\w.]*)?[ \t]+import\b",),
        read_as="nemo-recipes",
    ),
    _system("Unsloth", imports=(_IMPORT + r"unsloth\b",)),
    _system(
        say("transformers' Trainer in Python (the script that starts it is, with its options)"),
        imports=(r"^[ \t]*from (?:trl|transformers) import[ \t]+(?:\([^)]{0,2000}|[^\n(]{0,2000})\b\w*Trainer\b",),
    ),
    _system(
        say("Modal or Ray in Python (the command or the configuration that it starts is)"),
        imports=(_IMPORT + r"modal\b", _IMPORT + r"ray\.train\b"),
    ),
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
        ("perf_matrix",),
    ),
    _system(
        say("Megatron-Bridge's scripts (its recipes in Python are read)"),
        commands=(
            r"\bscripts/performance/\w+\.(?:py|sh)\b",
            r"\b(?:run_recipe|pretrain_decoder|finetune_decoder|launch_with_nemo_run)\.py\b",
        ),
        read_as="megatron-bridge",
    ),
    _system(
        say("Primus's programs (its YAML is)"),
        commands=(r"\bprimus/cli/main\.py\b",),
    ),
    _system(
        say("NeMo's launcher (the YAML of conf/training is)"),
        commands=(r"\blauncher_scripts/main\.py\b",),
    ),
    _system(
        say("sweeps of Weights & Biases (name the script or the configuration that it starts)"),
        ("method", "parameters", "program"),
        ("method", "parameters", "command"),
        ("method", "parameters", "metric"),
    ),
    _system("NeuronX Distributed Training", ("distributed_strategy.tensor_model_parallel_size",)),
    _system(
        "MaxText",
        ("base_emb_dim",),
        ("per_device_batch_size", "base_num_decoder_layers"),
        ("per_device_batch_size", "base_config"),
        ("per_device_batch_size", "max_target_length"),
        ("ici_fsdp_parallelism",),
        commands=(r"\bMaxText[./](?:train|\$\{?EXECUTABLE)\b", r"(?<=\s)-m[ \t]+(?:src\.)?(?:maxtext|MaxText)\."),
    ),
    _system("NeMo AutoModel", ("model._target_", "step_scheduler.global_batch_size")),
    _system(
        say("ms-swift's training by preferences or rewards"),
        commands=(_COMMAND + r"swift[ \t]+rlhf\b",),
    ),
    _system("XTuner", commands=(_COMMAND + r"xtuner[ \t]+train\b",), imports=(r"^[ \t]*from xtuner\b",)),
    _system("MindSpeed-MM", ("parallel.fsdp_plan", "data.dataset_param")),
    _system(
        say("MindSpeed-LLM over FSDP 2 (its Megatron is)"),
        ("parallel.fsdp_size", "parallel.fsdp_modules"),
        commands=(r"\btrain_fsdp2\.py\b",),
    ),
    _system("RL2", commands=(r"(?<=\s)-m[ \t]+RL2\.",)),
    _system("InternEvo", imports=(r"^hybrid_zero_optimizer[ \t]*=",)),
    _system(
        "PaddlePaddle",
        commands=(_COMMAND + r"paddleformers-cli\s", _COMMAND + r"python3?\s.*-m[ \t]+paddle\.distributed\.launch\b"),
    ),
)
