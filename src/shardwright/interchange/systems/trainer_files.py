"""Configurations of programs over transformers' Trainer: LLaMA-Factory, TRL (also open-r1 and alignment-handbook) and
axolotl. They say options of TrainingArguments, under their own names and defaults, and name DeepSpeed's or FSDP's file.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.dotted_keys import flat_keys, nested_keys
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.yaml_text import yaml_text
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.launcher import Launched
from shardwright.interchange.left_out_files import left_out, left_out_note, overwritten_names
from shardwright.interchange.named_model import is_model
from shardwright.interchange.reading.file_signs import SHARED, FileSigns
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.setting_notes import unread_files
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.system import SourceSystem, System
from shardwright.interchange.systems import accelerate, deepspeed, llama_factory
from shardwright.interchange.systems.checkpointing_options import RECOMPUTES
from shardwright.interchange.systems.deepspeed_batch import MICRO
from shardwright.interchange.systems.llama_factory_megatron import is_megatron, read_options
from shardwright.interchange.systems.sample_lengths import LENGTHS
from shardwright.interchange.systems.trainer_command import trainer_command, with_options
from shardwright.interchange.systems.training_arguments import (
    NUMBERS,
    RING_SIZE,
    SHARD_SIZES,
    TENSOR_SIZE,
    FileParts,
    model_file,
    of_file,
)
from shardwright.interchange.training_programs import other_loss_fault, told_by_names

_DATA = (".json", ".yaml", ".yml")
_FILES_NAMED = (
    "deepspeed",
    "fsdp_config",
    "deepspeed_config",
    "deepspeed_config_file",
    "accelerate_config",
    "config_file",
)
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_OF_PROGRAMS = {"learning_rate", "output_dir", "model_name_or_path", "base_model", "per_device_train_batch_size"}
_SYNONYMS = (LENGTHS, MICRO, RECOMPUTES)  # names of one thing, of which a default is for the usual one
_NO_FILES = ("", "none", "null")
_OF_ADAPTERS = ("lora_", "loraplus_", "peft_")
_OF_OTHER_LOSSES = {"diffusion", "grpo", "ebft", "kd"}  # packages of axolotl's plugins
_MOST_FSDP = 6  # keys of a file of FSDP's options, with remarks


@dataclass(frozen=True)
class TrainerFile:
    """A program: its options that differ from those of TrainingArguments. `renamed` maps its names to options;
    `defaults` are options that hold if they are not said; `derived` adds options that follow from its own, `by_ranks`
    those that follow from the number of ranks."""

    system: str
    title: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    derived: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda data: {}
    refused: Callable[[Mapping[str, Any]], list[str]] = lambda data: []
    written: Mapping[str, str] = field(default_factory=dict)  # option -> the name by which it is written
    fixed: Mapping[str, Any] = field(default_factory=dict)  # options that are written for each job
    without_recompute: Mapping[str, Any] = field(default_factory=dict)  # those of a plan that computes nothing again
    without_bf16: Mapping[str, Any] = field(default_factory=dict)  # those of a job in other numbers
    signs: tuple[FileSigns, ...] = field(kw_only=True)  # by which its files and commands are known
    says_kind_by_names: bool = field(default=False, kw_only=True)  # no option of its own says what is trained
    by_ranks: Callable[[Mapping[str, Any], int], dict[str, Any]] = field(default=lambda data, ranks: {}, kw_only=True)
    has_megatron: bool = field(default=False, kw_only=True)  # its options may be Megatron-LM's, too
    launched: Callable[[Launched], Sequence[str]] = field(default=lambda command: (), kw_only=True)  # faults of these

    def read(self, texts: Mapping[str, str], asked: Asked) -> ReadResult:
        """Read the file of a program, with the files that it names and the model's config.json. Raises ShellFault."""
        scripts = {name: text for name, text in texts.items() if name.lower().endswith(_SCRIPTS) or text[:2] == "#!"}
        data = {
            name: read_data(name if name.lower().endswith(_DATA) else f"{name}.yaml", text)
            for name, text in texts.items()
            if name not in scripts
        }
        command = trainer_command(scripts, asked, data, self.signs) if scripts else None
        written = command.written if command else {}
        others = left_out({name: texts[name] for name in data}, command, asked.rivals) if command else []
        apart = {*others, *overwritten_names(data, written)}
        data = {name: keys for name, keys in data.items() if name not in apart}
        data |= {name: read_data(name, text) for name, text in written.items() if name.lower().endswith(_DATA)}
        model = next((keys for keys in data.values() if is_model(keys)), None)
        options = {name: keys for name, keys in data.items() if not (is_model(keys) or _is_fsdp_file(keys))}
        engine = {name: keys for name, keys in options.items() if _is_engine(keys)}
        own = {name: keys for name, keys in options.items() if name not in engine}
        if not own and command is None:
            raise ShellFault(
                say("no file has options of {system}; name the one that has them first", system=self.title)
            )
        merged = {key: value for keys in own.values() for key, value in keys.items()}
        merged = with_options(merged, command) if command else merged
        merged |= _options_of_fsdp_file(merged, data)
        launched = command.nodes * command.devices_per_node if command else 0
        merged |= self.by_ranks(merged, asked.cluster.devices or launched)
        missing = _missing_files(merged, command, [PurePath(name).name for name in data])
        unread, told = unread_files(missing, asked.fields)
        faults = (*unread, *self.refused(merged))
        faults += (*self.launched(command),) if command and not asked.cluster.devices else ()
        if self.has_megatron and is_megatron(merged):
            return read_options(merged, model, command, asked, faults)
        given = {key: value for keys in engine.values() for key, value in flat_keys(keys).items()}
        given |= self._options(merged)
        parts = FileParts(
            {key: value for key, value in given.items() if value != "auto"},
            frozenset(key for key, value in given.items() if value == "auto" and (key[:2] != "--" or key in NUMBERS)),
            model,
            command,
            faults,
            (*self._notes(merged, given, bool(engine) or bool(told)), *told, *map(left_out_note, others)),
            {self.renamed.get(name, f"--{name}"): name for name in merged},
        )
        is_deepspeed = any(deepspeed.is_own(keys) and "distributed_type" not in keys for keys in engine.values())
        result = (deepspeed if is_deepspeed else accelerate).result_of(parts, asked, self.system)
        if self.says_kind_by_names:
            kinds = told_by_names([PurePath(file).stem for file in own])
            result.settings.lost += kinds if not {*kinds} & {*result.settings.lost} else []
        return result

    def settings_of(self, job: JobSpec) -> dict[str, Any]:
        """A job's settings: options under the program's names, and keys of DeepSpeed's configuration."""
        own = {option: name for name, option in reversed([*self.renamed.items()])} | dict(self.written)
        settings = deepspeed.settings_of(job)
        options = {own.get(name, name.removeprefix("--")): value for name, value in settings.items()}
        if isinstance(kwargs := options.get("lr_scheduler_kwargs"), str):
            options["lr_scheduler_kwargs"] = json.loads(kwargs)
        return options | dict(self.fixed)

    def write(self, job: JobSpec) -> dict[str, str]:
        """The file of the program, DeepSpeed's configuration, and config.json of the model, by file name."""
        job = _without_pipeline(job)
        engine = {name: value for name, value in deepspeed.settings_of(job).items() if not name.startswith("--")}
        options = {name: value for name, value in self.settings_of(job).items() if name not in engine}
        options["deepspeed"] = "ds_config.json"
        if job.plan.recompute == "none":
            options |= self.without_recompute
        if job.precision.compute != "bf16":
            options |= self.without_bf16
        heading = f"# {' '.join(job.name.split())}, for {self.title}, written by shardwright.\n"
        return {
            f"{self.system}.yaml": heading + yaml_text(options),
            "ds_config.json": json.dumps(nested_keys(engine), indent=2) + "\n",
            "config.json": model_file(job),
        }

    def _notes(self, data: Mapping[str, Any], given: Mapping[str, Any], has_engine: bool) -> list[str]:
        """Assumptions: defaults that hold, and that nothing is sharded if no file says it is."""
        present = {self.renamed.get(name, f"--{name}") for name, value in data.items() if value is not None}
        present |= self.derived(data).keys()
        defaults = [f"{name[2:]} {value}" for name, value in self._defaults_beside(present).items()]
        notes: list[str] = []
        if defaults:
            notes.append(
                say(
                    "{system}'s own defaults hold where nothing is said: {settings}",
                    system=self.title,
                    settings=tuple(defaults),
                )
            )
        if not has_engine and not any(name.startswith("--fsdp") for name in given):
            notes.append(
                say("no file of DeepSpeed, FSDP or Accelerate is there, so each device has all of the model (DDP)")
            )
        return notes

    def _options(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Options with -- before their names, and Accelerate's settings of degrees."""
        options = {self.renamed.get(name, f"--{name}"): value for name, value in data.items() if value is not None}
        options |= self.derived(data)
        options = {name: value for name, value in options.items() if value is not None}
        options = of_file(options)
        return self._defaults_beside(options) | options

    def _defaults_beside(self, options: Collection[str]) -> dict[str, Any]:
        """The defaults of options that are not there, under their own name or another."""
        synonyms = {name for names in _SYNONYMS if {*names} & {*options} for name in names}
        return {name: value for name, value in self.defaults.items() if name not in {*options, *synonyms}}


def _without_pipeline(job: JobSpec) -> JobSpec:
    """The job without a pipeline and context parallelism, which DeepSpeed has and these programs do not start."""
    plan = job.plan
    if plan.pp == plan.cp == 1:
        return job
    dp = plan.world // plan.tp
    samples = dp * plan.microbatch_size
    size = samples * max(1, round(job.batch.global_batch_size / samples))
    changed = {"pp": 1, "cp": 1, "dp": dp, "schedule": "1f1b", "virtual_stages": 1, "layout": (), "zero_ranks": 0}
    batch = job.batch.model_copy(update={"global_batch_size": size})
    return job.model_copy(update={"plan": plan.model_copy(update=changed), "batch": batch})


def _is_engine(keys: Mapping[str, Any]) -> bool:
    """True for a file of DeepSpeed's, of Accelerate's, or of FSDP's options."""
    return (
        "distributed_type" in keys
        or "zero_optimization" in keys
        or (accelerate.is_own(dict(keys)) and not _OF_PROGRAMS & keys.keys())
    )


def _is_fsdp_file(keys: Mapping[str, Any]) -> bool:
    """True for a file with the options --fsdp and --fsdp_config alone, which ms-swift takes by --fsdp."""
    return isinstance(keys.get("fsdp"), str) and isinstance(keys.get("fsdp_config"), dict) and len(keys) <= _MOST_FSDP


def _options_of_fsdp_file(merged: Mapping[str, Any], data: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The options of the file that --fsdp names; none if it names none."""
    name = PurePath(str(merged.get("fsdp", ""))).name
    keys = next((keys for path, keys in data.items() if PurePath(path).name == name and _is_fsdp_file(keys)), None)
    return {option: keys[option] for option in ("fsdp", "fsdp_config")} if keys else {}


def _missing_files(data: Mapping[str, Any], command: Launched | None, names: list[str]) -> list[str]:
    """Each file that the options or the launcher of a command name and that is not there, with its setting."""
    launcher = {key.replace("-", "_"): value for key, value in (command.launcher_settings if command else {}).items()}
    named = {key: value for key in _FILES_NAMED if isinstance(value := data.get(key, launcher.get(key)), str)}
    return [
        f"{key} = {shortened(value)}"
        for key, value in named.items()
        if value.lower() not in _NO_FILES and PurePath(value).name not in names
    ]


def _axolotl(data: Mapping[str, Any]) -> dict[str, Any]:
    """Options that follow from axolotl's: batch_size, FSDP's release, precision, offloaded inputs of layers."""
    options: dict[str, Any] = {}
    if not data.get("adapter"):  # without it they mean nothing
        options |= {f"--{name}": None for name in data if name.startswith(_OF_ADAPTERS) and name != "lora_model_dir"}
    config = data.get("fsdp_config")
    if isinstance(config, dict) and data.get("fsdp_version") is not None:
        options["--fsdp_config"] = config | {"version": data["fsdp_version"]}
    if data.get("fsdp_version") is not None:
        options["--fsdp_version"] = None
    is_fp16 = any(data.get(name) is True for name in ("fp16", "float16"))
    bf16 = data.get("bf16", None if is_fp16 else "auto")
    if any(value in (True, "auto", "full") for value in (bf16, data.get("bfloat16"))):
        options["--bf16"] = True
    if is_fp16:
        options["--fp16"] = True
    if isinstance(data.get("gradient_checkpointing"), str):
        options["--gradient_checkpointing"] = True
        options["--activation_offloading"] = data["gradient_checkpointing"]
    if isinstance(size := data.get("batch_size"), int) and isinstance(micro := data.get("micro_batch_size", 1), int):
        options |= {"--batch_size": None, "--gradient_accumulation_steps": max(1, size // max(1, micro))}
    if data.get("fp8") is True:
        options |= {"--mixed_precision": "fp8", "--fp8": None}
    if options.get("--bf16") and not data.get("deepspeed"):
        options["--torch_dtype"] = "bfloat16"  # of the weights, which the optimizer changes
    ratio = data.get("cosine_min_lr_ratio")
    if isinstance(ratio, (int, float)) and not isinstance(ratio, bool):
        options |= {"--lr_scheduler_type": "cosine_with_min_lr", "--lr_scheduler_kwargs": {"min_lr_rate": ratio}}
    return options


def _axolotl_refusals(data: Mapping[str, Any]) -> list[str]:
    """Faults: a batch that is said in two ways, at which axolotl stops (its validation, check_gas_bsz), and plugins
    that learn no next tokens."""
    faults: list[str] = []
    both = tuple(name for name in ("gradient_accumulation_steps", "batch_size") if data.get(name))
    if len(both) > 1:
        faults.append(say("{settings} are both there, and axolotl stops at that; leave one out", settings=both))
    plugins = data.get("plugins")
    for plugin in plugins if isinstance(plugins, list) else []:
        if _OF_OTHER_LOSSES & {*str(plugin).lower().split(".")}:
            faults.append(other_loss_fault((f"plugins = {shortened(str(plugin), 60)}",)))
    return faults


def _trl(data: Mapping[str, Any]) -> dict[str, Any]:
    """Options that follow from TRL's: numbers are bf16 unless they are said to be fp16."""
    return {"--bf16": False} if data.get("fp16") is True and data.get("bf16") is None else {}


LLAMA_FACTORY = TrainerFile(
    "llamafactory",
    "LLaMA-Factory",
    defaults={"--cutoff_len": 2048, "--per_device_train_batch_size": 8},
    derived=llama_factory.own_options,
    refused=llama_factory.refusals,
    written={"--block_size": "cutoff_len"},
    fixed={
        "stage": "pt",
        "do_train": True,
        "finetuning_type": "full",
        "model_name_or_path": ".",
        "train_from_scratch": True,
        "dataset": "c4_demo",
        "template": "default",
        "output_dir": "out",
    },
    without_recompute={"disable_gradient_checkpointing": True},
    signs=llama_factory.SIGNS,
    has_megatron=True,
)
TRL = TrainerFile(
    "trl",
    "TRL",
    defaults={
        "--max_length": 1024,
        "--per_device_train_batch_size": 8,
        "--learning_rate": 2e-5,
        "--gradient_checkpointing": True,
        "--bf16": True,
    },
    derived=_trl,
    says_kind_by_names=True,
    signs=(
        FileSigns(commands=(r"\btrl\s+(sft|dpo|kto|grpo|rloo|reward)\b",)),
        FileSigns(
            (
                ("per_device_train_batch_size",),
                ("model_name_or_path", "output_dir"),
                ("model_name_or_path", "learning_rate"),
                ("output_dir", "num_train_epochs"),
            ),
            lacks=("distributed_type", "compute_environment", "zero_optimization"),
            weight=SHARED,
        ),
    ),
)
AXOLOTL = TrainerFile(
    "axolotl",
    "axolotl",
    {
        "base_model": "--base_model",
        "micro_batch_size": "--per_device_train_batch_size",
        "sequence_len": "--max_length",
        "optimizer": "--optim",
        "lr_scheduler": "--lr_scheduler_type",
        "num_epochs": "--num_train_epochs",
        "tensor_parallel_size": TENSOR_SIZE,
        "context_parallel_size": RING_SIZE,
        "sequence_parallel_degree": RING_SIZE,
        "dp_shard_size": SHARD_SIZES[0],
        "dp_replicate_size": SHARD_SIZES[1],
        "rl": "--rl",
    },
    {"--per_device_train_batch_size": 1, "--max_length": 512, "--lr_scheduler_type": "cosine", "--bf16": "auto"},
    _axolotl,
    refused=_axolotl_refusals,
    written={"--block_size": "sequence_len"},
    fixed={
        "base_model": ".",
        "reinit_weights": True,
        "output_dir": "out",
        "sample_packing": True,
        "datasets": [{"path": "allenai/c4", "type": "completion"}],
    },
    without_bf16={"bf16": False},
    signs=(
        FileSigns(
            (("base_model", "sequence_len"), ("base_model", "micro_batch_size"), ("base_model", "datasets")),
            lacks=("num_train_epochs", "path_to_model_config"),  # of people's own programs
            commands=(r"\baxolotl(\.cli\.|\s+)train\b",),
        ),
    ),
)


FACTS = (
    *(
        System(
            name=program.system,
            place=place,
            title=program.title,
            read=program.read,
            write=program.write,
            settings=program.settings_of,
            software=deepspeed.SOFTWARE,
            signs=program.signs,
            leaves_out=True,
        )
        for place, program in ((80, AXOLOTL), (90, LLAMA_FACTORY))
    ),
    SourceSystem(name=TRL.system, place=110, title=TRL.title, read=TRL.read, signs=TRL.signs, leaves_out=True),
)
