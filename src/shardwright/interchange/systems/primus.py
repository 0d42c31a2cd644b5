"""Primus (AMD): an experiment in YAML, whose trainer has Megatron-LM's arguments over those of a model.

Files begin from others by their list `extends`, and a trainer from the files that it names: `config` and `model`. They
lie in Primus's own folder primus/configs, which is read where it lies beside the experiment or above it.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.fault_gathering_reader import whole
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.yaml_text import yaml_text
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.reading.file_signs import FileSigns
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.setting_notes import wrong_value
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.system import System
from shardwright.interchange.systems import megatron
from shardwright.interchange.systems.megatron_arguments import read_arguments, read_result
from shardwright.interchange.systems.megatron_names import arguments_of, flags_of
from shardwright.interchange.systems.torchtitan_releases import read_settings
from shardwright.interchange.systems.torchtitan_toml import IN_TOML
from shardwright.interchange.training_programs import program_fault

FRAMEWORKS = ("megatron", "torchtitan")
LIBRARY = tuple(f"primus/configs/{kind}/{framework}" for framework in FRAMEWORKS for kind in ("models", "modules"))
_BASES = ("language_model.yaml", "primus_megatron_model.yaml")  # all arguments with Megatron-LM's defaults
_BASES_KEYS = ("extends", "bases", "includes")  # of a file that begins from others; the later two are older names
_MOST_LEVELS = 8
_LAYER_IDS = "recompute-layer-ids"
# Settings in files of Primus that differ from Megatron-LM's defaults, for experiments that begin from these alone.
_BUILT_IN: Mapping[str, Mapping[str, Any]] = {
    "language_model.yaml": {
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "sequence_parallel": True,
    },
    "pre_trainer.yaml": {
        "bf16": True,
        "use_distributed_optimizer": True,
        "train_iters": 1000,
        "global_batch_size": 16,
        "micro_batch_size": 2,
        "seq_length": 1024,
        "lr": 2.0e-5,
        "lr_warmup_iters": 40,
        "lr_decay_style": "cosine",
        "weight_decay": 0.0,
        "fp8_amax_history_len": 1024,
    },
}
_VARIABLE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*:([^${}]*)\}")  # ${VARIABLE:value if it is not set}
# Settings of Primus that switch on what a job has by another name, or lacks.
_SCHEDULES = ("patch_primus_pipeline", "patch_zero_bubble")
_OF_ZERO_BUBBLES = ("enable_zero_bubble", "zero_bubble_", "enable_1f1b_v")
SIGNS = (FileSigns((("modules.pre_trainer",), ("work_group", "user_name", "exp_name"))),)


def read(texts: Mapping[str, str], asked: Asked) -> ReadResult:
    """Read an experiment; `texts` has it first. Raises ShellFault."""
    framework, trainer = _trainer(*next(iter(texts.items())))
    others = {*FRAMEWORKS} - {framework}
    library = {
        path.name: text
        for path, text in ((PurePath(name), text) for name, text in [*texts.items()][1:])
        if path.parent.name not in others
    }
    if framework == "torchtitan":
        return _read_torchtitan(trainer, library, asked)
    settings = Settings(overrides=asked.fields)
    arguments: dict[str, Any] = {}
    defaults: set[str] = set()
    for key in ("config", "model"):
        for name, values in _chain(str(_value(trainer.get(key, ""))), library, _BUILT_IN):
            arguments |= values
            defaults = defaults | values.keys() if key == "config" or name in _BASES else defaults - values.keys()
    own = trainer.get("overrides")
    own = own if isinstance(own, dict) else {}
    arguments |= {name: _value(value) for name, value in own.items()}
    settings.faults += [fault for fault in (program_fault(str(trainer.get("model", "")), asked.variables),) if fault]
    if (kind := arguments.pop("model_type", "gpt")) != "gpt":
        settings.faults.append(
            say(
                "{setting}: decoders with attention are counted here",
                setting=f"model_type = {shortened(str(kind), 40)}",
            )
        )
    settings.faults += [
        say(
            "{name} is on: the schedules of Primus are not read; leave it out and say --set plan.schedule=NAME",
            name=name,
        )
        for name in _SCHEDULES
        if arguments.get(name) is True and "plan.schedule" not in asked.fields
    ]
    if "patch_zero_bubble" in arguments:  # without that patch these do nothing, and with it they are refused above
        arguments = {name: value for name, value in arguments.items() if not name.startswith(_OF_ZERO_BUBBLES)}
    if arguments.get("use_turbo_deepep") is True:
        arguments["moe_token_dispatcher_type"] = "flex"
    flags, spelled = flags_of(arguments)
    layer_ids = flags.pop(_LAYER_IDS, None)
    fields = read_arguments(flags, spelled, asked, (0, 0), settings)
    if layer_ids is not None and fields.get("plan.recompute") == "full":
        fields |= _recomputed(layer_ids, fields["model.layers"], settings)
    settings.ignore(*(flag for flag, name in spelled.items() if name in defaults - own.keys() or name in _SCHEDULES))
    return read_result(fields, settings, asked, (0, 0), "primus")


def _read_torchtitan(trainer: Mapping[str, Any], library: Mapping[str, str], asked: Asked) -> ReadResult:
    """Read a trainer with the sections of torchtitan's TOML, and one of AMD's own kernels."""
    flat: dict[str, Any] = {}
    for key in ("config", "model"):
        for _, values in _chain(str(_value(trainer.get(key, ""))), library, {}):
            flat |= flat_keys(values)
    own = trainer.get("overrides")
    flat |= flat_keys(own if isinstance(own, dict) else {})
    settings = Settings(
        {name: _value(value) for name, value in flat.items() if value is not None}, overrides=asked.fields
    )
    settings.ignore(*(name for name in flat if name.endswith("sink_level") or name in _OF_KERNELS))
    if not settings.flag(_OF_EXPERTS) or not settings.flag("primus_turbo.enable_primus_turbo"):
        settings.ignore("primus_turbo.use_moe_fp8")  # of these kernels
    converters = settings.given.get("model.converters")
    if isinstance(converters, list):
        settings.given["model.converters"] = [name for name in converters if name != "primus_turbo"]
    settings.note(say("kernels are torchtitan's here, and AMD's there (primus_turbo)"))
    return read_settings(settings, IN_TOML, asked, 0, 0)


_OF_EXPERTS = "primus_turbo.use_turbo_grouped_mm"
# Settings of primus_turbo: which kernels compute what other settings say.
_OF_KERNELS = tuple(
    f"primus_turbo.{name}"
    for name in (
        *("enable_primus_turbo", "use_turbo_attention", "use_classic_attention", "use_turbo_async_tp"),
        *("use_turbo_mx_linear", "use_turbo_float8_linear", "use_turbo_grouped_mm", "enable_embedding_autocast"),
    )
)


def _recomputed(layer_ids: Any, layers: int, settings: Settings) -> Flat:
    """The plan that computes the layers of some numbers again; those from `layers` on are MTP layers."""
    words = layer_ids if isinstance(layer_ids, list) else str(layer_ids).split(",")
    numbers = {number for word in words if (number := whole(str(word).strip())) is not None}
    if len(numbers) < len(words):
        settings.faults.append(
            wrong_value(f"recompute_layer_ids = {shortened(str(layer_ids), 60)}", say("numbers of layers"))
        )
    policies = [["layer"] if number in numbers else [] for number in range(layers)]
    return {"plan.recompute": "layers", "plan.recompute_layers": policies}


def _trainer(name: str, text: str) -> tuple[str, dict[str, Any]]:
    """The framework of the module that trains, and the module. Raises ShellFault."""
    modules = read_data(name, text).get("modules")
    modules = modules if isinstance(modules, dict) else {}
    trainers = [module for key, module in modules.items() if "trainer" in str(key) and isinstance(module, dict)]
    if len(trainers) != 1:
        raise ShellFault(
            say(
                "{file} has {count} modules that train, and one is read; name an experiment of one",
                file=name,
                count=len(trainers),
            )
        )
    framework = str(trainers[0].get("framework", "")).rstrip(".")
    if framework not in FRAMEWORKS:
        raise ShellFault(
            say(
                "{file} trains with {framework}, and experiments of Primus are read for {frameworks}; name one of "
                "these, or that program's own configuration",
                file=name,
                framework=shortened(framework, 40),
                frameworks=FRAMEWORKS,
            )
        )
    return framework, trainers[0]


def _chain(
    name: str, library: Mapping[str, str], built_in: Mapping[str, Mapping[str, Any]], level: int = 0
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The files that a file begins from, and itself, each with its values; `built_in` has those of files that need not
    be there. Raises ShellFault if another one is missing."""
    if level > _MOST_LEVELS:
        raise ShellFault(
            say(
                "{file}: files begin from one another, more than {most} levels deep; check them",
                file=name,
                most=_MOST_LEVELS,
            )
        )
    file = PurePath(name).name
    if file not in library:
        if file == "module_base.yaml":  # where logs go
            return
        if file in built_in:
            yield file, dict(built_in[file])
            return
        raise ShellFault(
            say(
                "it begins from {file}, which is none of the files; name it too: it lies in {folder} or beside that, "
                "in the folder of Primus",
                file=shortened(name, 80),
                folder=LIBRARY[0],
            )
        )
    values = read_data(file, library[file])
    bases = [values.pop(key, None) or [] for key in _BASES_KEYS]
    for base in [base for listed in bases for base in (listed if isinstance(listed, list) else [listed])]:
        yield from _chain(str(base), library, built_in, level + 1)
    yield file, {key: _value(value) for key, value in values.items()}


def _value(value: Any) -> Any:
    """A value, with the defaults of the variables in it in their place."""
    return _VARIABLE.sub(lambda match: match[1], value) if isinstance(value, str) else value


def settings_of(job: JobSpec) -> dict[str, Any]:
    """A job's settings under the names of Primus, with all that its files have otherwise."""
    arguments: dict[str, Any] = {
        name: False for values in _BUILT_IN.values() for name, value in values.items() if value is True
    }
    if job.batch.grows:  # which is counted in samples
        arguments |= {"train_iters": None, "lr_warmup_iters": None}
    return arguments | arguments_of(megatron.flags(job))


def write(job: JobSpec) -> dict[str, str]:
    """The experiment, by its file name."""
    trainer = {"framework": "megatron", "config": "pre_trainer.yaml", "model": "language_model.yaml"}
    overrides = settings_of(job) | {"mock_data": True}
    name = " ".join(job.name.split())
    experiment = {
        "work_group": "${PRIMUS_TEAM:team}",
        "user_name": "${PRIMUS_USER:root}",
        "exp_name": "".join(char if char.isalnum() else "-" for char in name),
        "workspace": "${PRIMUS_WORKSPACE:./output}",
        "modules": {"pre_trainer": trainer | {"overrides": overrides}},
    }
    return {"experiment.yaml": f"# {name}, for Primus, written by shardwright.\n" + yaml_text(experiment)}


FACTS = System(
    name="primus",
    place=105,
    title="Primus",
    read=read,
    write=write,
    settings=settings_of,
    software="megatron-core",
    written=megatron.WRITTEN,
    library=LIBRARY,
    signs=SIGNS,
)
