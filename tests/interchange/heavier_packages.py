"""DeepSpeed's, torchtitan's, axolotl's and LLaMA-Factory's releases read what is written for them: `make interchange`,
for they bring much along.

Two releases of torchtitan have one name, and of axolotl and LLaMA-Factory only what their configurations need is
installed: `make interchange` runs this file with each in reach, and the tests of the others are skipped. torchtitan
compiles kernels of Triton's when it is imported. Where that is not installed, as with torch for CPUs, a stand-in takes
its place: configurations are read, and nothing runs.
"""

import importlib
import importlib.util
import json
import sys
import tomllib
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest
import yaml

from interchange.drawn_jobs import jobs_of
from interchange.exports import NUM_EXPORTS, arguments_of
from interchange.trainer_classes import axolotl_names, axolotl_values, compared, job_values, llama_factory_values
from shardwright.config.load import load_job
from shardwright.interchange.exported import exported
from shardwright.interchange.reading.python_source import Reader, source_of_text
from shardwright.interchange.system import SYSTEMS
from shardwright.interchange.systems.torchtitan_config import MAKERS, POLICIES, UNEXPANDED_FUNCTIONS, config_of


def test_deepspeed_takes_every_export(monkeypatch: pytest.MonkeyPatch) -> None:
    released = pytest.importorskip("deepspeed.runtime.config")

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


def _release(package: str) -> str:
    """The number of a package's release; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


TITAN = _release("torchtitan")
IS_NEW = not TITAN.startswith(("0.1", "0.2"))
in_toml = pytest.mark.skipif(not TITAN or IS_NEW, reason="for torchtitan up to 0.2")
in_python = pytest.mark.skipif(not TITAN or not IS_NEW, reason="for torchtitan 0.3")


@in_toml
@pytest.mark.usefixtures("with_triton")
def test_torchtitan_takes_every_toml(tmp_path: Path) -> None:
    import torchtitan
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims

    models = Path(str(torchtitan.__file__)).parent / "models"
    for number, job in enumerate(jobs_of(SYSTEMS["torchtitan-0.2"], seed=5, count=NUM_EXPORTS)):
        files = exported(SYSTEMS["torchtitan-0.2"], job).files
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


def _own(read: Any, name: str) -> Any:
    """A setting of a Trainer.Config, by its name here; `missing` where its class has no such field."""
    if name == "activation_checkpoint":
        policy = read.activation_checkpoint
        return next((word for word, maker in POLICIES.items() if maker == type(policy).__qualname__), "none")
    for part in name.split("."):
        if isinstance(read, (list, tuple)):
            read = read[int(part)]
        elif isinstance(read, dict):
            read = read.get(part, "missing")
        else:
            read = getattr(read, part, "missing")
    return read


# Arguments of model_registry are in the layers of the model that it makes, and no fields of their own.
_OF_REGISTRY = ("model_registry.", "Float8", "MXFP8", "NVFP4", "LoRA")


@pytest.fixture
def with_float8(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The recipes of linear layers in float8. Converters take a device to be made, and convert nothing here."""
    from torchtitan.components import quantization

    made: list[str] = []

    def convert(self: Any, config: object) -> object:
        made.append(getattr(self.config, "recipe_name", ""))
        return config

    for name in quantization.__all__:
        if name.endswith("Converter"):
            monkeypatch.setattr(
                getattr(quantization, name), "__init__", lambda self, config: vars(self).update(config=config)
            )
            monkeypatch.setattr(getattr(quantization, name), "convert", convert)
    return made


@in_python
@pytest.mark.usefixtures("with_triton")
def test_torchtitan_takes_every_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.models.common.token_dispatcher import DeepEPTokenDispatcher

    made, seen = request.getfixturevalue("with_float8"), set()
    for number, job in enumerate(jobs_of(SYSTEMS["torchtitan"], seed=5, count=NUM_EXPORTS)):
        folder = tmp_path / str(number)
        folder.mkdir()
        files = exported(SYSTEMS["torchtitan"], job).files
        for name, text in files.items():
            (folder / name).write_text(text)
        monkeypatch.syspath_prepend(str(folder))
        sys.modules.pop("job_config", None)
        made.clear()
        read: Any = ConfigManager().parse_args(arguments_of(files["run.sh"], "torchtitan.train"))
        own = SYSTEMS["torchtitan"].settings(job)
        for name, value in own.items():
            if not name.startswith(_OF_REGISTRY):
                assert _own(read, name) == value, name
        assert made == ([job.precision.float8 + ("" if job.precision.float8_weight_gradients else "_with_gw_hp")]
                        if job.precision.float8 != "none" else [])  # fmt: skip
        dims = ParallelDims.from_config(read.parallelism, job.plan.world)
        assert dims.dp_replicate * dims.dp_shard == job.plan.dp
        assert dims.dp_shard * dims.cp * dims.tp % dims.ep == 0
        is_deep = any(read.model_spec.model.traverse(DeepEPTokenDispatcher.Config))
        assert is_deep == (own.get("model_registry.moe_comm_backend") == "deepep")
        assert len(read.model_spec.model.layers) == job.model.layers
        seen |= own.keys()
    assert {"parallelism.module_fqns_per_model_part", "training.disable_cuda_graphs"} <= seen


@in_python
@pytest.mark.usefixtures("with_triton")
@pytest.mark.parametrize("is_mixture", [False, True])
def test_torchtitan_takes_the_data_and_the_checkpoints_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_mixture: bool
) -> None:
    from torchtitan.config import ConfigManager
    from torchtitan.hf_datasets.text_datasets import DATASETS

    (tmp_path / "rows.jsonl").write_text('{"text": "of a row"}\n')
    data = 'data.sources=[{path="rows.jsonl", weight=3}, {path="rows.jsonl"}]' if is_mixture else "data.path=rows.jsonl"
    stated = ("data.tokenizer=/models/llama3", "checkpoint.every_steps=70", "run.seed=7", "run.log_every=3", data)
    job = load_job(
        "quickstart", ("model.name=llama3-8b", "plan.zero=3", "plan.dp=8", "plan.tp=1", "plan.pp=1", *stated)
    )
    system = SYSTEMS["torchtitan"]
    assert system.run_files is not None
    files = system.run_files.write(job, tmp_path, 1.0)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("job_config", None)
    read: Any = ConfigManager().parse_args(arguments_of(files["run.sh"], "torchtitan.train"))
    assert (read.hf_assets_path, read.debug.seed, read.metrics.log_freq) == ("/models/llama3", 7, 3)
    assert (read.checkpoint.enable, read.checkpoint.interval) == (True, 70)
    assert read.checkpoint.folder == str(tmp_path / "runs" / "quickstart" / "torchtitan")
    loaders = read.dataloader.sources if is_mixture else [read.dataloader]
    assert [getattr(loader, "weight", None) for loader in loaders] == ([3.0, 1.0] if is_mixture else [None])
    for loader in loaders:
        known = DATASETS[loader.dataset]
        pytest.importorskip("datasets.load")
        assert [known.sample_processor(row) for row in known.loader(known.path)] == ["of a row"]


@in_python
@pytest.mark.usefixtures("with_triton", "with_float8")
@pytest.mark.parametrize("family", ["llama3", "qwen3", "deepseek_v3"])
def test_torchtitans_own_functions_are_read_as_they_run(family: str) -> None:
    registry = importlib.import_module(f"torchtitan.models.{family}.config_registry")
    path = str(registry.__file__)
    reader = Reader([source_of_text(path, Path(path).read_text(encoding="utf-8"))], {}, UNEXPANDED_FUNCTIONS, MAKERS)
    (source,) = reader.sources
    names = [
        name for name in source.functions if name.startswith(family) and "debug" not in name and "nvfp4" not in name
    ]
    assert len(names) >= 3
    for name in names:
        own, reference = config_of(reader.call(source, name, [], {}), name, family), getattr(registry, name)()
        assert not own.faults and set(own.unread) <= {"loss.loss_fn.global_vocab_size"} | {
            one for one in own.unread if one.startswith(_OF_REGISTRY)
        }
        for setting, value in own.given.items():
            if not setting.startswith(_OF_REGISTRY):
                assert _own(reference, setting) == value, (name, setting)


def test_axolotl_takes_every_export() -> None:
    pytest.importorskip("axolotl")
    numbers = set()
    for job in jobs_of(SYSTEMS["axolotl"], seed=5, count=NUM_EXPORTS):
        options = yaml.safe_load(exported(SYSTEMS["axolotl"], job).files["axolotl.yaml"])
        assert options.keys() <= axolotl_names()
        assert axolotl_values(options) == job_values(job) | {"accumulation": 1}  # which the file of DeepSpeed says
        assert "adam_epsilon" in options or job.optimizer.name in ("sgd", "adafactor")
        numbers.add(job.precision.compute)
    assert len(numbers) > 1


def test_llama_factory_takes_every_export() -> None:
    pytest.importorskip("llamafactory")
    for job in jobs_of(SYSTEMS["llamafactory"], seed=5, count=NUM_EXPORTS):
        options = yaml.safe_load(exported(SYSTEMS["llamafactory"], job).files["llamafactory.yaml"])
        assert llama_factory_values(options) == job_values(job) | {"accumulation": 1}


AXOLOTL = "base_model: x/y\ndatasets: [{path: letters, type: completion}]\nlearning_rate: 1.0e-4\nmax_steps: 30\n"
FACTORY = "model_name_or_path: x/y\nstage: sft\ndo_train: true\ndataset: letters\ntemplate: default\nmax_steps: 30\n"
READ_BY_BOTH = {
    "axolotl": (
        "", "fp16: true\n", "bf16: false\n", "bf16: true\nweight_decay: 0.1\nmax_grad_norm: 0.5\n",
        "sequence_len: 4096\nmicro_batch_size: 2\ngradient_accumulation_steps: 3\ngradient_checkpointing: true\n",
        "micro_batch_size: 2\nbatch_size: 8\n", "gradient_checkpointing: offload\nfloat16: true\n",
        "adapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\n",
        "adapter: qlora\nload_in_4bit: true\nlora_r: 32\nlora_alpha: 16\nlora_target_modules: [q_proj, v_proj]\n",
    ),
    "llamafactory": (
        "", "finetuning_type: full\ncutoff_len: 512\n", "finetuning_type: lora\nlora_rank: 4\nbf16: true\n",
        "quantization_bit: 4\nlora_alpha: 64\n", "disable_gradient_checkpointing: true\nlearning_rate: 1.0e-3\n",
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 3\nweight_decay: 0.1\nmax_grad_norm: 0.5\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("system", "options"), [(name, options) for name, many in READ_BY_BOTH.items() for options in many]
)
def test_files_mean_there_what_they_mean_here(system: str, options: str) -> None:
    """Beside their defaults, which are those of the classes."""
    pytest.importorskip(system)
    assert compared(system, {"axolotl": AXOLOTL, "llamafactory": FACTORY}[system] + options) == {}
