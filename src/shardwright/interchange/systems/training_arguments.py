"""Settings of the program that DeepSpeed and Accelerate start: options of transformers' TrainingArguments, and the
model in config.json. Keys have the form of the command line: "--learning_rate"."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import PurePath
from typing import Any

from shardwright.config.base import PlanError, shortened
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.hugging_face.written_config import written_config
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.interchange.imported import Asked
from shardwright.interchange.launcher import Launched, find_training_command, missing_ranks
from shardwright.interchange.left_out_files import left_out, left_out_note, overwritten_names, overwritten_note
from shardwright.interchange.named_model import changed_keys, is_model, read_named_model
from shardwright.interchange.reading.configuration_keys import ENGINE_KEYS
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.script_text import flag_words
from shardwright.interchange.reading.setting_notes import (
    counted_as_adamw,
    nearest_here,
    pages_stay,
    taken_rate,
)
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.rows import Rule, Table, never, number
from shardwright.interchange.systems import alpaca_lora
from shardwright.interchange.systems.adapter_settings import (
    read_adapter,
    with_adapters_by_name,
    without_negations,
    without_sections,
)
from shardwright.interchange.systems.checkpointing_options import keyword_options, read_recompute, write_recompute
from shardwright.interchange.systems.deepspeed_batch import WORLD
from shardwright.interchange.systems.llama_factory import length_of_samples, own_options
from shardwright.interchange.systems.missing_configurations import OF_OPTIONS, configurations_missing
from shardwright.interchange.systems.sample_lengths import read_length, write_length
from shardwright.interchange.systems.switched_off import ignore_switched_off
from shardwright.interchange.systems.trainer_command import is_training
from shardwright.interchange.training_programs import program_fault, read_kind, taken_for_trainer, told_of_vocabulary

NUMBERS = frozenset(("--gradient_accumulation_steps", "--per_device_train_batch_size"))  # options that are never "auto"
_PARALLEL = "parallelism_config.parallelism_config_"  # before Accelerate's degrees, which programs over it have, too
TENSOR_SIZE, RING_SIZE = f"{_PARALLEL}tp_size", f"{_PARALLEL}cp_size"
SHARD_SIZES = (f"{_PARALLEL}dp_shard_size", f"{_PARALLEL}dp_replicate_size")
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "inverse_sqrt": "inverse-sqrt",
    "warmup_stable_decay": "wsd",
}
_NEAREST = {"cosine_with_restarts": "cosine", "cosine_warmup_with_min_lr": "cosine", "reduce_lr_on_plateau": "constant"}
_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "lion_32bit": "lion",
    "paged_adamw_32bit": "adamw",
    "adamw": "adamw",
}
_DATA = (".json", ".yaml", ".yml")  # of files that are no scripts
_OWN_OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "fusedadam": "adamw",
    "lion": "lion",
    "sgd": "sgd",
    "muon": "muon",
}


@dataclass(frozen=True)
class FileParts:
    """The contents of all files: settings, names of settings whose value is "auto", keys of config.json (`model`), the
    training command, and a fault for each file that they name and that is missing."""

    given: dict[str, Any]
    automatic: frozenset[str]
    model: dict[str, Any] | None
    command: Launched | None
    faults: tuple[str, ...]
    notes: tuple[str, ...] = ()
    spelled: Mapping[str, str] = field(default_factory=dict)  # names of settings as a file has them

    def settings(self, asked: Asked, world: int) -> Settings:
        """The settings of all files and of the command, for `world` devices; 0 means unknown."""
        automatic = [
            say("{setting}: a program takes a number", setting=f"{name} = auto")
            for name in sorted(NUMBERS & self.automatic)
        ]
        missing = [] if world or not self.command else missing_ranks(self.command)
        program, words = (self.command.program, self.command.arguments) if self.command else ("", [])
        task = words[0] if words else ""
        programs = (program, task if task.isidentifier() else "")
        of_programs = [program_fault(name, asked.variables) for name in programs]
        return Settings(
            self.given | ({WORLD: world} if world else {}),
            notes=[*self.notes, *taken_for_trainer(program, words), *(self.command.notes if self.command else ())],
            faults=[*filter(None, of_programs), *self.faults, *automatic, *missing],
            overrides=asked.fields,
            lost=told_of_vocabulary(program),
            automatic=self.automatic,
            spelled=self.spelled,
            asks_ranks=bool(missing),
        )


def read_parts(texts: Mapping[str, str], asked: Asked, is_own: Callable[[dict[str, Any]], bool]) -> FileParts:
    """Read all files. `is_own` tells if a file with some keys is the system's configuration. Raises ShellFault."""
    given: dict[str, Any] = {}
    model: dict[str, Any] | None = None
    has_own = False
    command: Launched | None = None
    files = {name for name, text in texts.items() if text.lstrip()[:1] == "{" or name.lower().endswith(_DATA)}
    if scripts := {name: text for name, text in texts.items() if name not in files}:
        command = find_training_command(scripts, asked, is_training, files)
        for flags in (command.launcher_settings, command.settings):
            own = {name.replace("-", "_"): value for name, value in flags.items() if not name.startswith("slurm")}
            given |= {f"--{name}": value for name, value in own.items()}
        given |= {"--config": command.options_file} if command.options_file else {}
        given |= own_options({name.removeprefix("--"): value for name, value in given.items()})
        given |= length_of_samples(command.program, given)
        given = with_adapters_by_name(command.program, without_negations(given))
    of_alpaca = dict(given)
    given = alpaca_lora.renamed(given, asked)
    others = left_out(texts, command, asked.rivals) if command else []
    texts = {name: text for name, text in texts.items() if name not in others}
    of_command = dict(given)  # a command line is said over the files that it names
    written = command.written if command else {}
    overwritten = overwritten_names(files, written)
    of_models = set[str]()
    for name, text in {
        **{path: text for path, text in written.items() if path.endswith((".json", ".yaml"))},
        **{name: text for name, text in texts.items() if name in files and name not in overwritten},
    }.items():
        data = read_data(name if name.endswith(_DATA) else f"{name}.json", text)
        if is_model(data):
            model = data
            of_models.add(name)
        elif is_own(data) and not _has_options(data):
            given |= flat_keys(data)
            has_own = True
        elif _has_options(data):
            given |= of_file({f"--{key}": value for key, value in data.items()}) | own_options(data)
        else:
            raise ShellFault(
                program_fault(PurePath(name).stem, asked.variables)
                or say(
                    "{file} is neither the system's configuration, nor a config.json with model_type, nor options; "
                    "check",
                    file=name,
                )
            )
    given |= of_command
    names = {PurePath(name).name for name in (*texts, *written) if name not in of_models}
    faults, notes = configurations_missing(command, given, names, has_own, asked.fields)
    faults += alpaca_lora.faults_of(command.program if command else "", of_alpaca, asked)
    notes += alpaca_lora.notes_of(of_alpaca)
    return FileParts(
        {key: value for key, value in given.items() if value != "auto"},
        frozenset(key for key, value in given.items() if value == "auto"),
        model,
        command,
        tuple(faults),
        (*map(overwritten_note, overwritten), *map(left_out_note, others), *notes),
    )


def of_file(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a file as those of a command: sections for adapters and for FSDP become options."""
    options = without_sections(options)
    if isinstance(config := options.get("--fsdp_config"), dict):
        options = {"--fsdp": True} | options | {"--fsdp_config": json.dumps(config)}
    return options


_OF_ENGINES = (*chain.from_iterable(ENGINE_KEYS),)


def _has_options(data: Mapping[str, Any]) -> bool:
    """True if a file has options of transformers' TrainingArguments, as command lines have them."""
    return any(key in data for key in OF_OPTIONS) and not any(key in data for key in _OF_ENGINES)


_MODEL_NAMES = (
    *("--config_name", "--model_name_or_path", "--model", "--base_model", "--model_name", "--model_id", "--model_path"),
    *("--pretrained_model_name_or_path", "--base_model_name_or_path", "--model_id_or_path", "--base_model_name"),
    *("--llm_model_name_or_path", "--hf_model_name_or_path"),
)


def read_model(model: dict[str, Any] | None, asked: Asked, settings: Settings, fields: Flat) -> None:
    """Set the fields of the model from the keys of its config.json, by its name, or by its type."""
    model = changed_keys(model, _MODEL_NAMES, settings)
    fields |= read_named_model(model, _MODEL_NAMES, asked, settings)


def _read_rate(settings: Settings, fields: Flat) -> None:
    if settings.text("--max_steps") == "-1":  # the number of epochs counts
        settings.given = {name: value for name, value in settings.given.items() if name != "--max_steps"}
    steps = settings.count(("--max_steps", "--max_train_steps", "scheduler.params.total_num_steps"), 0)
    if not steps:
        steps = 1000
        settings.note(say("nothing says how many steps the run has; 1,000 are taken (--set optimizer.steps=N)"))
    kind = _schedule(settings)
    kwargs = keyword_options(settings, "--lr_scheduler_kwargs")
    kind = _own_schedule(settings, kind)
    fields |= {
        "optimizer.steps": steps,
        "optimizer.warmup_steps": min(steps, _warmup(settings, steps)),
        "optimizer.schedule": kind,
    }
    is_cosine = settings.text("scheduler.type") == "WarmupCosineLR"
    default_ratio = 0.0001 if is_cosine and settings.is_open("scheduler.params.cos_min_ratio") else 0.0
    lowest_ratio = kwargs.get(
        "min_lr_rate", kwargs.get("min_lr_ratio", settings.number("scheduler.params.cos_min_ratio", default_ratio))
    )
    fields["optimizer.min_learning_rate_ratio"] = lowest_ratio if isinstance(lowest_ratio, (int, float)) else 0.0
    if kind == "wsd":
        decay_steps = kwargs.get("num_decay_steps", max(1, steps // 10))
        fields["optimizer.decay_share"] = (
            min(1.0, decay_steps / steps) if isinstance(decay_steps, int) and decay_steps > 0 else 0.1
        )
        shape = str(kwargs.get("decay_type", "cosine"))
        fields["optimizer.decay_shape"] = {"linear": "linear", "cosine": "cosine", "1-sqrt": "sqrt"}.get(
            shape, "linear"
        )
    for name in ("--num_train_epochs", "--num_epochs"):
        settings.lose(name, say("steps are counted here (--set optimizer.steps=N)"))


def _warmup(settings: Settings, steps: int) -> int:
    """The number of steps of the warm-up, which options say as steps or as a share of all steps."""
    ratio = settings.number("--warmup_ratio", 0.0)
    share = settings.given.get("--warmup_steps")
    if isinstance(share, float) and 0 < share < 1:  # of the steps, as of transformers 5
        ratio = share
        settings.ignore("--warmup_steps")
        settings.given = {name: value for name, value in settings.given.items() if name != "--warmup_steps"}
    return settings.count(
        ("--warmup_steps", "--num_warmup_steps", "scheduler.params.warmup_num_steps"),
        1000 if _is_default(settings, "scheduler.params.warmup_num_steps") else round(ratio * steps),
    )


def _schedule(settings: Settings) -> str:
    """The schedule of the program, or the nearest to it: neither memory nor time depends on it."""
    word = settings.text("--lr_scheduler_type", "linear").lower().removeprefix("schedulertype.")
    if word not in _SCHEDULES:
        nearest = _NEAREST.get(word, "linear")
        settings.lost.append(nearest_here(settings.setting_text("--lr_scheduler_type"), nearest))
        return nearest
    return _SCHEDULES[word]


_OWN_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def _is_default(settings: Settings, name: str) -> bool:
    """True if the schedule is DeepSpeed's own, and a parameter of it is left at DeepSpeed's default."""
    return settings.text("scheduler.type") in _OWN_SCHEDULES and settings.is_open(name)


def _own_schedule(settings: Settings, kind: str) -> str:
    """The schedule of DeepSpeed's configuration if it has one, else the program's schedule `kind`."""
    own_type = settings.text("scheduler.type")
    if not own_type:
        return kind
    if own_type not in _OWN_SCHEDULES and "optimizer.schedule" not in settings.overrides:
        settings.lost.append(nearest_here(f"scheduler.type = {shortened(own_type)}", kind))
    if own_type in _OWN_SCHEDULES and settings.text("scheduler.params.warmup_type", "log") == "log":
        settings.lost.append(say("scheduler.params.warmup_type is log there, and the warm-up is linear here"))
    return _OWN_SCHEDULES.get(own_type, kind)


def _read_peak(settings: Settings, fields: Flat) -> None:
    """Read the peak learning rate. Its default is 1e-3 with an optimizer or schedule of DeepSpeed's, else 5e-5."""
    names = ("--learning_rate", "optimizer.params.lr", "scheduler.params.warmup_max_lr")
    has_own_schedule = settings.text("scheduler.type") == "WarmupDecayLR" and settings.is_open(names[2])
    has_own_optimizer = settings.has("optimizer.type") and settings.is_open(names[1])
    default = 1e-3 if has_own_schedule or has_own_optimizer else 5e-5
    if settings.is_open(*names):
        settings.note(taken_rate(f"{default:g}"))
    fields["optimizer.learning_rate"] = settings.number(names, default)


def _write_peak(job: JobSpec, settings: dict[str, Any]) -> None:
    settings["--learning_rate"] = job.optimizer.learning_rate


def _write_rate(job: JobSpec, settings: dict[str, Any]) -> None:
    optimizer = job.optimizer
    settings |= {"--max_steps": optimizer.steps, "--warmup_steps": optimizer.warmup_steps}
    lowest_ratio = optimizer.min_learning_rate_ratio
    names = {"constant": "constant_with_warmup", "inverse-sqrt": "inverse_sqrt", "wsd": "warmup_stable_decay"}
    name = names.get(optimizer.schedule, optimizer.schedule)
    if name == "cosine" and lowest_ratio:
        name = "cosine_with_min_lr"
        settings["--lr_scheduler_kwargs"] = json.dumps({"min_lr_rate": lowest_ratio})
    if name == "warmup_stable_decay":
        shape = {"sqrt": "1-sqrt"}.get(optimizer.decay_shape, optimizer.decay_shape)
        decay_steps = max(1, round(optimizer.decay_share * optimizer.steps))
        settings["--lr_scheduler_kwargs"] = json.dumps(
            {"num_decay_steps": decay_steps, "decay_type": shape, "min_lr_ratio": lowest_ratio}
        )
    settings["--lr_scheduler_type"] = name


_OF_PROGRAMS = ("--optimizer", "--optimizer_name", "--optimizer_type")  # of people's own
_NAMED = re.compile(r"(?:^|[\s,{])(?:name|type)\s?[=:]\s?['\"]?(\w+)")


def _read_optimizer(settings: Settings, fields: Flat) -> None:
    own_type = settings.text("optimizer.type").lower()
    fields["optimizer.name"] = _optimizer(settings, "--optim", _OPTIMIZERS)
    if own_name := next((name for name in _OF_PROGRAMS if settings.has(name)), ""):
        fields["optimizer.name"] = _optimizer(settings, own_name, _OWN_OPTIMIZERS | _OPTIMIZERS)
    if own_type:
        fields["optimizer.name"] = _optimizer(settings, "optimizer.type", _OWN_OPTIMIZERS)
        if own_type == "adam" and settings.flag("optimizer.params.adam_w_mode", True) is False:
            fields["optimizer.name"] = "adam"
    betas = settings.raw("optimizer.params.betas")
    pair = (
        betas
        if isinstance(betas, list) and len(betas) == 2 and all(type(beta) in (int, float) for beta in betas)
        else (0.9, 0.999)
    )
    fields |= {
        "optimizer.beta1": settings.number("--adam_beta1", float(pair[0])),
        "optimizer.beta2": settings.number("--adam_beta2", float(pair[1])),
    }


def _optimizer(settings: Settings, name: str, words: Mapping[str, str]) -> str:
    """The optimizer of a word, or AdamW, which is nearest to most others and holds as much as any of them, or more."""
    word = settings.text(name, "adamw_torch").lower()
    word = named[1] if (named := _NAMED.search(word)) else word  # of one of several words: "name=sgd, lr=1e-4"
    if word not in words and word not in ("adamw", "adamw_torch") and "optimizer.name" not in settings.overrides:
        settings.lost.append(counted_as_adamw(settings.setting_text(name)))
    settings.lost += [pages_stay(settings.setting_text(name))] if word.startswith("paged_") else []
    return words.get(word, "adamw")


def _write_optimizer(job: JobSpec, settings: dict[str, Any]) -> None:
    optimizer = job.optimizer
    settings["--optim"] = next((word for word, name in _OPTIMIZERS.items() if name == optimizer.name), "adamw_torch")
    if _has_betas(job):
        settings |= {"--adam_beta1": optimizer.beta1, "--adam_beta2": optimizer.beta2}


def _has_betas(job: JobSpec) -> bool:
    return job.optimizer.name not in ("sgd", "adafactor")


OPTIONS: Table = (
    Rule(("--use_galore",), ignore_switched_off),
    Rule(("--stage",), read_kind),
    Rule(("--lora_r",), read_adapter),
    Rule(("--block_size",), read_length, write_length),
    Rule(("--gradient_checkpointing",), read_recompute, write_recompute),
    Rule(("--optim",), _read_optimizer, _write_optimizer),
    number("--adam_epsilon optimizer.params.eps", "optimizer.epsilon", 1e-8, always=True).under(None, _has_betas),
    number("optimizer.params.momentum", "optimizer.momentum", 0.0).under(None, never),
    Rule(("--learning_rate",), _read_peak, _write_peak),
    number("--weight_decay optimizer.params.weight_decay", "optimizer.weight_decay", 0.0, always=True),
    Rule(("--max_steps", "--lr_scheduler_type"), _read_rate, _write_rate),
)


def model_file(job: JobSpec) -> str:
    """The text of config.json for a job's model. PlanError if no family of Hugging Face's has such a model."""
    try:
        keys = written_config(job.model)[1]
    except PlanError as error:
        fault = say(
            "no family of Hugging Face's has these layers, so there is no config.json for them; use a model that one "
            "has, such as --set model.name=llama3-8b, or --to megatron"
        )
        raise PlanError(error.subject, [fault]) from None
    if job.model.moe.aux_loss == "switch" and job.model.moe.aux_scope == "microbatch":
        keys |= {"output_router_logits": True, "router_aux_loss_coef": job.model.moe.aux_coefficient}
    return json.dumps(keys, indent=2) + "\n"


def option_lines(options: dict[str, Any]) -> list[str]:
    """The options among some settings (names with --), as lines of a command."""
    return flag_words({name.removeprefix("--"): value for name, value in options.items() if name.startswith("--")})
