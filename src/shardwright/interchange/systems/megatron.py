"""Megatron-LM: a job from a launch script, and a launch script from a job."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.plan import PlanSpec
from shardwright.config.software import software_of
from shardwright.config.software_support import plan_lacks
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.known_settings import program, trains_a_part
from shardwright.interchange.launcher import Launched, find_training_command, missing_ranks
from shardwright.interchange.named_model import asks_for_shape, shape_fields
from shardwright.interchange.reading.file_signs import SHARED, FileSigns
from shardwright.interchange.reading.loose_words import loose_faults
from shardwright.interchange.reading.script_text import flag_words, script_text
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.rows import read_row, write_table
from shardwright.interchange.system import RunFiles, System
from shardwright.interchange.systems.adapter_settings import read_adapter
from shardwright.interchange.systems.megatron_checkpoint import OPTION as CHECKPOINT
from shardwright.interchange.systems.megatron_checkpoint import read_checkpoint_arguments
from shardwright.interchange.systems.megatron_engine import read_engine
from shardwright.interchange.systems.megatron_experts import EXPERTS, FURTHER, MTP, OVER_EXPERTS
from shardwright.interchange.systems.megatron_forks import OF_FORKS, with_defaults_of_fork
from shardwright.interchange.systems.megatron_model import LATENT, LENGTH, MODEL, REQUIRED, SHAPE, note_unpadded
from shardwright.interchange.systems.megatron_older import notes_of_forks
from shardwright.interchange.systems.megatron_plan import PLAN, WORLD
from shardwright.interchange.systems.megatron_run import run_words
from shardwright.interchange.systems.megatron_training import TRAINING
from shardwright.interchange.systems.megatron_yaml import OPTION as YAML
from shardwright.interchange.systems.megatron_yaml import SIGNS as YAML_SIGNS
from shardwright.interchange.systems.megatron_yaml import flags_of_yaml, is_yaml
from shardwright.interchange.training_programs import own_layers_fault, program_fault, taken_for_gpt

_FLAGS = r"--(num[-_]layers|hidden[-_]size|tensor[-_]model[-_]parallel[-_]size)\b"
# Without options of transformers' Trainer, beside which other programs have such flags.
SIGNS = (
    YAML_SIGNS,
    FileSigns(commands=(rf"(?s)\A(?!.*--per_device_train_batch_size).*{_FLAGS}",), weight=SHARED),
)
# Values of the plan for a search, where Megatron-LM has others that `write` does not say.
WRITTEN: Mapping[str, tuple[Any, ...]] = {"offload_activations": (False,), "recompute_operators": (["attention"],)}
# A command with two of these flags trains.
_TRAINING_FLAGS = {
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--tensor-model-parallel-size",
    "--micro-batch-size",
    "--encoder-num-layers",
}


def is_training(words: list[str]) -> bool:
    """True if a command trains with Megatron-LM, or with epfLLM's fork, whose options have underscores."""
    options = {word.partition("=")[0] for word in words}
    if "--tensor_model_parallel_size" in options:
        options = {option.replace("_", "-") for option in options}
    return len(_TRAINING_FLAGS & options) >= 2 or f"--{YAML}" in options


def read(texts: Mapping[str, str], asked: Asked) -> ReadResult:
    """Read a launch script; `texts` has it first, then scripts that it sources or starts. A YAML of all arguments may
    stand alone. Raises ShellFault."""
    if is_yaml(texts):
        command = Launched({}, {YAML: next(iter(texts))}, 0, 0)
    else:
        command = find_training_command(texts, asked, is_training)
    if YAML in command.settings:
        given, spelled = flags_of_yaml(texts, str(command.settings[YAML]))
    else:
        given, spelled = with_defaults_of_fork(command.settings, command.launcher)
    world = asked.cluster.devices or command.nodes * command.devices_per_node
    settings = Settings(
        given | ({WORLD: str(world)} if world else {}),
        prefix="" if YAML in command.settings else "--",
        spelled=spelled,
        notes=list(command.notes),
        overrides=asked.fields,
    )
    if settings.has("task"):  # of a program that evaluates, or trains for a task
        setting = settings.setting_text("task")
        settings.faults.append(say("{setting}: training by next tokens is counted here", setting=setting))
    programs = (command.program, settings.text("train-mode"))  # a module's last part is its program
    settings.notes += [*taken_for_gpt(command.program), *notes_of_forks(command.settings)]
    settings.faults += [fault for fault in (program_fault(name, asked.variables) for name in programs) if fault]
    settings.faults += [] if asked.cluster.devices else missing_ranks(command)
    read_engine(settings, texts, command.written)
    if settings.text("decoder-seq-length") == settings.text("seq-length"):  # of a decoder alone
        settings.ignore("decoder-seq-length")
    shape = _shape_elsewhere(settings, asked)
    fields = {} if shape == {} else fields_of(settings, asked, shape)
    is_said = settings.has("position-embedding-type") or "model.positions" in asked.fields
    if fields.get("model.positions") == "learned" and not is_said and (fault := own_layers_fault(command.program)):
        settings.faults.append(fault)
    if shape is None:
        read_checkpoint_arguments(settings, fields, asked)
    read_adapter(settings, fields, lambda name: name.replace("_", "-"))
    settings.faults += loose_faults(command.loose, settings, "megatron")
    uses_launcher = asked.cluster.devices == 0
    software = software_of_flags(settings, fields, asked.cluster.device, are_all=True)
    return ReadResult(
        fields,
        settings,
        software,
        command.nodes if uses_launcher else 0,
        command.devices_per_node,
        ("megatron",),
    )


_OF_MODEL = ("model-name-or-path", "load-model-from-hf-config", "hf-model-path", CHECKPOINT)


def _shape_elsewhere(settings: Settings, asked: Asked) -> Flat | None:
    """The fields of a model whose shape a configuration or a checkpoint has, and no flag: those of --set, or a fault
    that asks for them. None if flags say the shape, or none says where it is. A checkpoint's holds before that of
    flags, if --set names its model."""
    name = next((name for name in _OF_MODEL if settings.has(name)), "")
    is_replaced = name == CHECKPOINT and "model.name" in asked.fields  # what the command says does not hold there
    if not name or (any(settings.has(flag) for flag in REQUIRED) and not is_replaced):
        return None
    setting = settings.setting_text(name)
    if asks_for_shape(setting, settings, asked):
        settings.ignore(*settings.given)
        return {}
    settings.note(say("the model is that of --set, and flags for it are not read, beside {setting}", setting=setting))
    model, of_shape = shape_fields({}, asked), Settings(settings.given, overrides=settings.overrides)
    fields = model | {"plan.tp": 1}  # rows of a vocabulary pad it for as many ranks
    for row in (*SHAPE, *MODEL):
        read_row(row, of_shape, fields)
    settings.ignore(*_OF_MODEL, "tokenizer-model", *of_shape.names_read - {"seq-length"})
    return model


def fields_of(settings: Settings, asked: Asked, model: Flat | None = None) -> Flat:
    """The fields of a job that Megatron-LM's flags give. `model` are fields of a model that no flags describe."""
    if model is not None:
        return _fields_beside_model(settings, model)
    for name in REQUIRED:
        if not settings.has(name) and not (name == "num-layers" and settings.has("encoder-num-layers")):
            settings.faults.append(say("{setting} is not said, and a model needs it; add it", setting=f"--{name}"))
    fields: Flat = {}
    for row in SHAPE:
        read_row(row, settings, fields)
    if settings.faults or settings.needed:  # the other rows need a valid model
        settings.ignore(*(name for name in settings.given if not trains_a_part(name)))
        return fields
    tables = [PLAN, MODEL, OF_FORKS]
    if settings.has("num-experts") and settings.count("num-experts", 0) > 1:
        tables.append(EXPERTS)
    else:  # without experts Megatron-LM reads none of their settings
        settings.ignore(*(name for row in EXPERTS for name in row.names), *FURTHER)
    if settings.count("mtp-num-layers", 0):
        tables.append(MTP)
    _ignore_without(settings)
    if "model.vocab" in asked.fields:
        settings.ignore(
            *("vocab-size", "make-vocab-size-divisible-by", "padded-vocab-size", "tokenizer-type", "tokenizer-model"),
            "extra-vocab-size",
        )
    for row in [row for table in (*tables, TRAINING) for row in table]:
        if "vocab-size" in getattr(row, "names", ()) and "model.vocab" in asked.fields:
            continue
        read_row(row, settings, fields)
    if "model.vocab" in asked.fields and "plan.tp" in fields:
        note_unpadded(settings, fields)
    return fields


def _ignore_without(settings: Settings) -> None:
    """Mark as read what Megatron-LM does not read without latent attention or without MTP layers."""
    if not settings.flag("multi-latent-attention"):
        settings.ignore(*(name for row in LATENT for name in row.names), "original-max-position-embeddings")
    if not settings.count("mtp-num-layers", 0):
        settings.ignore(*(name for row in MTP for name in row.names))


def _fields_beside_model(settings: Settings, model: Flat) -> Flat:
    """The fields of a model, and of the flags for its plan and its training."""
    fields = dict(model)
    tables = [LENGTH, PLAN, OVER_EXPERTS, TRAINING] if model.get("model.moe.experts") else [LENGTH, PLAN, TRAINING]
    if settings.count("mtp-num-layers", 0):
        tables.append(MTP)
    for row in [row for table in tables for row in table]:
        read_row(row, settings, fields)
    _ignore_without(settings)
    if not model.get("model.moe.experts"):
        fields["plan.expert_tp"] = 0
        settings.ignore(*(name for row in EXPERTS for name in row.names if name != "num-experts"), *FURTHER)
    return fields


_GENERATIONS = ("megatron-2021", "megatron-2022", "megatron-core")  # the oldest first
_WITH_FLASH = "megatron-2023"  # the first generation that has flash attention
_OF_OLD = {"DDP-impl", "checkpoint-activations", "activations-checkpoint-method"}


def software_of_flags(settings: Settings, fields: Flat, device: str = "", *, are_all: bool = False) -> str:
    """The software of a command: the oldest generation that has its flags, its plan and its attention, which depends on
    the device, with changes. `are_all`: what no flag says is off, as in Megatron-LM's own command."""
    given = settings.given
    changes = _changes_of_core(settings, are_all)
    plan = PlanSpec.model_construct(
        **{name.removeprefix("plan."): value for name, value in fields.items() if name.startswith("plan.")}
    )
    lacking = {name: plan_lacks(software_of(name), plan) for name in (*_GENERATIONS, _WITH_FLASH)}
    oldest = next((name for name in _GENERATIONS if not lacking[name]), _GENERATIONS[-1])
    why_no_flash = _why_no_flash(settings, device)
    reasons = [say("by its flags")]
    if "deepspeed" in given or "zero-stage" in given:
        generation = "megatron-deepspeed"
    elif why_no_flash and oldest != _GENERATIONS[-1]:
        generation = oldest if _OF_OLD & given.keys() else "megatron-2022"
        reasons.append(say("without flash attention, {reason}", reason=why_no_flash))
    elif not _OF_OLD & given.keys():
        generation = "+".join((_GENERATIONS[-1], *changes))
    elif "overlap-grad-reduce" in given:
        generation = "large-2024"
    elif settings.flag("use-flash-attn") and not lacking[_WITH_FLASH]:
        generation = _WITH_FLASH
        reasons.append(say("with {names}", names="--use-flash-attn"))
    else:
        generation = oldest
        reasons += [say("with {names}", names=tuple(lacking[_GENERATIONS[0]]))] if lacking[_GENERATIONS[0]] else []
    if generation != "megatron-deepspeed":
        settings.ignore("use-flash-attn")
    settings.note(
        say(
            "priced as {software} software, {reasons} (--as NAME for another)",
            software=generation,
            reasons=tuple(reasons),
        )
    )
    return generation


def _changes_of_core(settings: Settings, are_all: bool) -> list[str]:
    """Changes of Megatron Core (config/software_changes.py) that flags say: what is overlapped, and whose loss."""
    changes = ["overlap-dp"] if settings.flag("overlap-grad-reduce") else []
    if not settings.flag("cross-entropy-loss-fusion"):
        return [*changes, "plain-loss"] if are_all else changes
    kernels = settings.text("cross-entropy-fusion-impl", "native" if are_all else "te")
    return [*changes, "compiled-loss"] if kernels == "native" else changes


def _why_no_flash(settings: Settings, device: str) -> str:
    """Why attention keeps its scores: by flags, or by the device, since Volta has no flash attention; "" if it does
    not."""
    if device.startswith("v100"):
        return say("which V100 has no kernel for")
    if settings.given.get("attention-backend") in ("unfused", "local"):
        return say("by {setting}", setting=settings.setting_text("attention-backend"))
    if settings.given.get("transformer-impl") == "local" and not settings.flag("use-flash-attn"):
        return say("by {setting}", setting="--transformer-impl local")
    return ""


def flags(job: JobSpec) -> dict[str, Any]:
    """The flags of a job, with their values."""
    flags_of_job: dict[str, Any] = {}
    for _, table in _sections(job):
        flags_of_job |= write_table(table, job)
    return flags_of_job | ({"moe-grouped-gemm": True} if job.model.moe.experts else {})


def _sections(job: JobSpec) -> list[tuple[str, Any]]:
    experts = EXPERTS if job.model.moe.experts else ()
    mtp = MTP if job.model.mtp_layers else ()
    return [("MODEL", (*SHAPE, *MODEL, *experts, *mtp)), ("PARALLEL", PLAN), ("TRAINING", TRAINING)]


def write(job: JobSpec) -> dict[str, str]:
    """The launch script of a job, by its file name."""
    return _script(job, ["--mock-data", "--split 99,1,0"])


def write_to_run(job: JobSpec, folder: Path, step_s: float) -> dict[str, str]:
    """The launch script of a job with its data and with checkpoints. Raises PlanError."""
    return _script(job, run_words(job, folder, step_s))


def _script(job: JobSpec, data: list[str]) -> dict[str, str]:
    sections = {name: flag_words(write_table(table, job)) for name, table in _sections(job)}
    if job.model.moe.experts:
        sections["MODEL"].append("--moe-grouped-gemm")
    is_fsdp = any(line.startswith("--use-megatron-fsdp") for line in sections["PARALLEL"])
    software = software_of(job.cluster.software)
    if "--use-distributed-optimizer" in sections["PARALLEL"] and (software.is_own or software.reduce_overlap):
        sections["PARALLEL"] += ["--overlap-grad-reduce", "--overlap-param-gather"]
    if software.is_own or software.loss == "fused":
        sections["MODEL"].append("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te")
    sections["DATA"] = data
    exports = {} if is_fsdp else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    text = script_text(job, "Megatron-LM", program("megatron"), sections, exports)
    return {"run.sh": text}


FACTS = System(
    name="megatron",
    place=10,
    title="Megatron-LM",
    prefix="--",
    read=read,
    write=write,
    run_files=RunFiles(program("megatron"), write_to_run),
    settings=flags,
    software="megatron-core+overlap-dp",
    written=WRITTEN,
    signs=SIGNS,
    has_templates=True,
)
