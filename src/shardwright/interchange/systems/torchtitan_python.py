"""The text of a Python file with a configuration function for torchtitan 0.3."""

import json
import keyword
import re
from collections.abc import Mapping
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.interchange.systems.torchtitan_config import CLASSES, POLICIES
from shardwright.interchange.systems.torchtitan_releases import IN_PYTHON
from shardwright.interchange.systems.torchtitan_run import RunLines

FUNCTION = "job"
_IMPORTS = {
    "ChunkedLossWrapper": "torchtitan.components.loss",
    "CrossEntropyLoss": "torchtitan.components.loss",
    "LRSchedulersContainer": "torchtitan.components.optimizer",
    "OptimizersContainer": "torchtitan.components.optimizer",
    "ParamGroupConfig": "torchtitan.components.optimizer",
    "default_adamw": "torchtitan.components.optimizer",
    "Float8LinearConverter": "torchtitan.components.quantization",
    "CompileConfig": "torchtitan.config",
    "ParallelismConfig": "torchtitan.config",
    "TrainingConfig": "torchtitan.config",
    "FullAC": "torchtitan.distributed.activation_checkpoint",
    "SelectiveAC": "torchtitan.distributed.activation_checkpoint",
    "HuggingFaceTextDataLoader": "torchtitan.hf_datasets.text_datasets",
    "decoder_vocab_size": "torchtitan.models.common.config_utils",
    "Trainer": "torchtitan.trainer",
}
_SECTIONS = ("training", "parallelism", "lr_scheduler")
_PLACEHOLDERS = (
    "# Data and tokenizer stand for yours.",
    'hf_assets_path="./assets/hf",',
    'dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),',
)


def python_text(job: JobSpec, settings: Mapping[str, Any], run: RunLines | None = None) -> str:
    """The text of a file with one function, for settings under the names of the table. `run` has the data and the
    checkpoints; without it others stand for them."""
    optimizer = _with_prefix(settings, "optimizer.")
    fields = {name: value for name, value in settings.items() if name not in IN_PYTHON.spelled}
    sections = {section: _with_prefix(fields, f"{section}.") for section in _SECTIONS}
    lines = _model_lines(settings) if "model.name" in settings else []
    lines += ["return Trainer.Config(", *(["    model_spec=model_spec,"] if lines else [])]
    loss = "CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec))"
    lines += [f"    loss=ChunkedLossWrapper.Config(loss_fn={loss}),"]
    lines += [f"    {line}" for line in (run.arguments if run else _PLACEHOLDERS)]
    lines += [f"    {line}" for line in _optimizer_lines(optimizer)]
    for section in _SECTIONS:
        if sections[section]:
            lines += [f"    {section}={CLASSES[section]}(", *_arguments(sections[section], 8), "    ),"]
    policy = POLICIES.get(settings.get("activation_checkpoint.mode", ""))
    lines += [f"    activation_checkpoint={policy}()," if policy else "    activation_checkpoint=None,"]
    lines += ["    compile=CompileConfig(enable=True),"] if "model.converters" in settings else []
    body = [f"def {FUNCTION}() -> Trainer.Config:", *(f"    {line}" for line in [*lines, ")"])]
    name = " ".join(job.name.split()).replace("\\", "/").replace('"', "'")
    heading = f'"""{name}, for torchtitan 0.3, written by shardwright. It takes {job.plan.world} GPUs."""'
    if run:
        body = [*run.statements, "", "", *body]
    imports = _import_lines("\n".join(body), settings, {**_IMPORTS, **(run.imports if run else {})})
    return "\n".join([heading, "", *imports, "", "", *body]) + "\n"


def _with_prefix(settings: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}


def _import_lines(body: str, settings: Mapping[str, Any], known: Mapping[str, str]) -> list[str]:
    """The import lines for the names that the body uses, of those whose modules are known."""
    modules: dict[str, list[str]] = {}
    for name, module in known.items():
        if re.search(rf"\b{name}\b", body):
            modules.setdefault(module, []).append(name)
    if "model.name" in settings:
        modules[f"torchtitan.models.{settings['model.name']}"] = ["model_registry"]
    return [f"from {module} import {', '.join(sorted(modules[module]))}" for module in sorted(modules)]


def _model_lines(settings: Mapping[str, Any]) -> list[str]:
    words = [python_value(settings.get("model.flavor", ""))]
    backend = settings.get("parallelism.expert_parallel_comm_backend")
    words += [f"moe_comm_backend={python_value(backend)}"] if backend else []
    if "model.converters" in settings:
        recipe = settings.get("quantize.linear.float8.recipe_name")
        inner = [f"recipe_name={python_value(recipe)}"] if recipe else []
        words.append(f"converters=[Float8LinearConverter.Config({', '.join([*inner, 'model_compile_enabled=True'])})]")
    return [f"model_spec = model_registry({', '.join(words)})"]


def _optimizer_lines(settings: dict[str, Any]) -> list[str]:
    """The optimizer with one group of all parameters, or default_adamw() for a plain AdamW."""
    name, beta1, beta2 = settings.pop("name", "AdamW"), settings.pop("beta1", 0.9), settings.pop("beta2", 0.95)
    extra_arguments = {"implementation": settings.pop("implementation")} if "implementation" in settings else {}
    kwargs = {"lr": settings.pop("lr"), "betas": (beta1, beta2), "eps": settings.pop("eps", 1e-8)} | settings
    if name == "AdamW" and not extra_arguments:
        return ["optimizer=default_adamw(", *_arguments(kwargs, 4), "),"]
    inner = ", ".join(f"{python_value(key)}: {python_value(value)}" for key, value in kwargs.items())
    return [
        "optimizer=OptimizersContainer.Config(",
        "    param_groups=[",
        "        ParamGroupConfig(",
        '            pattern=r".*",',
        f"            optimizer_name={python_value(name)},",
        f"            optimizer_kwargs={{{inner}}},",
        "        )",
        "    ],",
        *_arguments(extra_arguments, 4),
        "),",
    ]


def _arguments(values: Mapping[str, Any], indent: int) -> list[str]:
    assert not any(keyword.iskeyword(name) for name in values)
    return [f"{' ' * indent}{name}={python_value(value)}," for name, value in values.items()]


def python_value(value: Any) -> str:
    """A value as Python source."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(python_value, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return repr(value)
