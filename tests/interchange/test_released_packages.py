"""The released packages read what is written for them: argument parsers and classes of configurations.

Megatron-LM's own argument parser is not in the package megatron-core; the classes that its arguments become are, and
check them. DeepSpeed and torchtitan bring much along: heavier_packages.py (`make interchange`). The packages are
imported where they are used: that takes a second, in each process that collects tests.
"""

import dataclasses
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from interchange.exports import NUM_EXPORTS, arguments_of, exports
from shardwright.interchange.reading.script_text import settings_of

# Arguments that are not called as the field that they become, or become its opposite.
RENAMED = {
    "norm-epsilon": "layernorm_epsilon", "fp8-format": "fp8", "untie-embeddings-and-output-weights": "",
    "num-experts": "num_moe_experts", "num-query-groups": "num_query_groups", "disable-bias-linear": "add_bias_linear",
    "optimizer-cpu-offload": "optimizer_cpu_offload", "num-virtual-stages-per-pipeline-rank":
    "virtual_pipeline_model_parallel_size", "tensor-model-parallel-size": "tensor_model_parallel_size",
    "no-fp8-wgrad": "fp8_wgrad", "no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    "no-bias-gelu-fusion": "bias_activation_fusion",
}  # fmt: skip
# Arguments of Megatron-LM's training program, which no class of the package has a field for.
OF_THE_PROGRAM = frozenset(
    [
        "accumulate-allreduce-grads-in-fp32",
        "ckpt-format",
        "global-batch-size",
        "glu-linear-offset",
        "grad-reduce-in-bf16",
        "group-query-attention",
        "initial-loss-scale",
        "lion-beta1",
        "lion-beta2",
        "loss-scale-window",
        "lr-decay-iters",
        "lr-decay-samples",
        "lr-decay-style",
        "lr-warmup-iters",
        "lr-warmup-samples",
        "lr-wsd-decay-iters",
        "lr-wsd-decay-samples",
        "lr-wsd-decay-style",
        "make-vocab-size-divisible-by",
        "max-position-embeddings",
        "micro-batch-size",
        "mock-data",
        "moe-router-dtype",
        "mtp-loss-scaling-factor",
        "multi-latent-attention",
        "muon-momentum",
        "muon-nesterov",
        "muon-num-ns-steps",
        "num-distributed-optimizer-instances",
        "num-layers-per-virtual-pipeline-stage",
        "openai-gelu",
        "overlap-grad-reduce",
        "overlap-param-gather",
        "position-embedding-type",
        "qk-l2-norm",
        "quick-geglu",
        "rampup-batch-size",
        "rope-scaling-factor",
        "rotary-base",
        "rotary-percent",
        "rotary-seq-len-interpolation-factor",
        "seq-length",
        "sgd-momentum",
        "softmax-type",
        "split",
        "squared-relu",
        "swiglu",
        "tokenizer-type",
        "train-iters",
        "train-samples",
        "untie-embeddings-and-output-weights",
        "use-rope-scaling",
        "use-tp-pp-dp-mapping",
        "vocab-size",
        "window-attn-skip-freq",
    ]
)
OPPOSITE = ("disable-", "no-")


class FusedAdam:
    """The arguments by which Transformer Engine's is known."""

    def __init__(
        self, master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: bool
    ) -> None: ...


def typed(value: Any, kind: str) -> Any:
    """An argument's text as the type of a field."""
    if value is True or isinstance(value, list):
        return value
    if "Callable" in kind or "dtype" in kind:
        return {"bf16": torch.bfloat16, "fp32": torch.float32}.get(value, value)
    if kind.startswith(("typing.Optional[typing.List", "list")):
        return [value]
    if kind.startswith(("typing.Union[str", "str", "typing.Optional[str")):
        return value
    for make in (int, float):
        try:
            return make(value)
        except ValueError:
            continue
    return value


def fields_for(kind: Any, flags: dict[str, Any]) -> dict[str, Any]:
    """Arguments that are fields of a class."""
    fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    result = {}
    for name, value in flags.items():
        key = RENAMED.get(name, name.replace("-", "_"))
        if key in fields and name not in ("moe-layer-freq", "window-size"):
            result[key] = False if name.startswith(OPPOSITE) else typed(value, fields[key])
    return result


@pytest.fixture
def megatron() -> SimpleNamespace:
    """Megatron-core's classes. To import them takes seconds, which each process that collects tests would spend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it misses Apex and Transformer Engine
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, optimizer_config
        from megatron.core.transformer import transformer_config
    return SimpleNamespace(
        modules=(transformer_config, optimizer_config),
        transformer=transformer_config.TransformerConfig,
        latent=transformer_config.MLATransformerConfig,
        optimizer=OptimizerConfig,
        sharded=DistributedDataParallelConfig,
    )


@pytest.mark.long
def test_megatron_core_takes_every_export(megatron: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in megatron.modules:  # as where a new Transformer Engine is installed
        monkeypatch.setattr(module, "is_te_min_version", lambda *_, **__: True)
    engine = ModuleType("optimizers")
    engine.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    for name in ("", ".pytorch", ".pytorch.optimizers"):
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", engine)
    taken: set[str] = set()
    for files in exports("megatron"):
        flags = settings_of(arguments_of(files["run.sh"]))
        latent = "multi-latent-attention" in flags
        kind = megatron.latent if latent else megatron.transformer
        shape = fields_for(kind, flags)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = kind(**shape | {"pipeline_dtype": torch.float32})
            optimizer = megatron.optimizer(**fields_for(megatron.optimizer, flags))
        sharded = megatron.sharded(**fields_for(megatron.sharded, flags))
        assert made.tensor_model_parallel_size == int(flags["tensor-model-parallel-size"])
        assert made.num_layers == int(flags["num-layers"]) and optimizer.lr == float(flags["lr"])
        assert sharded.use_distributed_optimizer == ("use-distributed-optimizer" in flags)
        classes = (kind, megatron.optimizer, megatron.sharded)
        names = {field.name for one in classes for field in dataclasses.fields(one)}
        unknown = {name for name in flags if RENAMED.get(name, name.replace("-", "_")) not in names} - OF_THE_PROGRAM
        assert unknown == set()
        taken |= flags.keys()
    assert len(taken) > 60


@pytest.mark.long
def test_accelerate_and_transformers_take_every_export(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig
    from transformers import AutoConfig

    kinds = set()
    for number, files in enumerate(exports("accelerate")):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        config = load_config_from_file(str(folder / "accelerate.yaml"))
        kinds.add(str(config.distributed_type))
        taken = {name for name in ("fsdp", "parallelism") for name in getattr(config, f"{name}_config")}
        sizes = {name.removeprefix("parallelism_config_"): value for name, value in config.parallelism_config.items()}
        ParallelismConfig(**{name: value for name, value in sizes.items() if name.endswith("_size")})
        options = set(launch_command_parser()._option_string_actions)
        assert {f"--{name}" for name in taken} <= options
        check_options(files["run.sh"], folder)
        AutoConfig.from_pretrained(folder)
    assert len(kinds) >= 3


@pytest.mark.long
def test_transformers_takes_every_export_for_deepspeed(tmp_path: Path) -> None:
    for files in exports("deepspeed"):
        check_options(files["run.sh"].replace("--deepspeed ds_config.json", ""), tmp_path)


def check_options(script: str, folder: Path) -> None:
    """Options as transformers reads them; what is left are those of the program, which it has examples of."""
    from transformers import HfArgumentParser, TrainingArguments

    words = [word for word in arguments_of(script) if word not in ("--bf16", "--fp16")]  # which ask for a GPU
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, left = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
            [*words, "--output_dir", str(folder)], return_remaining_strings=True
        )
    assert {word for word in left if word.startswith("--")} <= {"--config_name", "--dataset_name", "--block_size"}


def test_there_are_thirty_of_each() -> None:
    assert all(len(exports(name)) == NUM_EXPORTS for name in ("megatron", "accelerate", "deepspeed"))


@pytest.mark.parametrize("flags", [{"num-layers": "3", "hidden-size": "64", "num-attention-heads": "5"}])
def test_what_megatron_core_refuses_is_seen(flags: dict[str, Any], megatron: SimpleNamespace) -> None:
    shape = fields_for(megatron.transformer, flags | {"tensor-model-parallel-size": "2"})
    with pytest.raises((ValueError, AssertionError)):
        megatron.transformer(**shape)
