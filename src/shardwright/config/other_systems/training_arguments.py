"""Settings that DeepSpeed and Accelerate leave to the program that they start: the options of transformers'
TrainingArguments, and the model in its config.json. Keys are as command lines have them: "--learning_rate"."""

import json
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from shardwright.config.base import PlanError, shortened
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.hugging_face.config_json import fields_of
from shardwright.config.hugging_face.written_config import written_config
from shardwright.config.job import JobSpec
from shardwright.config.other_systems.imported import Asked
from shardwright.config.other_systems.launcher import Launched, launched, missing_ranks
from shardwright.config.other_systems.megatron_flags import flag_words
from shardwright.config.other_systems.plain_data import read_data
from shardwright.config.other_systems.rows import Rule, Table, number
from shardwright.config.other_systems.settings import Flat, Settings
from shardwright.config.other_systems.shell_values import unknown_names
from shardwright.config.other_systems.shell_words import ShellFault

WORLD = "world_size"
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
              "cosine_with_min_lr": "cosine", "inverse_sqrt": "inverse-sqrt", "warmup_stable_decay": "wsd"}  # fmt: skip
_OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_apex_fused": "adamw",
    "adafactor": "adafactor", "sgd": "sgd", "lion_32bit": "lion",
}  # fmt: skip
_SEQUENCE = ("--block_size", "--max_seq_length", "--max_length", "--model_max_length")


def is_training(words: list[str]) -> bool:
    """True if a command starts training with DeepSpeed, Accelerate, or options that transformers reads."""
    names = {word.partition("=")[0].replace("-", "_").strip("_") for word in words}
    program = any(word.endswith(".py") for word in words)
    telling = {"deepspeed", "deepspeed_config", "per_device_train_batch_size", "config_file", "learning_rate"}
    return program and (bool(names & telling) or words[0].rpartition("/")[2] in ("deepspeed", "accelerate"))


@dataclass(frozen=True)
class FileParts:
    """Settings of all files, names of those that are left to another file ("auto"), keys of a config.json, the command
    of a launch script, and a fault for each file that they name and that is not there."""

    given: dict[str, Any]
    automatic: frozenset[str]
    model: dict[str, Any] | None
    command: Launched | None
    faults: tuple[str, ...]

    def settings(self, asked: Asked, world: int) -> Settings:
        """The settings of all files and of the command, to be read for so many devices; 0 is not known."""
        missing = [] if world or not self.command else missing_ranks(self.command)
        return Settings(
            self.given | ({WORLD: world} if world else {}), notes=list(self.command.notes) if self.command else [],
            faults=[*self.faults, *missing], overrides=asked.fields, automatic=self.automatic,
        )  # fmt: skip


def read_parts(texts: Mapping[str, str], asked: Asked, is_own: Callable[[dict[str, Any]], bool]) -> FileParts:
    """Read all files. `is_own` says whether keys are of the system's own configuration. Raises ShellFault."""
    given: dict[str, Any] = {}
    model: dict[str, Any] | None = None
    has_own = False
    command: Launched | None = None
    scripts = {name: text for name, text in texts.items() if not name.lower().endswith((".json", ".yaml", ".yml"))}
    scripts = {name: text for name, text in scripts.items() if not text.lstrip().startswith("{")}
    if scripts:
        command = launched(scripts, asked.variables, is_training)
        for flags in (command.before, command.settings):
            given |= {
                f"--{name.replace('-', '_')}": value for name, value in flags.items() if not name.startswith("slurm")
            }
    written = command.written if command else {}
    for name, text in {**{path: text for path, text in written.items() if path.endswith((".json", ".yaml"))},
                       **{name: text for name, text in texts.items() if name not in scripts}}.items():  # fmt: skip
        data = read_data(name if name.endswith((".json", ".yaml", ".yml")) else f"{name}.json", text)
        if "model_type" in data or "text_config" in data:
            model = data
        elif is_own(data):
            given |= flat_keys(data)
            has_own = True
        elif "per_device_train_batch_size" in data or "learning_rate" in data:
            given |= {f"--{key}": value for key, value in data.items()}
        else:
            raise ShellFault(
                f"{name} is neither the system's configuration, nor a config.json with model_type, nor options; check"
            )
    names = {PurePath(name).name for name in (*texts, *written)}
    return FileParts(
        {key: value for key, value in given.items() if value != "auto"},
        frozenset(key for key, value in given.items() if value == "auto"),
        model,
        command,
        tuple(_missing_files(given, names, has_own)),
    )


_FILES = ("--deepspeed", "--deepspeed_config", "--deepspeed_config_file", "deepspeed_config.deepspeed_config_file",
          "--config_file", "--fsdp_config")  # fmt: skip


def _missing_files(given: dict[str, Any], names: Set[str], has_own: bool) -> Iterator[str]:
    """A fault for each configuration that is named in another file, or in a script, and that is not read."""
    for key in _FILES:
        value = given.get(key)
        if not isinstance(value, str) or value in ("none", "") or value.lstrip().startswith("{"):
            continue
        is_there = has_own if unknown_names(value) else PurePath(value).name in names
        if not is_there:
            yield f"{key} {shortened(value)} is a file that is not read, and it says how things are split: name it too"


def read_model(model: dict[str, Any] | None, asked: Asked, settings: Settings, fields: Flat) -> None:
    """Fields of the model of a config.json, and its sequences."""
    if model is None:
        if not any(name in asked.fields for name in ("model.name", "model.weights", "model.layers")):
            settings.faults.append(
                "nothing says what the model is; name its config.json as a further file, or --set "
                "model.name=NAME of the catalog"
            )
        return
    model_fields, faults = fields_of(model)
    settings.faults += [f"config.json: {fault}; name another if it is not meant" for fault in faults]
    coefficient = model.get("router_aux_loss_coef")
    if (
        "moe" in model_fields
        and model.get("output_router_logits") is True
        and isinstance(coefficient, (int, float))
        and coefficient > 0
    ):
        model_fields["moe"] |= {"aux_loss": "switch", "aux_coefficient": float(coefficient)}
    fields |= {f"model.{name}": value for name, value in model_fields.items()}


def _read_sequence(settings: Settings, fields: Flat) -> None:
    tokens = settings.count(_SEQUENCE, 0)
    if tokens:
        fields["model.sequence"] = tokens
    elif "model.sequence" in fields:
        settings.note(
            f"nothing says how long samples are; {fields['model.sequence']:,} tokens are taken (--set model.sequence=N)"
        )


def _write_sequence(job: JobSpec, settings: dict[str, Any]) -> None:
    settings["--block_size"] = job.model.sequence


def _read_rate(settings: Settings, fields: Flat) -> None:
    steps = settings.count(("--max_steps", "--max_train_steps", "scheduler.params.total_num_steps"), 0)
    if not steps:
        steps = 1000
        settings.note("nothing says how many steps the run has; 1,000 are taken (--set optimizer.steps=N)")
    kind = settings.one_of("--lr_scheduler_type", _SCHEDULES, "linear")
    more = settings.raw("--lr_scheduler_kwargs")
    try:
        extra = more if isinstance(more, dict) else json.loads(str(more)) if more else {}
    except (ValueError, RecursionError):
        extra = {}
        settings.faults.append(f"{settings.said('--lr_scheduler_kwargs')}: it should be JSON")
    extra = extra if isinstance(extra, dict) else {}
    kind = _own_schedule(settings, kind)
    ratio = settings.number("--warmup_ratio", 0.0)
    warmup = settings.count(
        ("--warmup_steps", "--num_warmup_steps", "scheduler.params.warmup_num_steps"),
        1000 if _is_default(settings, "scheduler.params.warmup_num_steps") else round(ratio * steps),
    )
    fields |= {"optimizer.steps": steps, "optimizer.warmup_steps": min(steps, warmup), "optimizer.schedule": kind}
    is_cosine = settings.text("scheduler.type") == "WarmupCosineLR"
    lowest = 0.0001 if is_cosine and settings.is_open("scheduler.params.cos_min_ratio") else 0.0
    least = extra.get(
        "min_lr_rate", extra.get("min_lr_ratio", settings.number("scheduler.params.cos_min_ratio", lowest))
    )
    fields["optimizer.min_learning_rate_ratio"] = least if isinstance(least, (int, float)) else 0.0
    if kind == "wsd":
        falling = extra.get("num_decay_steps", max(1, steps // 10))
        fields["optimizer.decay_share"] = min(1.0, falling / steps) if isinstance(falling, int) and falling > 0 else 0.1
        shape = str(extra.get("decay_type", "cosine"))
        fields["optimizer.decay_shape"] = {"linear": "linear", "cosine": "cosine", "1-sqrt": "sqrt"}.get(
            shape, "linear"
        )
    settings.lose("--num_train_epochs", "steps are counted here (--set optimizer.steps=N)")


_OWN_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def _is_default(settings: Settings, name: str) -> bool:
    """True if a schedule of DeepSpeed's own is there, and a parameter of it has DeepSpeed's default."""
    return settings.text("scheduler.type") in _OWN_SCHEDULES and settings.is_open(name)


def _own_schedule(settings: Settings, kind: str) -> str:
    """The schedule of DeepSpeed's configuration in place of the program's."""
    own = settings.text("scheduler.type")
    if not own:
        return kind
    if own not in _OWN_SCHEDULES and "optimizer.schedule" not in settings.overrides:
        settings.faults.append(
            f"scheduler.type = {shortened(own)} can't be said here; use one of {', '.join(_OWN_SCHEDULES)}, or say "
            "what comes near it with --set optimizer.schedule=NAME, such as cosine"
        )
    if own in _OWN_SCHEDULES and settings.text("scheduler.params.warmup_type", "log") == "log":
        settings.lost.append("scheduler.params.warmup_type is log there, and the warm-up is linear here")
    return _OWN_SCHEDULES.get(own, kind)


def _read_peak(settings: Settings, fields: Flat) -> None:
    """The learning rate: an optimizer or a schedule of DeepSpeed's own has DeepSpeed's default, 1e-3."""
    names = ("--learning_rate", "optimizer.params.lr", "scheduler.params.warmup_max_lr")
    falls = settings.text("scheduler.type") == "WarmupDecayLR" and settings.is_open(names[2])
    own = settings.has("optimizer.type") and settings.is_open(names[1])
    default = 1e-3 if falls or own else 5e-5
    if settings.is_open(*names):
        settings.note(f"nothing says the learning rate; {default:g} is taken (--set optimizer.learning_rate=RATE)")
    fields["optimizer.learning_rate"] = settings.number(names, default)


def _write_peak(job: JobSpec, settings: dict[str, Any]) -> None:
    settings["--learning_rate"] = job.optimizer.learning_rate


def _write_rate(job: JobSpec, settings: dict[str, Any]) -> None:
    optimizer = job.optimizer
    settings |= {"--max_steps": optimizer.steps, "--warmup_steps": optimizer.warmup_steps}
    least = optimizer.min_learning_rate_ratio
    names = {"constant": "constant_with_warmup", "inverse-sqrt": "inverse_sqrt", "wsd": "warmup_stable_decay"}
    name = names.get(optimizer.schedule, optimizer.schedule)
    if name == "cosine" and least:
        name = "cosine_with_min_lr"
        settings["--lr_scheduler_kwargs"] = json.dumps({"min_lr_rate": least})
    if name == "warmup_stable_decay":
        shape = {"sqrt": "1-sqrt"}.get(optimizer.decay_shape, optimizer.decay_shape)
        falling = max(1, round(optimizer.decay_share * optimizer.steps))
        settings["--lr_scheduler_kwargs"] = json.dumps(
            {"num_decay_steps": falling, "decay_type": shape, "min_lr_ratio": least}
        )
    settings["--lr_scheduler_type"] = name


def _read_optimizer(settings: Settings, fields: Flat) -> None:
    own = settings.text("optimizer.type").lower()
    fields["optimizer.name"] = settings.one_of("--optim", _OPTIMIZERS, "adamw_torch")
    if own:
        names = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "lion": "lion", "sgd": "sgd", "muon": "muon"}
        if own not in names:
            settings.faults.append(f"optimizer.type = {own[:40]} can't be said here; use one of {', '.join(names)}")
        fields["optimizer.name"] = names.get(own, "adamw")
        if own == "adam" and settings.flag("optimizer.params.adam_w_mode", True) is False:
            fields["optimizer.name"] = "adam"
    betas = settings.raw("optimizer.params.betas")
    pair = (
        betas
        if isinstance(betas, list) and len(betas) == 2 and all(type(one) in (int, float) for one in betas)
        else (0.9, 0.999)
    )
    fields |= {
        "optimizer.beta1": settings.number("--adam_beta1", float(pair[0])),
        "optimizer.beta2": settings.number("--adam_beta2", float(pair[1])),
    }
    fields["optimizer.epsilon"] = settings.number(("--adam_epsilon", "optimizer.params.eps"), 1e-8)
    fields["optimizer.momentum"] = settings.number("optimizer.params.momentum", 0.0)


def _write_optimizer(job: JobSpec, settings: dict[str, Any]) -> None:
    optimizer = job.optimizer
    settings["--optim"] = next(
        (word for word, fields in _OPTIMIZERS.items() if fields == optimizer.name), "adamw_torch"
    )
    if optimizer.name not in ("sgd", "adafactor"):
        settings |= {
            "--adam_beta1": optimizer.beta1,
            "--adam_beta2": optimizer.beta2,
            "--adam_epsilon": optimizer.epsilon,
        }


def _read_recompute(settings: Settings, fields: Flat) -> None:
    if settings.flag("--gradient_checkpointing"):
        fields["plan.recompute"] = "full"


def _write_recompute(job: JobSpec, settings: dict[str, Any]) -> None:
    if job.plan.recompute == "full" and job.plan.recompute_every == 1:
        settings["--gradient_checkpointing"] = True


OPTIONS: Table = (
    Rule(("--block_size",), _read_sequence, _write_sequence),
    Rule(("--gradient_checkpointing",), _read_recompute, _write_recompute),
    Rule(("--optim",), _read_optimizer, _write_optimizer),
    Rule(("--learning_rate",), _read_peak, _write_peak),
    number("--weight_decay optimizer.params.weight_decay", "optimizer.weight_decay", 0.0, always=True),
    Rule(("--max_steps", "--lr_scheduler_type"), _read_rate, _write_rate),
)


def model_file(job: JobSpec) -> str:
    """The config.json of a job's model. PlanError if no family has it."""
    try:
        keys = written_config(job.model)[1]
    except PlanError as error:
        fault = (
            "no family of Hugging Face's has these layers, so there is no config.json for them; use a model that one "
        )
        raise PlanError(error.subject, [f"{fault}has, such as --set model.name=llama3-8b, or --to megatron"]) from None
    if job.model.moe.aux_loss == "switch" and job.model.moe.aux_scope == "microbatch":
        keys |= {"output_router_logits": True, "router_aux_loss_coef": job.model.moe.aux_coefficient}
    return json.dumps(keys, indent=2) + "\n"


def option_lines(options: dict[str, Any]) -> list[str]:
    """Options as lines of a command."""
    return flag_words({name.removeprefix("--"): value for name, value in options.items() if name.startswith("--")})
