"""Megatron-Bridge (NVIDIA): a recipe, which is a Python function that changes fields of a configuration and returns it.

The function is followed and never run. Its configuration begins from one that all recipes have in common, and its model
is that of a name on the Hugging Face Hub.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.cluster_facts import usual_divisor
from shardwright.config.phrase import say
from shardwright.interchange.hydra_command import hydra_value
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.launcher import find_training_command
from shardwright.interchange.named_model import is_model
from shardwright.interchange.reading.file_signs import CONFIGURATIONS, FileSigns
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.python_source import Reader, Source, source_of_text
from shardwright.interchange.reading.python_values import Named, ParsedCall
from shardwright.interchange.reading.setting_notes import none_of_few
from shardwright.interchange.reading.settings import Settings
from shardwright.interchange.reading.shell_marks import readable, unknown_names
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.system import SourceSystem
from shardwright.interchange.systems.megatron_arguments import part_fault, plain_arguments, read_recipe, unfollowed
from shardwright.interchange.systems.recipe_adapters import adapter_arguments, default_peft_config
from shardwright.interchange.training_programs import program_fault

SIGNS = (FileSigns(imports=(r"\bmegatron\.bridge\b",)),)
CONFIG = "CONFIG"  # the variable that names the function
_SECTIONS = ("model", "train", "optimizer", "scheduler", "ddp", "comm_overlap", "mixed_precision", "dataset")
_FOLLOWED = ("train", "optimizer", "scheduler", "ddp")
# Sections of a configuration that change no plan, batch or model.
_BESIDE_PLANS = (
    *("logger", "checkpoint", "profiling", "rng", "tokenizer", "env_vars", "validation", "rerun_state_machine"),
    *("straggler", "nvrx_straggler", "inprocess_restart", "ft", "tensor_inspect"),
)
_HUB = "hub_model:"
_PRETRAIN: Mapping[str, Mapping[str, Any]] = {
    "train": {"train_iters": 300000, "global_batch_size": 32, "micro_batch_size": 2},
    "ddp": {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True},
    "optimizer": {"lr": 3e-4, "min_lr": 3e-5},
    "scheduler": {"lr_warmup_iters": 500},
    "dataset": {"seq_length": 4096},
}
_SFT: Mapping[str, Mapping[str, Any]] = {
    "train": {"train_iters": 1000, "global_batch_size": 128, "micro_batch_size": 1},
    "ddp": {"grad_reduce_in_fp32": True},
    "optimizer": {"lr": 5e-6, "min_lr": 0.0, "adam_beta2": 0.98},
    "scheduler": {"lr_warmup_iters": 50},
    "dataset": {"seq_length": 2048},
}
# Of distributed_fused_adam_with_cosine_annealing().
_OPTIMIZER = {
    "optimizer": "adam",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "weight_decay": 0.1,
    "clip_grad": 1.0,
}
_PRECISIONS = {"bf16": {"bf16": True}, "fp16": {"fp16": True}}
_FLOAT8 = {"delayed": "delayed", "current": "tensorwise", "subchannel": "blockwise"}
_PROGRAM = "run_recipe"  # a file in Python
# Options of the program run_recipe, with the fields that each sets.
_OPTIONS: dict[str, tuple[str, ...]] = {
    name: fields
    for names, fields in (
        (("-ms", "--max_steps"), ("train.train_iters",)),
        (("-gb", "--global_batch_size"), ("train.global_batch_size",)),
        (("-mb", "--micro_batch_size"), ("train.micro_batch_size",)),
        (("-sl", "--seq_length"), ("model.seq_length", "dataset.seq_length")),
        (("-tp", "--tensor_model_parallel_size"), ("model.tensor_model_parallel_size",)),
        (("-pp", "--pipeline_model_parallel_size"), ("model.pipeline_model_parallel_size",)),
        (("-cp", "--context_parallel_size"), ("model.context_parallel_size",)),
        (("-vp", "--virtual_pipeline_model_parallel_size"), ("model.virtual_pipeline_model_parallel_size",)),
        (("-ep", "--expert_model_parallel_size"), ("model.expert_model_parallel_size",)),
        (("-etp", "--expert_tensor_parallel_size"), ("model.expert_tensor_parallel_size",)),
        (("--lr",), ("optimizer.lr",)),
        (("--min_lr",), ("optimizer.min_lr",)),
        (("--warmup_iters",), ("scheduler.lr_warmup_iters",)),
        # They change no plan, batch or model.
        (
            ("--pretrained_checkpoint", "--save_dir", "--load_dir", "--save_interval", "--recipe-source", "--dataset"),
            (),
        ),
    )
    for name in names
}
_STEPS = ("gpt_step", "llm_step")  # of a model of words alone
_SWITCHES = ("--deterministic", "--dump-env", "--dump_env")
_MODES: dict[str, tuple[tuple[str, str], ...]] = {
    "pretrain": (),
    "sft": (),
    "lora": (("peft", "LoRA"),),
    "dora": (("peft", "DoRA"),),
}
_CHANGE = re.compile(r"\+{0,2}([a-z_]+)\.([a-z0-9_.]+)=(.*)", re.DOTALL)
_GPUS = re.compile(r"_([0-9]{1,6})gpus?_")  # of a recipe's name


def _common(defaults: Mapping[str, Mapping[str, Any]]) -> ParsedCall:
    """The configuration that a recipe begins from."""
    sections = {name: ParsedCall("", dict(values)) for name, values in defaults.items()}
    sections["optimizer"].keywords = _OPTIMIZER | sections["optimizer"].keywords
    sections["scheduler"].keywords = {"lr_decay_style": "cosine"} | sections["scheduler"].keywords
    return ParsedCall("ConfigContainer", {**sections, "mixed_precision": "bf16_mixed", "peft": None})


def _hub_model(positional: list[Any], keywords: dict[str, Any]) -> ParsedCall:
    """AutoBridge.from_hf_pretrained(NAME), whose methods make the model's configuration."""
    name = positional[0] if positional else keywords.get("path", "")
    made = Named(f"{_HUB}{name}")
    return ParsedCall("AutoBridge", {"get_model_config": made, "to_megatron_provider": made})


def _cosine(positional: list[Any], keywords: dict[str, Any]) -> list[ParsedCall]:
    """distributed_fused_adam_with_cosine_annealing(): the configurations of the optimizer and of its rates."""
    renamed = {"lr": keywords.get("max_lr", 1e-4)}
    renamed["min_lr"] = 0.1 * renamed["lr"] if keywords.get("min_lr") is None else keywords["min_lr"]
    given = {name: value for name, value in keywords.items() if name in _OPTIMIZER}
    rates = {name: value for name, value in keywords.items() if name.startswith("lr_")}
    scheduler = ParsedCall("", {"lr_decay_style": "cosine", "lr_warmup_iters": 2000} | rates)
    return [ParsedCall("", _OPTIMIZER | given | renamed), scheduler]


_MAKERS: dict[str, Any] = {
    "distributed_fused_adam_with_cosine_annealing": _cosine,
    "_pretrain_common": lambda positional, keywords: _common(_PRETRAIN),
    "_sft_common": lambda positional, keywords: _common(_SFT),
    "_peft_common": lambda positional, keywords: _with_adapter(),
    "from_hf_pretrained": _hub_model,
    "default_peft_config": default_peft_config,
}


def _with_adapter() -> ParsedCall:
    config = _common(_SFT)
    config.keywords["peft"] = ParsedCall("LoRA")
    return config


def read(texts: Mapping[str, str], asked: Asked) -> ReadResult:
    """Read a recipe, with the Python files whose functions it calls, the model's config.json, and the script that
    starts it. Raises ShellFault."""
    scripts = {name: text for name, text in texts.items() if not name.lower().endswith((".py", *CONFIGURATIONS))}
    started = _started(scripts, asked) if scripts else None
    if started is not None and CONFIG not in asked.variables:
        asked = replace(asked, variables={**asked.variables, CONFIG: started.recipe})
    texts = {name: text for name, text in texts.items() if name not in scripts}
    sources = [source_of_text(name, text) for name, text in texts.items() if name.endswith(".py")]
    others = [read_data(name, text) for name, text in texts.items() if not name.endswith(".py")]
    model = next((keys for keys in others if is_model(keys)), None)
    reader = Reader(sources, dict(asked.variables), (), _MAKERS)
    source, name = _function(reader, asked)
    config = reader.call(source, name, [], {})
    if not isinstance(config, ParsedCall) or not {"model", "train"} <= config.keywords.keys():
        raise ShellFault(
            say(
                "{file}: {name} returns no configuration that is known; name the files of what it calls",
                file=source.short,
                name=name,
            )
        )
    if made := unfollowed(config):
        raise ShellFault(
            say(
                "{file}: {name} begins from what {function} returns, which is in none of the files; name its file too",
                file=source.short,
                name=name,
                function=made,
            )
        )
    settings = Settings(notes=list(reader.notes), overrides=asked.fields)
    settings.faults += [fault for fault in (program_fault(name, asked.variables),) if fault]
    for section, field, value in started.changes if started else ():
        if isinstance(config.keywords.get(section), ParsedCall):
            config.keywords[section].keywords[field] = value
        elif section == "comm_overlap":
            config.keywords[section] = ParsedCall("", {field: value})
        elif not field:
            config.keywords[section] = ParsedCall(str(value))
        elif section not in _BESIDE_PLANS:
            settings.faults.append(say("{setting} is not known here; leave it out", setting=f"{section}.{field}"))
    arguments = _arguments(config, asked, settings)
    launched = started.launched if started and started.launched[1] else _launched(name, asked, settings)
    settings.notes += started.notes if started else ()
    hub_name = config.keywords["model"].callee.removeprefix(_HUB) if _is_hub(config.keywords["model"]) else None
    settings.given = {"model": hub_name} if hub_name else {}
    return read_recipe(arguments, model, asked, launched, settings, "megatron-bridge")


@dataclass(frozen=True)
class _Started:
    """The recipe that a script starts, the fields that its words change, nodes and devices of each, and notes."""

    recipe: str
    changes: tuple[tuple[str, str, Any], ...]
    launched: tuple[int, int]
    notes: tuple[str, ...]


def _started(scripts: Mapping[str, str], asked: Asked) -> _Started:
    """The recipe that a script starts with Megatron-Bridge's program, and its words. Raises ShellFault for options that
    could mean another training."""
    command = find_training_command(
        scripts, asked, lambda words: any(PurePath(word).stem == _PROGRAM for word in words)
    )
    recipe, words = "", [*command.arguments]
    of_options, changes = list[tuple[str, str, Any]](), list[tuple[str, str, Any]]()
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if option in (*_OPTIONS, "--recipe", "--mode", "--step-func", "--step_func") and not equals and words:
            value = words.pop(0)
        if option == "--recipe":
            recipe = value
        elif option in _OPTIONS:
            fields = (name.split(".") for name in _OPTIONS[option])
            of_options += [(section, field, hydra_value(value)) for section, field in fields]
        elif option == "--mode" and value in _MODES:
            of_options += [(section, "", kind) for section, kind in _MODES[value]]
        elif (match := _CHANGE.fullmatch(word)) and not unknown_names(word):
            changes.append((match[1], match[2], hydra_value(match[3])))
        elif word not in _SWITCHES and not (option in ("--step-func", "--step_func") and value in _STEPS):
            raise ShellFault(
                say(
                    "{setting} of the script is not known here; leave it out of the script, and say what it means by "
                    "fields of the job (--set SECTION.FIELD=VALUE)",
                    setting=shortened(readable(word), 60),
                )
            )
    # Words of the form KEY=VALUE hold over options.
    return _Started(recipe, (*of_options, *changes), (command.nodes, command.devices_per_node), command.notes)


def _function(reader: Reader, asked: Asked) -> tuple[Source, str]:
    """The file and the name of the recipe. Raises ShellFault if several could be meant."""
    names = [
        name
        for source in reader.sources
        for name, node in source.functions.items()
        if not name.startswith("_") and "config" in name and len(node.args.args) == len(node.args.defaults)
    ]
    name = asked.variables.get(CONFIG) or (names[0] if len(names) == 1 else "")
    source = reader.find(name) if name else None
    imported = [text for source in reader.sources for text in source.imports.values() if ".recipes." in text]
    if source is None and not names and imported:
        raise ShellFault(
            say(
                "no function of the files makes a recipe, and {imported} is in none of them; name its file, say --set "
                "{variable}={name}, and what the program changes by fields of the job (--set SECTION.FIELD=VALUE)",
                imported=imported[0],
                variable=CONFIG,
                name=imported[0].rpartition(".")[2],
            )
        )
    if source is None:
        known = say("{listed}", listed=tuple(names[:12]))
        if len(names) > 12:
            known = say("{listed} and {count} more", listed=known, count=len(names) - 12)
        raise ShellFault(
            say(
                "nothing names the recipe (functions in the files: {known}); say it with --set {variable}=NAME",
                known=known,
                variable=CONFIG,
            )
        )
    return source, name


def _is_hub(value: Any) -> bool:
    return isinstance(value, ParsedCall) and value.callee.startswith(_HUB)


def _launched(name: str, asked: Asked, settings: Settings) -> tuple[int, int]:
    """Nodes, and devices of each, by the number of GPUs in a recipe's name."""
    match = _GPUS.search(f"_{name}_")
    if match is None or asked.cluster.devices:
        return 0, 0
    devices = int(match[1])
    settings.notes.append(say("{devices} GPUs, by the name of the recipe (--devices N for others)", devices=devices))
    each = usual_divisor(devices)
    return devices // each, each


def _arguments(config: ParsedCall, asked: Asked, settings: Settings) -> dict[str, Any]:
    """Megatron-LM's arguments of the sections that say the plan and the training."""
    arguments: dict[str, Any] = {}
    for section in _SECTIONS:
        value = config.keywords.get(section)
        fault = part_fault(section, value) if section in _FOLLOWED else ""
        if fault:
            settings.faults.append(fault)
        if fault or not isinstance(value, ParsedCall):
            continue
        for name, written in value.keywords.items():
            if section == "dataset" and name != "seq_length":
                continue
            arguments[name] = written.last if isinstance(written, Named) else written
    arguments["use_distributed_optimizer"] = True  # the optimizer's own, which holds for both
    arguments |= _precision(config.keywords.get("mixed_precision"), settings)
    if arguments.pop("grad_reduce_in_fp32", True) is False:
        arguments["grad_reduce_in_bf16"] = True
    if not arguments.get("use_megatron_fsdp"):
        arguments.pop("data_parallel_sharding_strategy", None)
    arguments |= adapter_arguments(config.keywords.get("peft"))
    for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        arguments[name] = {"float32": "fp32", "bfloat16": "bf16"}.get(str(arguments.get(name)), arguments.get(name))
    return plain_arguments(arguments, asked, settings)


def _precision(value: Any, settings: Settings) -> dict[str, Any]:
    """Arguments of a recipe of number types: bf16_mixed, or bf16_with_fp8_current_scaling_mixed and the like."""
    name = value.callee.rpartition(".")[2] if isinstance(value, ParsedCall) else str(value)
    arguments: dict[str, Any] = dict(_PRECISIONS.get(name[:4], {}))
    if not arguments:
        settings.faults.append(none_of_few(f"mixed_precision = {shortened(name, 60)}", ["bf16_mixed", "fp16_mixed"]))
    if "fp8" in name or "fp4" in name:
        recipe = next((own for word, own in _FLOAT8.items() if word in name), "")
        if not recipe:
            settings.faults.append(
                say(
                    "{setting}: this recipe of fp8 is not here; leave it out of the file, and say --set "
                    "precision.float8=NAME",
                    setting=f"mixed_precision = {shortened(name, 60)}",
                )
            )
        arguments |= {"fp8": "hybrid", "fp8_recipe": recipe or "delayed"}
    return arguments


FACTS = SourceSystem(
    name="megatron-bridge", place=150, title="Megatron-Bridge", read=read, variables=(CONFIG,), signs=SIGNS
)
