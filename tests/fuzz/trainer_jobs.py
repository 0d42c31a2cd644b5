"""Jobs of further trainers (tests/interchange/other_trainers) as settings by name, and settings as files again."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from shardwright.config.dotted_keys import flat_keys, nested_keys
from shardwright.config.yaml_text import yaml_text
from shardwright.interchange.reading.plain_data import read_data

FOLDER = Path(__file__).parents[1] / "interchange/other_trainers"
# System -> (its file, files beside it, the sections in which settings are drawn, devices).
FILES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], int]] = {
    "axolotl": ("axolotl.yaml", ("config.json",), ("", "fsdp_config."), 16),
    "flagscale": ("harbour.yaml", (), ("system.", "model.", "model.optimizer."), 16),
    "gpt-neox": ("neox.yml", ("neox-data.yml",), ("", "zero_optimization."), 16),
    "lightning": ("", ("config.json",), ("", "strategy."), 16),
    "llamafactory": ("llamafactory.yaml", ("shards.json", "config.json"), ("",), 8),
    "megatron-bridge": ("", ("config.json",), ("model.", "train.", "ddp."), 32),
    "ms-swift": ("", ("config.json",), ("",), 8),
    "nanotron": ("nanotron.yaml", (), ("model.model_config.", "parallelism.", "tokens.", "optimizer."), 0),
    "nemo-recipes": (
        "",
        ("config.json",),
        ("trainer.", "trainer.strategy.", "trainer.strategy.ddp.", "data.", "optim.config."),
        16,
    ),
    "picotron": ("picotron.json", ("config.json",), ("model.", "distributed.", "training."), 0),
    "primus": ("primus/harbour-pretrain.yaml", (), ("modules.pre_trainer.overrides.",), 16),
    "trl": ("trl.yaml", ("accelerate-zero3.yaml", "config.json"), ("",), 8),
}
# Settings of the formats that are no data.
_WRITTEN: dict[str, dict[str, Any]] = {
    "lightning": {
        "devices": 8, "num_nodes": 2, "precision": "bf16-mixed", "max_steps": 500, "log_every_n_steps": 5,
        "accumulate_grad_batches": 4, "strategy.limit_all_gathers": True, "strategy.sharding_strategy": "FULL_SHARD",
    },
    "megatron-bridge": {
        "model.tensor_model_parallel_size": 4, "model.sequence_parallel": True, "model.seq_length": 4096,
        "train.global_batch_size": 64, "train.micro_batch_size": 1, "ddp.check_for_nan_in_grad": True,
        "model.cross_entropy_loss_fusion": True,
    },
    "ms-swift": {
        "model": "harbour/Harbour-8B", "tensor_model_parallel_size": 4, "micro_batch_size": 2, "global_batch_size": 32,
        "max_length": 4096, "packing": "true", "save_steps": 100, "dataset": "harbour/letters", "train_iters": 40,
        "attention_backend": "flash",
    },
    "nemo-recipes": {
        "trainer.max_steps": 500, "trainer.val_check_interval": 50, "trainer.log_every_n_steps": 10,
        "trainer.num_nodes": 2, "trainer.devices": 8, "trainer.strategy.tensor_model_parallel_size": 4,
        "trainer.strategy.sequence_parallel": True, "trainer.strategy.gradient_as_bucket_view": True,
        "trainer.strategy.ckpt_async_save": True, "trainer.strategy.ddp.grad_reduce_in_fp32": True,
        "trainer.strategy.ddp.check_for_nan_in_grad": True, "data.seq_length": 4096, "data.global_batch_size": 64,
        "data.micro_batch_size": 1, "data.num_workers": 4, "optim.config.lr": 1e-4, "optim.config.clip_grad": 1.0,
    },
}  # fmt: skip
_LEAVES = ("primus", "flagscale", "megatron-bridge", "nemo-recipes")  # whose settings are named without their sections


@cache
def trainer_jobs() -> tuple[dict[str, Any], ...]:
    """A job of each system, as the fuzzer draws them."""
    return tuple(
        {
            "name": system, "system": system, "sets": (), "devices": devices, "device": "h100-sxm",
            "settings": _settings(system, file), "is_trainer": True,
        }
        for system, (file, _, _, devices) in FILES.items()
    )  # fmt: skip


def shown_name(system: str, name: str) -> str:
    """The name of a setting in messages."""
    return name.rpartition(".")[2] if system in _LEAVES else name


def trainer_files(job: dict[str, Any]) -> dict[str, str]:
    """The files of a job: its own, those beside it, and those of a library that it begins from."""
    system = job["system"]
    file, others, _, _ = FILES[system]
    texts = {file or _name(system): _text(system, job["settings"])}
    library = sorted((FOLDER / "primus/configs").rglob("*.yaml")) if system == "primus" else []
    paths = [*(FOLDER / name for name in others), *library]
    return texts | {path.name: path.read_text(encoding="utf-8") for path in paths}


def _settings(system: str, file: str) -> dict[str, Any]:
    data = read_data(file, (FOLDER / file).read_text(encoding="utf-8")) if file else _WRITTEN[system]
    return flat_keys({str(key): value for key, value in data.items()})


def _name(system: str) -> str:
    return "run.sh" if system == "ms-swift" else "job.py"


def _text(system: str, settings: dict[str, Any]) -> str:
    if system == "ms-swift":
        words = " ".join(f"--{name} {value}" for name, value in settings.items())
        return f"NNODES=2 NPROC_PER_NODE=4 megatron sft {words}\n"
    if system == "megatron-bridge":
        lines = [f"    cfg.{name} = {value!r}" for name, value in settings.items()]
        model = "    cfg.model = AutoBridge.from_hf_pretrained('harbour/Harbour-8B').to_megatron_provider()"
        return "\n".join(["def config():", "    cfg = _pretrain_common()", model, *lines, "    return cfg", ""])
    if system == "nemo-recipes":
        lines = [f"    recipe.{name} = {value!r}" for name, value in settings.items()]
        parts = "model=run.Config(HarbourModel), trainer=run.Config(Trainer, strategy=run.Config(MegatronStrategy, "
        parts += "ddp=run.Config(DDPConfig))), data=run.Config(MockDataModule), "
        parts += "optim=run.Config(MegatronOptimizerModule, config=run.Config(OptimizerConfig))"
        made = f"    recipe = run.Partial(pretrain, {parts})"
        return "\n".join(["import nemo_run as run", "def recipe():", made, *lines, "    return recipe", ""])
    if system == "lightning":
        own = ", ".join(f"{name}={value!r}" for name, value in settings.items() if "." not in name)
        inner = ", ".join(f"{name[9:]}={value!r}" for name, value in settings.items() if name.startswith("strategy."))
        call = f"lightning.Trainer({own}, strategy=FSDPStrategy({inner}))"
        return f"import lightning\nDataLoader(letters, batch_size=2)\n{call}\n"
    nested = nested_keys(settings)
    return json.dumps(nested) if system == "picotron" else yaml_text(nested)
