"""NeMo 2 (NVIDIA): a recipe, which is a Python function that returns a configuration (nemo_run's Partial), and the
words of `nemo llm pretrain --factory NAME` that change it.

The function is followed and never run. Its model is a class of NeMo's, which the catalog has under the same name, or a
config.json.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from shardwright.config import catalog
from shardwright.config.base import shortened
from shardwright.config.phrase import say
from shardwright.interchange.hydra_command import hydra_value
from shardwright.interchange.imported import Asked, ReadResult, uncounted_note
from shardwright.interchange.known_settings import is_uncounted, subject_of
from shardwright.interchange.launcher import find_training_command
from shardwright.interchange.named_model import is_model
from shardwright.interchange.reading.file_signs import CONFIGURATIONS, FileSigns
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.python_expressions import Scope
from shardwright.interchange.reading.python_source import Reader, Source, source_of_text
from shardwright.interchange.reading.python_values import Named, ParsedCall
from shardwright.interchange.reading.settings import Settings
from shardwright.interchange.reading.shell_marks import readable, unknown_names
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.system import SourceSystem
from shardwright.interchange.systems.megatron_arguments import part_fault, plain_arguments, read_recipe
from shardwright.interchange.systems.nemo_performance import library_notes, set_primary_perf_configs
from shardwright.interchange.systems.recipe_adapters import adapter_arguments, class_of
from shardwright.interchange.training_programs import class_fault

SIGNS = (FileSigns(imports=(r"^[ \t]*import nemo_run\b", r"^[ \t]*from nemo_run import\b")),)
CONFIG = "CONFIG"  # the variable that names the function
_KINDS = ("pretrain", "finetune")
_TARGET = re.compile(r"(?:.*\.)?(pretrain|finetune)")
_CHANGE = re.compile(r"\+{0,2}((?:model|trainer|data|optim|peft|log|resume|tokenizer)(?:\.\w+)+)=(.*)", re.DOTALL)
_WITHOUT_EFFECT = ("log", "resume", "tokenizer")
_EXECUTOR = re.compile(r"(?:run\.)?executor[.=]")  # what starts the ranks
_SWITCHES = ("--yes", "-y", "--dryrun", "--no-confirm", "--verbose", "-v")
# Parts of a recipe -> arguments of Megatron-LM by their names there; the others of these parts have the same names.
_RENAMED: dict[str, dict[str, str]] = {
    "trainer": {"max_steps": "train_iters", "gradient_clip_val": "clip_grad"},
    "trainer.strategy": {"expert_tensor_model_parallel_size": "expert_tensor_parallel_size"},
    "trainer.strategy.ddp": {},
    "data": {},
    "optim.config": {},
    "optim.lr_scheduler": {
        "warmup_steps": "lr_warmup_iters",
        "warmup_ratio": "lr_warmup_fraction",
        "max_steps": "lr_decay_iters",
    },
}
# Fields of these parts that functions of their own read.
_OF_PARTS = {
    "trainer": ("strategy", "plugins", "precision", "devices", "num_nodes", "accumulate_grad_batches"),
    "trainer.strategy": ("ddp", "fsdp"),
}
_MEGATRON_DATA = ("MockDataModule", "PreTrainingDataModule")
_PRECISIONS = {"bf16": {"bf16": True}, "fp16": {"fp16": True}, "16-m": {"fp16": True}}
_FLOAT8 = {"current": "tensorwise", "mxfp8": "mxfp8", "blockwise": "blockwise", "subchannel": "blockwise"}
_SCHEDULES = {"CosineAnnealingScheduler": "cosine", "WarmupAnnealingScheduler": "linear"}


def _cosine(positional: list[Any], keywords: dict[str, Any]) -> ParsedCall:
    """distributed_fused_adam_with_cosine_annealing(): the optimizer and its rates, as NeMo has them."""
    lr = keywords.get("max_lr", 1e-4)
    config = {"optimizer": "adam", "lr": lr, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95}
    config |= {"adam_eps": 1e-5, "use_distributed_optimizer": True, "clip_grad": keywords.get("clip_grad", 1.0)}
    rates = {"warmup_steps": keywords.get("warmup_steps", 2000), "min_lr": keywords.get("min_lr") or 0.1 * lr}
    scheduler = ParsedCall("run.Config", rates, [Named("CosineAnnealingScheduler")])
    return ParsedCall("run.Config", {"config": ParsedCall("run.Config", config), "lr_scheduler": scheduler})


_MAKERS: dict[str, Any] = {
    "distributed_fused_adam_with_cosine_annealing": _cosine,
    "set_primary_perf_configs": set_primary_perf_configs,
    "PEFT_STR2CLS": lambda positional, keywords: Named(str(positional[0])),  # classes of adapters by their words
}


@dataclass(frozen=True)
class _Command:
    """The factory that a script names, with its arguments, and the fields that its words change."""

    kind: str = ""
    factory: str = ""
    arguments: Mapping[str, Any] | None = None
    changes: tuple[tuple[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


def read(texts: Mapping[str, str], asked: Asked) -> ReadResult:
    """Read a recipe, with the Python files whose functions it calls, the model's config.json, and the script that
    starts it. Raises ShellFault."""
    scripts = {name: text for name, text in texts.items() if not name.lower().endswith((".py", *CONFIGURATIONS))}
    command = _command(scripts, asked) if scripts else _Command()
    sources = [source_of_text(name, text) for name, text in texts.items() if name.endswith(".py")]
    others = [read_data(name, texts[name]) for name in texts if name.lower().endswith(CONFIGURATIONS)]
    reader = Reader(sources, dict(asked.variables), (), _MAKERS)
    source, name = _function(reader, command, asked)
    config = reader.call(source, name, [], dict(command.arguments or {}))
    is_known = isinstance(config, ParsedCall) and (config.is_of_class or not config.callee)
    if not is_known or not {"model", "trainer", "data"} <= config.keywords.keys():
        raise ShellFault(
            say(
                "{file}: {name} returns no configuration that is known; name the files of what it calls",
                file=source.short,
                name=name,
            )
        )
    _ask_for_parts(config, source)
    notes = [*reader.notes, *command.notes, *library_notes(config)]
    settings = Settings(notes=notes, overrides=asked.fields)
    for path, value in command.changes:
        _put(config, path, value, settings)
    return _result(config, next(filter(is_model, others), None), asked, settings)


def _ask_for_parts(config: ParsedCall, source: Source) -> None:
    """Raise ShellFault if a part of a recipe is what a function returns that is in none of the files."""
    for part in ("trainer", "trainer.strategy", "trainer.strategy.ddp", "data", "optim", "optim.config"):
        holder, _, name = part.rpartition(".")
        value = (_part(config, holder) if holder else config.keywords).get(name)
        if fault := part_fault(f"{source.short}: {part}", value):
            raise ShellFault(fault)


def _result(config: ParsedCall, model: dict[str, Any] | None, asked: Asked, settings: Settings) -> ReadResult:
    arguments = _arguments(config, asked, settings)
    trainer = _part(config, "trainer")
    nodes, devices = (trainer.get(name) for name in ("num_nodes", "devices"))
    launched = (nodes, devices) if isinstance(nodes, int) and isinstance(devices, int) else (0, 0)
    classes = [class_of(_call(config, path)) for path in ("model", "model.config")]
    settings.faults += [*filter(None, (class_fault(name, asked.variables) for name in classes))][:1]
    class_name = next((name for name in reversed(classes) if name), "")
    entry = _of_catalog(class_name)
    settings.given = {"model": entry or class_name} if model is None else {}
    return read_recipe(arguments, model, asked, launched, settings, "nemo-recipes")


def _command(scripts: Mapping[str, str], asked: Asked) -> _Command:
    """The words of `nemo llm pretrain --factory NAME` in a script. Raises ShellFault."""
    command = find_training_command(scripts, asked, _is_training)
    words = [*command.arguments]
    kind, factory, changes = next((word for word in words if word in _KINDS), _KINDS[0]), "", list[tuple[str, Any]]()
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if option in ("--factory", "-f"):
            factory = value if equals else words.pop(0) if words else ""
        elif (match := _CHANGE.fullmatch(word)) and not unknown_names(word):
            changes.append((match[1], hydra_value(match[2])))
        elif not (word in (*_SWITCHES, *_KINDS, "llm") or _EXECUTOR.match(word)):
            raise ShellFault(
                say(
                    "{setting} of the script is not known here; leave it out of the script, and say what it means by "
                    "fields of the job (--set SECTION.FIELD=VALUE)",
                    setting=shortened(readable(word), 60),
                )
            )
    name, arguments = _called(factory)
    return _Command(kind, name, arguments, tuple(changes), command.notes)


def _is_training(words: list[str]) -> bool:
    names = [PurePath(word).name for word in words]
    return any(names[at : at + 2] == ["nemo", "llm"] for at in range(len(names))) and bool({*_KINDS} & {*names})


def _called(factory: str) -> tuple[str, dict[str, Any]]:
    """The name of a factory and its arguments: "llama3_8b(num_nodes=2)". Raises ShellFault."""
    try:
        node = ast.parse(factory, mode="eval").body
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            return node.func.id, {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg is not None}
        if isinstance(node, ast.Name):
            return node.id, {}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    raise ShellFault(
        say(
            "--factory {factory} names no recipe that is known here; say it as NAME or NAME(field=value)",
            factory=shortened(readable(factory), 60),
        )
    )


def _function(reader: Reader, command: _Command, asked: Asked) -> tuple[Source, str]:
    """The file and the name of the recipe. Raises ShellFault if several could be meant."""
    known = [(source, name) for source in reader.sources for name in source.functions]
    if command.factory:
        of_factory = [pair for pair in known if _factory_of(reader, *pair) == (command.kind, command.factory)]
        wanted = of_factory or [pair for pair in known if pair[1] == command.factory]
    else:
        name = asked.variables.get(CONFIG)
        wanted = [pair for pair in known if pair[1] == name] if name else [p for p in known if "recipe" in p[1]]
    if len(wanted) == 1:
        return wanted[0]
    names = tuple(name for _, name in known if not name.startswith("_"))[:12]
    if command.factory:
        raise ShellFault(
            say(
                "the recipe {name} is in no file here (functions in the files: {known}); name its file, such as "
                "nemo/collections/llm/recipes/{name}.py",
                name=shortened(command.factory, 60),
                known=names,
            )
        )
    raise ShellFault(
        say(
            "nothing names the recipe (functions in the files: {known}); say it with --set {variable}=NAME",
            known=names,
            variable=CONFIG,
        )
    )


def _factory_of(reader: Reader, source: Source, name: str) -> tuple[str, str]:
    """(pretrain or finetune, name) that a function is registered as by a decorator; two empty words for another."""
    for node in source.functions[name].decorator_list:
        if not isinstance(node, ast.Call):
            continue
        values = {k.arg: reader.expressions.value(k.value, Scope(source, {})) for k in node.keywords}
        target, registered = values.get("target"), values.get("name")
        match = _TARGET.fullmatch(target.text) if isinstance(target, Named) else None
        if match and isinstance(registered, str):
            return match[1], registered
    return "", ""


def _put(config: ParsedCall, path: str, value: Any, settings: Settings) -> None:
    """Change a field of a configuration, by its path."""
    *parts, field = path.split(".")
    holder: Any = config
    for part in parts:
        holder = holder.keywords.setdefault(part, ParsedCall("")) if isinstance(holder, ParsedCall) else None
    if isinstance(holder, ParsedCall):
        holder.keywords[field] = value
    elif parts[0] not in _WITHOUT_EFFECT:
        settings.faults.append(say("{setting} is not known here; leave it out", setting=path))


def _call(config: ParsedCall, path: str) -> ParsedCall | None:
    """The part of a configuration at a path; None if there is none."""
    holder: Any = config
    for part in path.split("."):
        holder = holder.keywords.get(part) if isinstance(holder, ParsedCall) else None
    return holder if isinstance(holder, ParsedCall) else None


def _part(config: ParsedCall, path: str) -> dict[str, Any]:
    call = _call(config, path)
    return call.keywords if call else {}


def _of_catalog(class_name: str) -> str:
    """The catalog's model that a class of NeMo's is called after: Llama3Config8B is llama3-8b; empty if none is."""
    plain = re.sub(r"[^a-z0-9]", "", class_name.lower().replace("config", ""))
    return next((name for name in catalog.names("models") if re.sub(r"[^a-z0-9]", "", name) == plain), "")


def _arguments(config: ParsedCall, asked: Asked, settings: Settings) -> dict[str, Any]:
    """Megatron-LM's arguments of the parts of a recipe that say the plan and the training."""
    arguments: dict[str, Any] = {}
    for part, names in _RENAMED.items():
        values = {name: value for name, value in _part(config, part).items() if name not in _OF_PARTS.get(part, ())}
        arguments |= {names.get(name, name): value for name, value in values.items()}
    if not arguments.get("use_megatron_fsdp"):
        arguments.pop("data_parallel_sharding_strategy", None)
    of_model = _part(config, "model.config")
    arguments |= {name: value for name, value in of_model.items() if _recomputes(name)}
    if "seq_length" not in arguments and "seq_length" in of_model:
        arguments["seq_length"] = of_model["seq_length"]
    length = _part(config, "data.packed_sequence_specs").get("packed_sequence_size")
    if length is not None and length != arguments.get("seq_length"):
        arguments["packed_sequence_size"] = length
    scheduler = class_of(_call(config, "optim.lr_scheduler"))
    arguments["lr_decay_style"] = _SCHEDULES.get(scheduler, "cosine")
    arguments["use_distributed_optimizer"] = arguments.get("use_distributed_optimizer", True)
    _refuse_others(config, settings)
    trainer = _part(config, "trainer")
    arguments |= _precision(trainer.get("plugins") or trainer.get("precision"), settings)
    if arguments.pop("grad_reduce_in_fp32", True) is False:
        arguments["grad_reduce_in_bf16"] = True
    arguments |= adapter_arguments(config.keywords.get("peft"))
    return plain_arguments(arguments, asked, settings)


def _recomputes(name: str) -> bool:
    """True for a field of the model's configuration that says what is computed again."""
    return name.startswith("recompute_")


def _refuse_others(config: ParsedCall, settings: Settings) -> None:
    """Faults of what changes the batch, the model or the plan, and is not read."""
    trainer = _part(config, "trainer")
    accumulated = trainer.get("accumulate_grad_batches", 1)
    changes = {f"trainer.accumulate_grad_batches = {accumulated}": accumulated not in (1, None)}
    word = trainer.get("strategy")
    strategy = word if isinstance(word, str) else class_of(_call(config, "trainer.strategy"))
    changes[f"trainer.strategy = {strategy}"] = strategy not in ("MegatronStrategy", "")
    fsdp = _part(config, "trainer.strategy").get("fsdp")
    changes[f"trainer.strategy.fsdp = {fsdp}"] = fsdp is not None
    of_model = (name for name in _part(config, "model.config") if name != "seq_length" and not _recomputes(name))
    changes |= {f"model.config.{name}": True for name in of_model if not _tell_known(name, config, settings)}
    for setting, is_changed in changes.items():
        if is_changed:
            settings.faults.append(
                say(
                    "{setting} is not counted here; say what it means by fields of the job (--set "
                    "SECTION.FIELD=VALUE), and leave it out",
                    setting=shortened(setting, 60),
                )
            )


def _tell_known(name: str, config: ParsedCall, settings: Settings) -> bool:
    """True if a field of the model's configuration is known to leave the model and the plan as they are; one that
    changes memory or time is told."""
    topic = subject_of("nemo", f"model.{name}") or subject_of("megatron", name.replace("_", "-"))
    if is_uncounted(topic):
        setting = f"model.config.{name} = {shortened(str(_part(config, 'model.config')[name]), 40)}"
        settings.lost.append(uncounted_note([setting], topic))
    return bool(topic)


def _precision(value: Any, settings: Settings) -> dict[str, Any]:
    """Arguments of a plugin of number types: bf16_mixed(), bf16_with_fp8_mixed(), or MegatronMixedPrecision."""
    call = value[0] if isinstance(value, list) and value else value
    call = ParsedCall(call) if isinstance(call, str) else call
    if not isinstance(call, ParsedCall):
        settings.note(say("nothing says the number type; bf16 is taken (--set precision.compute=NAME)"))
        return {"bf16": True}
    name = str(call.keywords.get("precision") or call.callee.rpartition(".")[2])
    arguments: dict[str, Any] = dict(_PRECISIONS.get(name[:4], {}))
    if not arguments and "32" not in name:
        settings.faults.append(
            say(
                "{setting} is not known here; say --set precision.compute=NAME",
                setting=f"plugins = {shortened(name, 40)}",
            )
        )
    if call.keywords.get("grad_reduce_in_fp32") is False:
        arguments["grad_reduce_in_bf16"] = True
    is_narrow = "fp8" in name or call.keywords.get("fp8") is not None
    recipe = call.keywords.get("fp8_recipe")
    stated = recipe.last if isinstance(recipe, Named) else str(recipe or "")
    words = stated or next((own for word, own in _FLOAT8.items() if word in name), "delayed")
    return arguments | ({"fp8": "hybrid", "fp8_recipe": words} if is_narrow else {})


FACTS = SourceSystem(name="nemo-recipes", place=152, title="NeMo 2", read=read, variables=(CONFIG,), signs=SIGNS)
