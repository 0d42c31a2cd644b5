"""DeepSpeed's and torchtitan's releases read what is written for them: `make interchange`, for they bring much along.

torchtitan compiles a kernel of Triton's when it is imported. Where that is not installed, as with torch for CPUs, a
stand-in takes its place: configurations are read, and nothing runs.
"""

import importlib
import importlib.util
import json
import sys
import tomllib
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import ClassVar
from unittest.mock import MagicMock

import pytest

from other_systems.drawn_jobs import jobs_of
from other_systems.exports import NUM_EXPORTS
from shardwright.config.other_systems.exported import exported
from shardwright.config.other_systems.systems import SYSTEMS


def test_deepspeed_takes_every_export(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime import config as released

    stages = set()
    for job in jobs_of(SYSTEMS["deepspeed"], seed=5, count=NUM_EXPORTS):
        own = json.loads(exported(SYSTEMS["deepspeed"], job).files["ds_config.json"])
        shared = job.plan.tp * job.plan.pp * job.plan.cp
        monkeypatch.setattr(released.dist, "get_rank", lambda: 0)
        # A batch is over replicas: it divides by the sequence-parallel degree, and its engine by the others.
        ranks = job.plan.world // shared * own.get("sequence_parallel_size", 1)
        monkeypatch.setattr(released.dist, "get_world_size", lambda *_, ranks=ranks: ranks)
        made = released.DeepSpeedConfig(own)
        assert made.train_batch_size == job.batch.global_batch_size
        assert made.train_micro_batch_size_per_gpu == job.plan.microbatch_size
        assert made.gradient_accumulation_steps == job.num_microbatches
        assert made.zero_config.stage == own["zero_optimization"]["stage"]
        assert made.bfloat16_config.enabled == (job.precision.compute == "bf16")
        assert (made.pipeline["stages"] if job.plan.pp > 1 else 1) == job.plan.pp
        stages.add(own["zero_optimization"]["stage"])
    assert stages == {0, 1, 2, 3}


class _StandIn(ModuleType):
    """A module whose names are all there; decorators give back what they decorate."""

    __path__: ClassVar[list[str]] = []
    __version__ = "3.2.0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():
            return type(name, (), {"__init__": lambda *_, **__: None})
        return (lambda function=None, **_: function or (lambda one: one)) if name == "jit" else MagicMock()


class _Finder(MetaPathFinder, Loader):
    """Finds Triton, and all modules within it."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == "triton" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton, or a stand-in for it."""
    if importlib.util.find_spec("triton") is None:
        for name in ("torch._dynamo", "torch._inductor.config", "torch._inductor.runtime.hints"):
            importlib.import_module(name)  # before there is one: torch looks for it once
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, _Finder()])


@pytest.mark.usefixtures("with_triton")
def test_torchtitan_takes_every_export(tmp_path: Path) -> None:
    import torchtitan
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims

    models = Path(str(torchtitan.__file__)).parent / "models"
    for number, job in enumerate(jobs_of(SYSTEMS["torchtitan"], seed=5, count=NUM_EXPORTS)):
        files = exported(SYSTEMS["torchtitan"], job).files
        path = tmp_path / f"{number}.toml"
        path.write_text(files["job.toml"])
        own = tomllib.loads(files["job.toml"])
        read = ConfigManager().parse_args(["--job.config_file", str(path)])
        assert read.parallelism.tensor_parallel_degree == own["parallelism"]["tensor_parallel_degree"]
        assert read.training.global_batch_size == own["training"]["global_batch_size"]
        of = read.parallelism
        dims = ParallelDims(
            dp_replicate=of.data_parallel_replicate_degree, dp_shard=of.data_parallel_shard_degree,
            cp=of.context_parallel_degree, tp=of.tensor_parallel_degree, pp=of.pipeline_parallel_degree,
            ep=of.expert_parallel_degree, etp=of.expert_tensor_parallel_degree, world_size=job.plan.world,
        )  # fmt: skip
        assert dims.dp_replicate * dims.dp_shard == job.plan.dp
        assert dims.dp_shard * dims.cp * dims.tp % (dims.ep * dims.etp) == 0 or dims.ep == 1
        name, flavor = own["model"]["name"], own["model"]["flavor"]
        if name != "llama2":  # which releases had until 2024
            assert f'"{flavor}": ' in (models / name / "__init__.py").read_text(encoding="utf-8")
