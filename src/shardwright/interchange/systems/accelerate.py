"""Accelerate's configuration, with its launch script and config.json: to a job, and from a job."""

from collections.abc import Mapping
from typing import Any

from shardwright.config import largest
from shardwright.config.base import shortened
from shardwright.config.dotted_keys import nested_keys
from shardwright.config.fault_gathering_reader import whole
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.yaml_text import yaml_text
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.reading.file_signs import GENERAL, SHARED, FileSigns
from shardwright.interchange.reading.loose_words import loose_faults
from shardwright.interchange.reading.script_text import nodes_of
from shardwright.interchange.reading.setting_notes import none_of, off_without_tensors, priced_as
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.rows import Rule, Table, number, read_row, write_table
from shardwright.interchange.system import System
from shardwright.interchange.systems import alpaca_lora, deepspeed
from shardwright.interchange.systems.accelerate_deepspeed import deepspeed_keys, take_over
from shardwright.interchange.systems.accelerate_fsdp import FILE_KEYS as FSDP_FILE_KEYS
from shardwright.interchange.systems.accelerate_fsdp import STRATEGIES, put_fsdp_options, shard_sizes
from shardwright.interchange.systems.accelerate_launcher import (
    PREFIXES,
    put_options_of_launcher,
    tell_dropped,
    uneven_processes,
)
from shardwright.interchange.systems.deepspeed_batch import WORLD, read_batch
from shardwright.interchange.systems.liger import with_liger
from shardwright.interchange.systems.trainer_command import TRAINER
from shardwright.interchange.systems.training_arguments import (
    OPTIONS,
    FileParts,
    model_file,
    read_model,
    read_parts,
)
from shardwright.interchange.systems.weights_type import TYPE_OF_WEIGHTS

SIGNS = (
    FileSigns(
        (("distributed_type",), ("compute_environment",), ("fsdp_config",), ("deepspeed_config",)),
        commands=(
            r"--per[-_]device[-_]train[-_]batch[-_]size\b",
            r"\bqlora\.py\b",
            r"\btorchrun\b[^;&|]{0,600}?\.py[ \t]+[\w./\"'${}-]{1,200}\.(?:json|ya?ml)[\"']?[ \t]*$",
            r"\btorchrun\b[^;&|]{0,600}?\.py[ \t]+[\"']?\$\{?(?i:\w{0,40}(?:config|yaml)(?:_?(?:file|path))?)\}?"
            r"[\"']?[ \t]*$",
            r"\btorchrun\b[^;&|]{0,600}?\.py[ \t\\\n]+[\"']?\$\{?(?i:\w{0,40}conf(?:ig)?(?:_?(?:file|path))?)\}?[\"']?"
            r"[ \t\\\n]+--(?:deepspeed|fsdp)\b",
            rf"\bpython[\d.]*[ \t]+(?:[\w.-]{{0,100}}/){{0,12}}{TRAINER}[ \t]+[\w./-]{{1,200}}\.json[ \t]*$",
        ),
        weight=GENERAL,
    ),
    FileSigns(commands=(r"\baccelerate[\"']?\s+launch\b",), weight=SHARED),
    alpaca_lora.SIGNS,
)
_P, _F, _M, _D = PREFIXES
_TENSORS = (_P + "tp_size", "tp_config.tp_size")  # the latter of releases 1.3 to 1.6
_WITHOUT_SHARDS = ("NO", "MULTI_GPU", "TP")
_FLOAT8 = {"TE": "delayed", "MSAMP": "delayed", "MS-AMP": "delayed", "AO": "tensorwise"}
_HISTORY = "fp8_config.amax_history_len"
_CP = {"allgather": "all-gather", "alltoall": "ring"}


def _kind(settings: Settings) -> str:
    return settings.text("distributed_type", "NO").upper()


def _read_degrees(settings: Settings, fields: Flat) -> None:
    is_megatron = _kind(settings) == "MEGATRON_LM"
    fields["plan.tp"] = settings.count([_M + "tp_degree"] if is_megatron else _TENSORS, 1, largest.RANKS, 1)
    fields["plan.pp"] = settings.count(_M + "pp_degree", 1, largest.PIPELINE_RANKS, 1) if is_megatron else 1
    fields["plan.cp"] = settings.count(_P + "cp_size", 1, largest.RANKS, 1)
    fields["plan.cp_method"] = settings.one_of(_P + "cp_comm_strategy", _CP, "allgather")
    sp_size = settings.count((_P + "sp_size", "--sequence_parallel_size"), 1)
    if sp_size > 1:
        fields |= {"plan.cp": sp_size, "plan.cp_method": "ulysses"}
    fields["plan.schedule"] = "1f1b"
    is_requested = is_megatron and settings.flag(_M + "sequence_parallelism")
    fields["plan.sequence_parallel"] = is_requested and fields["plan.tp"] > 1
    if is_requested and fields["plan.tp"] == 1:
        settings.note(off_without_tensors(f"{_M}sequence_parallelism"))


def _write_degrees(job: JobSpec, settings: dict[str, Any]) -> None:
    plan = job.plan
    if _is_megatron(job):
        settings |= {
            _M + "tp_degree": plan.tp,
            _M + "pp_degree": plan.pp,
            _M + "num_micro_batches": job.num_microbatches,
        }
        settings[_M + "sequence_parallelism"] = plan.sequence_parallel and plan.tp > 1
        return
    if plan.tp > 1:
        settings[_P + "tp_size"] = plan.tp
    if plan.cp > 1:
        settings |= {_P + "cp_size": plan.cp}
        settings[_P + "cp_comm_strategy"] = "alltoall" if plan.cp_method == "ring" else "allgather"


def _is_megatron(job: JobSpec) -> bool:
    return job.plan.pp > 1 or (job.plan.sequence_parallel and job.plan.tp > 1)


def _read_zero(settings: Settings, fields: Flat) -> None:
    kind = _kind(settings)
    fields["plan.zero"] = 0
    if kind == "DEEPSPEED":
        renamed = Settings(deepspeed_keys(settings.given))
        if not settings.has(_D + "deepspeed_config_file", *deepspeed.STAGE):
            renamed.given.setdefault(deepspeed.STAGE[0], 2)  # Accelerate's own default
        deepspeed.read_zero(renamed, fields)
        take_over(settings, renamed)
    elif kind == "MEGATRON_LM":
        fields["plan.zero"] = int(settings.flag(_M + "use_distributed_optimizer"))
    elif kind == "FSDP":
        _read_fsdp(settings, fields)
    elif kind not in _WITHOUT_SHARDS:
        settings.faults.append(
            none_of(f"distributed_type = {kind[:40]}", (*_WITHOUT_SHARDS, "FSDP", "DEEPSPEED", "MEGATRON_LM"))
        )


def _strategy(settings: Settings) -> tuple[int, bool, str]:
    """The ZeRO stage, True if each machine has a full copy, and the word for both.

    The newer key reshard_after_forward replaces sharding_strategy.
    """
    reshard = settings.text(_F + "reshard_after_forward").upper()
    word = settings.text(_F + "sharding_strategy", "FULL_SHARD").upper()
    if settings.count(_F + "version", 1) == 2 or (
        reshard in ("TRUE", "FALSE") and not settings.has(_F + "sharding_strategy")
    ):
        return 2 if reshard == "FALSE" else 3, False, word
    if reshard and not settings.has(_F + "sharding_strategy"):
        word = reshard
    number = whole(word)
    if number is not None and 0 < number <= len(STRATEGIES):
        word = [*STRATEGIES][number - 1]
    if word not in STRATEGIES:
        settings.faults.append(none_of(f"fsdp_config.fsdp_sharding_strategy = {shortened(word, 40)}", STRATEGIES))
    return *STRATEGIES.get(word, (3, False)), word


def _read_fsdp(settings: Settings, fields: Flat) -> None:
    zero, is_hybrid, strategy = _strategy(settings)
    num_shards, num_copies = shard_sizes(settings, fields)
    replicas = fields["plan.dp"] * fields["plan.cp"]
    fields["plan.zero"] = zero if replicas > 1 and num_shards * fields["plan.cp"] != 1 else 0
    nodes = settings.count(("--num_machines", "num_machines"), 1)
    if is_hybrid and nodes > 1:
        num_copies = nodes
        settings.note(
            say(
                "{strategy} copies the model over {nodes} machines and shards it within each",
                strategy=strategy,
                nodes=nodes,
            )
        )
    fields["plan.zero_ranks"] = (
        replicas // num_copies if fields["plan.zero"] and num_copies > 1 and replicas % num_copies == 0 else 0
    )
    if settings.flag(_F + "offload_params") and fields["plan.zero"]:
        fields |= {"plan.offload_optimizer": 1.0, "plan.offload_parameters": fields["plan.zero"] == 3}
    if settings.flag(_F + "activation_checkpointing"):
        fields["plan.recompute"] = "full"


def _write_zero(job: JobSpec, settings: dict[str, Any]) -> None:
    plan = job.plan
    if _is_megatron(job):
        settings["distributed_type"] = "MEGATRON_LM"
        settings[_M + "use_distributed_optimizer"] = plan.zero > 0 and plan.replicas > 1
        return
    if plan.zero == 0 and plan.tp == plan.cp == 1:
        settings["distributed_type"] = "MULTI_GPU" if plan.dp > 1 else "NO"
        return
    settings |= {"distributed_type": "FSDP", _F + "version": 2, _F + "reshard_after_forward": plan.zero == 3}
    settings |= {_F + "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", _F + "state_dict_type": "SHARDED_STATE_DICT"}
    num_copies = plan.shard_copies
    num_copies = 1 if plan.dp // num_copies <= 1 else num_copies  # with tp or cp FSDP has to shard something
    if num_copies > 1 or plan.tp > 1 or plan.cp > 1:
        settings |= {_P + "dp_replicate_size": num_copies, _P + "dp_shard_size": max(1, plan.dp // num_copies)}
    if plan.zero and plan.offload_optimizer == 1.0 and plan.offload_parameters == (plan.zero == 3):
        settings[_F + "offload_params"] = True


def _read_batch(settings: Settings, fields: Flat) -> None:
    renamed = Settings(
        deepspeed_keys(settings.given),
        overrides=settings.overrides,
        automatic=settings.automatic,
        asks_ranks=settings.asks_ranks,
    )
    read_batch(renamed, fields)
    take_over(settings, renamed)
    accumulation = "gradient_accumulation_steps"
    settings.ignore("--per_device_train_batch_size", "num_processes", _M + "num_micro_batches")
    settings.ignore(accumulation, f"--{accumulation}", _D + accumulation)


def _read_numbers(settings: Settings, fields: Flat) -> None:
    numbers = {"no": "float32", "fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}
    fields["precision.compute"] = settings.one_of(("--mixed_precision", "mixed_precision"), numbers, "no")
    for name in ("fp16", "bf16"):  # options of the program override the configuration
        if settings.flag((f"--{name}", f"{name}.enabled")):
            fields["precision.compute"] = name
    if "fp8" in (settings.given.get("mixed_precision"), settings.given.get("--mixed_precision")):
        recipe = settings.one_of("fp8_config.backend", _FLOAT8, "TE", "precision.float8")
        fields["precision.float8"] = recipe
        if settings.has(_HISTORY):
            fields["precision.float8_history"] = settings.count(_HISTORY, 1024, least=1)
        settings.note(
            say("mixed_precision fp8 is taken as the {recipe} recipe (--set precision.float8=NAME)", recipe=recipe)
        )
    fields["precision.gradients"] = "float32"
    if _kind(settings) == "DEEPSPEED":
        deepspeed.read_gradients(settings, fields)
        deepspeed.tell_own_numbers(settings)
        if fields["precision.compute"] == "float32":
            deepspeed.tell_open_numbers(settings)


def _write_numbers(job: JobSpec, settings: dict[str, Any]) -> None:
    settings["mixed_precision"] = {"float32": "no"}.get(job.precision.compute, job.precision.compute)
    settings |= {f"--{job.precision.compute}": True} if job.precision.compute != "float32" else {}


_CLIP = _M + "gradient_clipping"


def _write_clip(job: JobSpec, settings: dict[str, Any]) -> None:
    settings |= {_CLIP: job.optimizer.clip_grad_norm} if _is_megatron(job) else {}


def _read_recompute(settings: Settings, fields: Flat) -> None:
    if settings.flag(_M + "recompute_activations"):
        fields["plan.recompute"] = "selective"


def _write_recompute(job: JobSpec, settings: dict[str, Any]) -> None:
    plan = job.plan
    is_attention = (
        plan.recompute == "selective" and plan.recompute_operators == ["attention"] and plan.recompute_every == 1
    )
    settings |= {_M + "recompute_activations": True} if _is_megatron(job) and is_attention else {}


def _write_batch(job: JobSpec, settings: dict[str, Any]) -> None:
    settings["--per_device_train_batch_size"] = job.plan.microbatch_size
    settings["--gradient_accumulation_steps"] = job.num_microbatches


TABLE: Table = (
    Rule((_P + "tp_size",), _read_degrees, _write_degrees),
    Rule(("--per_device_train_batch_size",), _read_batch, _write_batch),
    Rule(("distributed_type",), _read_zero, _write_zero),
    Rule(("mixed_precision",), _read_numbers, _write_numbers),
    number(
        f"--max_grad_norm {_CLIP} {_D}gradient_clipping gradient_clipping", "optimizer.clip_grad_norm", 1.0, always=True
    ),
    Rule((_CLIP,), None, _write_clip),
    Rule((_M + "recompute_activations",), _read_recompute, _write_recompute),
    *OPTIONS,
    TYPE_OF_WEIGHTS,
)


_SOFTWARE = "transformers-2025"  # as which all kinds but DeepSpeed's are priced
# Values of the plan for a search, which this file's settings and the options of a program can say.
_WRITTEN: Mapping[str, tuple[Any, ...]] = {
    "schedule": ("1f1b",),
    "offload_activations": (False,),
    "sequence_parallel": (False,),
    "recompute": ("none", "full"),
}


def is_own(data: dict[str, Any]) -> bool:
    """True if a file with these keys is a configuration of Accelerate's, or of DeepSpeed's."""
    own_keys = {"distributed_type", "compute_environment", "num_processes", "fsdp_config", "parallelism_config"}
    return bool({*own_keys, *FSDP_FILE_KEYS} & data.keys()) or deepspeed.is_own(data)


def read(texts: Mapping[str, str], asked: Asked) -> ReadResult:
    """Read a configuration, with a launch script and a config.json. Raises ShellFault."""
    return result_of(read_parts(texts, asked, is_own), asked)


def result_of(parts: FileParts, asked: Asked, *systems: str) -> ReadResult:
    """The result of reading the contents of files; `systems` are further ones of known.toml whose names they have."""
    command = parts.command
    settings = parts.settings(asked, asked.cluster.devices)
    put_options_of_launcher(settings, command, asked.cluster.devices)
    put_fsdp_options(settings)
    is_deepspeed = isinstance(settings.given.get("--deepspeed"), str) or settings.given.get("--use_deepspeed") is True
    is_deepspeed |= _is_turned_on(settings)
    if is_deepspeed and _kind(settings) in ("NO", "MULTI_GPU"):  # the program's engine counts over the launcher's
        settings.given["distributed_type"] = "DEEPSPEED"
    # Default counts: those of torchrun, if it starts the program.
    launched = (
        (command.nodes, command.devices_per_node) if command and command.nodes * command.devices_per_node else (1, 0)
    )
    machines = settings.count(("--num_machines", "num_machines"), launched[0]) or 1
    processes = settings.count(("--num_processes", "num_processes"), launched[0] * launched[1])
    world = asked.cluster.devices or processes
    settings.faults += [] if asked.cluster.devices else uneven_processes(processes, machines)
    settings.given |= {WORLD: world} if world else {}
    settings.given |= {"num_machines": machines} if machines > 1 else {}
    fields: Flat = {}
    read_model(parts.model, asked, settings, fields)
    for row in TABLE:
        read_row(row, settings, fields)
    _tell_engine_left_out(settings)
    known_in = ("accelerate", "deepspeed", "options", *systems)
    settings.faults += loose_faults(command.loose if command else (), settings, *known_in)
    settings.ignore(WORLD)
    tell_dropped(settings)
    deepspeed.ignore_disabled(settings)
    software = with_liger(deepspeed.SOFTWARE if _kind(settings) == "DEEPSPEED" else _SOFTWARE, settings)
    settings.note(priced_as(software))
    uses_launcher = bool(processes) and not asked.cluster.devices and processes % machines == 0
    shape = (machines, processes // machines) if uses_launcher else (0, 0)
    return ReadResult(fields, settings, software, *shape, known_in)


def _is_turned_on(settings: Settings) -> bool:
    """True if --set says a stage of ZeRO beside a file of DeepSpeed's, which then holds, as do its other settings."""
    return settings.overrides.get("plan.zero", "0") != "0" and any(
        name.startswith("zero_optimization.") for name in settings.given
    )


def _tell_engine_left_out(settings: Settings) -> None:
    """A fault if a file of DeepSpeed's is there, and nothing that starts the program turns DeepSpeed on."""
    keys = [name for name in settings.given if name.startswith("zero_optimization.")]
    if not keys or _kind(settings) == "DEEPSPEED" or settings.number(deepspeed.STAGE, 0) == 0:
        return
    stage = settings.setting_text(deepspeed.STAGE[0])
    settings.ignore(*keys)
    if "plan.zero" not in settings.overrides:
        settings.faults.append(
            say(
                "{setting}: this file of DeepSpeed's is there, and nothing that starts the program turns DeepSpeed on; "
                "name the file of Accelerate that does, or say the stage that holds: --set plan.zero=N",
                setting=stage,
            )
        )


def settings_of(job: JobSpec) -> dict[str, Any]:
    """A job's settings: keys of Accelerate's configuration, and options of the program (names with --)."""
    return write_table(TABLE, job)


def write(job: JobSpec) -> dict[str, str]:
    """The launch script, Accelerate's configuration, and config.json of the model, by file name."""
    flat, (nodes, devices_per_node) = settings_of(job), nodes_of(job)
    configuration = {name: value for name, value in flat.items() if not name.startswith("--")}
    fixed = {"compute_environment": "LOCAL_MACHINE", "debug": False, "machine_rank": 0, "use_cpu": False}
    fixed |= {"main_training_function": "main", "rdzv_backend": "static"}
    configuration = fixed | {"num_machines": nodes, "num_processes": nodes * devices_per_node} | configuration
    launcher = "accelerate launch --config_file accelerate.yaml"
    if nodes > 1:  # each node has its own rank, so the file cannot have it
        launcher += " --machine_rank $NODE_RANK --main_process_ip $MASTER_ADDR --main_process_port $MASTER_PORT"
    return {
        "run.sh": deepspeed.launch_text(job, flat, launcher, "Accelerate", []),
        "accelerate.yaml": yaml_text(nested_keys(configuration)),
        "config.json": model_file(job),
    }


FACTS = System(
    name="accelerate",
    place=70,
    title="Accelerate",
    read=read,
    write=write,
    settings=settings_of,
    software=_SOFTWARE,
    written=_WRITTEN,
    signs=SIGNS,
    variables=(alpaca_lora.ADAPTERS,),
    takes=deepspeed.OPTION_SYSTEMS,
    leaves_out=True,
)
