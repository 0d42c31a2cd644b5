"""Lightning: a Python file with a call of Trainer, whose arguments say devices, strategy, number types and steps.

The file is parsed and never run. A model is what a config.json, from_pretrained("NAME") in the file, or --set says.
"""

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from shardwright.config import largest
from shardwright.config.base import shortened
from shardwright.config.phrase import say
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.named_model import is_model, read_named_model, shape_fields
from shardwright.interchange.reading.file_signs import FileSigns
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.python_expressions import Scope
from shardwright.interchange.reading.python_source import Reader, Source, source_of_text
from shardwright.interchange.reading.python_values import Named, ParsedCall, Unread
from shardwright.interchange.reading.setting_notes import none_of, priced_as
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.rows import Rule, Table, count, number, read_row
from shardwright.interchange.system import SourceSystem
from shardwright.interchange.systems import deepspeed

SIGNS = (FileSigns(imports=(r"^\s*(import|from)\s+(pytorch_)?lightning\b",)),)
_MODEL = "from_pretrained"
_ZERO = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3}
# Words of `strategy` -> (ZeRO stage, optimizer state is offloaded, parameters are offloaded).
_STRATEGIES = {
    "auto": (0, False, False),
    "ddp": (0, False, False),
    "ddp_spawn": (0, False, False),
    "ddp_find_unused_parameters_true": (0, False, False),
    "fsdp": (3, False, False),
    "fsdp_cpu_offload": (3, True, True),
    "deepspeed": (2, False, False),
    "deepspeed_stage_1": (1, False, False),
    "deepspeed_stage_2": (2, False, False),
    "deepspeed_stage_2_offload": (2, True, False),
    "deepspeed_stage_3": (3, False, False),
    "deepspeed_stage_3_offload": (3, True, True),
}
_CLASSES = {"FSDPStrategy": "fsdp", "DDPStrategy": "ddp", "DeepSpeedStrategy": "deepspeed_stage_2"}
_PRECISIONS = {
    "32": "float32",
    "32-true": "float32",
    "16": "fp16",
    "16-mixed": "fp16",
    "bf16": "bf16",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "16-true": "fp16",
}
_PARTS = {
    "get_peft_model": "peft.get_peft_model_on_line",
    "LoraConfig": "lora.LoraConfig_on_line",
    "BitsAndBytesConfig": "quantization.BitsAndBytesConfig_on_line",
    "BitsandbytesPrecision": "quantization.BitsandbytesPrecision_on_line",
    "freeze": "frozen.freeze_on_line",
}
_INERT = (
    "logger",
    "callbacks",
    "accelerator",
    "log_every_n_steps",
    "enable_checkpointing",
    "enable_progress_bar",
    "default_root_dir",
    "max_epochs",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "limit_val_batches",
    "limit_test_batches",
    "enable_model_summary",
    "deterministic",
    "benchmark",
    "profiler",
    "fast_dev_run",
    "use_distributed_sampler",
    "plugins",
    "detect_anomaly",
    "max_time",
    "gradient_clip_algorithm",
    "min_epochs",
    "sync_batchnorm",
    "overfit_batches",
    "limit_train_batches",
    "inference_mode",
    "barebones",
)
_OF_STRATEGY = (
    "auto_wrap_policy",
    "state_dict_type",
    "use_orig_params",
    "limit_all_gathers",
    "forward_prefetch",
    "timeout",
    "backward_prefetch",
    "find_unused_parameters",
    "process_group_backend",
    "sync_module_states",
    "gradient_as_bucket_view",
    "static_graph",
)


def _read_devices(settings: Settings, fields: Flat) -> None:
    devices, nodes = settings.raw("devices"), settings.count("num_nodes", 1, largest.RANKS, 1)
    each = len(devices) if isinstance(devices, list) else settings.count("devices", 0) if devices != "auto" else 0
    world = settings.count("world_size", each * nodes)
    if not world:
        settings.faults.append(say("Trainer does not say how many devices there are; say it with --devices, such as 8"))
    fields |= {"plan.dp": max(1, world), "plan.tp": 1, "plan.pp": 1, "plan.cp": 1}


def _read_strategy(settings: Settings, fields: Flat) -> None:
    word = settings.text("strategy", "auto")
    if word not in _STRATEGIES:
        settings.faults.append(none_of(f"strategy = {shortened(word, 60)}", _STRATEGIES))
    zero, offloads_state, offloads_parameters = _STRATEGIES.get(word, (0, False, False))
    zero = settings.count("strategy.stage", zero, 3)
    zero = settings.one_of("strategy.sharding_strategy", _ZERO, "FULL_SHARD", "plan.zero") if word == "fsdp" else zero
    if settings.text("strategy.sharding_strategy") == "HYBRID_SHARD" and settings.count("num_nodes", 1) > 1:
        fields["plan.zero_ranks"] = fields["plan.dp"] // settings.count("num_nodes", 1)
    if word == "fsdp" and settings.flag("strategy.cpu_offload"):
        offloads_state, offloads_parameters = True, zero == 3
    fields["plan.zero"] = zero if fields["plan.dp"] > 1 else 0
    fields["plan.offload_optimizer"] = 1.0 if offloads_state and fields["plan.zero"] else 0.0
    fields["plan.offload_parameters"] = offloads_parameters and fields["plan.zero"] == 3
    if settings.has("strategy.activation_checkpointing_policy", "strategy.activation_checkpointing"):
        fields["plan.recompute"] = "full"
    fields["plan.schedule"] = "1f1b"


def _read_batch(settings: Settings, fields: Flat) -> None:
    if "plan.microbatch_size" not in settings.overrides and not settings.has("DataLoader.batch_size"):
        settings.faults.append(
            say(
                "no DataLoader in the file says how many sequences a device takes at once; --set plan.microbatch_size=N"
            )
        )
    size = settings.count("DataLoader.batch_size", 1, largest.BATCH, 1)
    size = settings.overridden("plan.microbatch_size") or size
    fields["plan.microbatch_size"] = size
    accumulation = settings.count("accumulate_grad_batches", 1, largest.BATCH, 1)
    fields["batch.global_batch_size"] = size * accumulation * fields["plan.dp"]


def _is_deepspeed(settings: Settings) -> bool:
    return settings.text("strategy", "auto").startswith("deepspeed")


def _read_numbers(settings: Settings, fields: Flat) -> None:
    word = settings.text("precision", "32-true")
    fields["precision.compute"] = settings.one_of("precision", _PRECISIONS, "32-true", "precision.compute")
    if _is_deepspeed(settings):  # which has masters in either case
        fields["precision.gradients"] = "float32" if fields["precision.compute"] == "float32" else "compute"
    elif word.endswith("-true") and fields["precision.compute"] != "float32":
        moments = fields["precision.compute"]
        fields |= {"precision.master": "none", "precision.gradients": "compute", "precision.moments": moments}


TABLE: Table = (
    Rule(("devices",), _read_devices),
    Rule(("strategy",), _read_strategy),
    Rule(("accumulate_grad_batches",), _read_batch),
    Rule(("precision",), _read_numbers),
    count("max_steps", "optimizer.steps", 1000),
    number("gradient_clip_val", "optimizer.clip_grad_norm", 0.0),
)


def read(texts: Mapping[str, str], asked: Asked) -> ReadResult:
    """Read a file that calls Trainer, with the model's config.json. Raises ShellFault."""
    sources = [source_of_text(name, text) for name, text in texts.items() if name.endswith(".py")]
    others = [read_data(name, text) for name, text in texts.items() if not name.endswith(".py")]
    reader = Reader(sources, dict(asked.variables))
    given = {key: value for source in sources for key, value in _arguments(texts[source.name], source, reader)}
    if "strategy" not in given and "devices" not in given:
        raise ShellFault(say("no call of Trainer in it says devices or strategy; name the file that has it"))
    settings = Settings(given | ({"world_size": asked.cluster.devices} if asked.cluster.devices else {}))
    settings.overrides = asked.fields
    for name, value in given.items():
        if isinstance(value, Unread):
            settings.faults.append(
                say(
                    "{setting} ({place}) can't be known without running; write its value",
                    setting=f"{name} = {value.text}",
                    place=value.place,
                )
            )
    settings.given = {name: value for name, value in settings.given.items() if not isinstance(value, Unread)}
    model = next((keys for keys in others if is_model(keys)), None)
    fields = shape_fields(read_named_model(model, (_MODEL,), asked, settings), asked)
    for row in TABLE:
        read_row(row, settings, fields)
    settings.ignore("world_size", *_INERT, *(f"strategy.{name}" for name in _OF_STRATEGY))
    software = deepspeed.SOFTWARE if _is_deepspeed(settings) else "transformers-2025"
    settings.note(priced_as(software))
    settings.note(say("the optimizer is the program's own; AdamW is taken (--set optimizer.name=NAME)"))
    return ReadResult(fields, settings, software, known_in=("lightning",))


def _arguments(text: str, source: Source, reader: Reader) -> Iterator[tuple[str, Any]]:
    """Names and values of the arguments of Trainer, of its strategy, of DataLoader, the model's name, and what trains
    only a part of it."""
    for node in ast.walk(ast.parse(text)):
        if part := _trained_part(node):
            yield part, getattr(node, "lineno", True)
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name == "Trainer":
            for argument in node.keywords:
                if argument.arg:
                    yield from _flat(argument.arg, reader.expressions.value(argument.value, Scope(source, {})), source)
        elif name == "DataLoader":
            for argument in node.keywords:
                value = reader.expressions.value(argument.value, Scope(source, {}))
                if argument.arg == "batch_size" and isinstance(value, int):
                    yield "DataLoader.batch_size", value
        elif name == _MODEL and node.args and isinstance(node.args[0], ast.Constant):
            yield _MODEL, node.args[0].value


def _trained_part(node: ast.AST) -> str:
    """The name of a statement or call that freezes or quantises weights, or adds an adapter; empty for another."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is False:
        names = [target.attr for target in node.targets if isinstance(target, ast.Attribute)]
        return "frozen.requires_grad_on_line" if "requires_grad" in names else ""
    if not isinstance(node, ast.Call):
        return ""
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name == "requires_grad_" and any(getattr(word, "value", None) is False for word in node.args):
        return "frozen.requires_grad_on_line"
    return _PARTS.get(name, "")


def _flat(name: str, value: Any, source: Source) -> Iterator[tuple[str, Any]]:
    """A value as settings: a call of a strategy's class is its word and its arguments."""
    if isinstance(value, ParsedCall):
        word = _CLASSES.get(value.short_callee, value.short_callee) if name == "strategy" else value.short_callee
        yield name, word
        for key, inner in value.keywords.items():
            yield f"{name}.{key}", True if isinstance(inner, (ParsedCall, Named, Unread)) else inner
    elif isinstance(value, Named):
        yield name, Unread(value.text, source.short)
    else:
        yield name, value


FACTS = SourceSystem(name="lightning", place=130, title="Lightning", read=read, signs=SIGNS)
