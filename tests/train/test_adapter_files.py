"""Files of adapters: as peft names them, read back, and never beside other weights than those they belong to."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import job_of_fields, make_job
from shardwright.train.build import Replica, build, job_mesh
from shardwright.train.checkpoint.kept import manifest_of
from shardwright.train.checkpoint.other_job import refuse_other_model
from shardwright.train.checkpoint.released_export import export_released, has_family
from shardwright.train.checkpoint.starting_weights import initial_values, released_weights_of
from shardwright.train.checkpoint.storage import open_storage
from shardwright.train.checkpoint.writing import CheckpointWriter
from shardwright.train.train_step import train_step
from support.cases import made_up_tokens

CPU, STEPS = torch.device("cpu"), 3
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 4, "vocab_size": 61, "max_position_embeddings": 16}  # fmt: skip
# Sizes of one layer's tensors as peft 0.21 writes them for these maps.
PREFIX = "base_model.model.model.layers.0"
SHAPES = {
    f"{PREFIX}.self_attn.q_proj.lora_A.weight": (4, 32), f"{PREFIX}.self_attn.q_proj.lora_B.weight": (32, 4),
    f"{PREFIX}.self_attn.k_proj.lora_A.weight": (4, 32), f"{PREFIX}.self_attn.k_proj.lora_B.weight": (16, 4),
    f"{PREFIX}.mlp.gate_proj.lora_A.weight": (4, 32), f"{PREFIX}.mlp.gate_proj.lora_B.weight": (48, 4),
    f"{PREFIX}.mlp.down_proj.lora_A.weight": (4, 48), f"{PREFIX}.mlp.down_proj.lora_B.weight": (32, 4),
}  # fmt: skip
TARGETS = ["query", "key", "gate", "down"]


def released(family: str, folder: Path, seed: int = 0) -> Any:
    """A small model of a family of transformers, and its folder."""
    import transformers  # seconds, and most tests do without

    torch.manual_seed(seed)
    names = {"llama": "Llama", "ernie4_5": "Ernie4_5"}
    config = getattr(transformers, f"{names[family]}Config")(**SIZES, tie_word_embeddings=False)
    model = getattr(transformers, f"{names[family]}ForCausalLM")(config)
    model.save_pretrained(folder)
    return model


def job_of(folder: Path, **adapter: Any) -> JobSpec:
    fields = {"rank": 4, "alpha": 8.0, "targets": TARGETS} | adapter
    optimizer = {"learning_rate": 3e-2, "warmup_steps": 0, "schedule": "constant"}
    model = {"weights": str(folder), "sequence": 16, "adapter": fields}
    fields = {"model": model, "batch": {"global_batch_size": 4}, "optimizer": optimizer}
    return job_of_fields(fields, [], "a job with adapters")


def begun(job: JobSpec) -> Replica:
    return build(job, job_mesh(job, 0, CPU), initial_values(job, released_weights_of(job)))


def trained(job: JobSpec, folder: Path) -> float:
    """Train some steps and save. Returns the loss of the next step."""
    replica = begun(job)
    for step in range(STEPS):
        train_step(replica, step, made_up_tokens(job, step))
    writer = CheckpointWriter(job, replica, job_mesh(job, 0, CPU), folder)
    writer.save(STEPS, STEPS * 4, 0, {})
    writer.wait()
    return train_step(replica, STEPS, made_up_tokens(job, STEPS)).loss


def exported(folder: Path) -> Path:
    storage = open_storage(str(folder / "checkpoints"))
    export_released(storage, manifest_of(storage, STEPS), folder / "out", file_bytes=2**30)
    return folder / "out"


def loss_of(model: Any, tokens: Tensor) -> float:
    with torch.no_grad():
        return cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


def merge(model: Any, tensors: dict[str, Tensor], scale: float) -> None:
    """Add scale x B A to each map of a model."""
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up = tensors[name.replace("lora_A", "lora_B")]
            model.get_submodule(module).weight.data.add_(scale * up @ down)


@pytest.mark.parametrize("family", ["llama", "ernie4_5"])
def test_what_is_exported_is_what_was_trained_and_begins_a_run(family: str, tmp_path: Path) -> None:
    """Beside transformers' own model, whose pairs of rotary elements are neighbours in one family."""
    model = released(family, tmp_path / "base")
    job = job_of(tmp_path / "base")
    loss, tokens = trained(job, tmp_path), made_up_tokens(job, STEPS)
    folder = exported(tmp_path)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert {name: tuple(values.shape) for name, values in tensors.items() if name.startswith(PREFIX)} == SHAPES
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert abs(loss_of(model, tokens) - loss) > 1e-3  # the adapters matter
    merge(model, tensors, 8 / 4)
    assert loss == pytest.approx(loss_of(model, tokens), abs=1e-5)
    again = begun(job_of(tmp_path / "base", weights=str(folder)))
    assert train_step(again, STEPS, tokens).loss == pytest.approx(loss, abs=1e-6)


def test_peft_opens_what_is_exported_and_its_own_files_begin_a_run(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not among the wheels that tests are installed from")
    model = released("llama", tmp_path / "base")
    job = job_of(tmp_path / "base")
    loss, tokens = trained(job, tmp_path), made_up_tokens(job, STEPS)
    adapted = peft.PeftModel.from_pretrained(model, exported(tmp_path))
    assert loss_of(adapted, tokens) == pytest.approx(loss, abs=1e-5)
    adapted.save_pretrained(tmp_path / "theirs")
    again = begun(job_of(tmp_path / "base", weights=str(tmp_path / "theirs")))
    assert train_step(again, STEPS, tokens).loss == pytest.approx(loss, abs=1e-6)


def test_adapters_of_another_kind_do_not_begin_a_run(tmp_path: Path) -> None:
    released("llama", tmp_path / "base")
    trained(job_of(tmp_path / "base"), tmp_path)
    folder = exported(tmp_path)
    keys = json.loads((folder / "adapter_config.json").read_text())
    for changes, adapter, words in (
        ({}, {"rank": 8}, "its r is 4, and model.adapter.rank 8"),
        ({}, {"alpha": 16.0}, "its lora_alpha is 8, and model.adapter.alpha 16"),
        ({}, {"targets": ["query"]}, "of maps that are no targets"),
        ({}, {"targets": [*TARGETS, "up"]}, "it has no base_model"),
        ({"use_rslora": True}, {}, "use_rslora is True"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(keys | changes))
        with pytest.raises(PlanError, match=words):
            begun(job_of(tmp_path / "base", weights=str(folder), **adapter))


def test_a_checkpoint_of_adapters_belongs_to_its_weights_alone(tmp_path: Path) -> None:
    released("llama", tmp_path / "base")
    released("llama", tmp_path / "moved")
    released("llama", tmp_path / "other", seed=1)
    trained(job_of(tmp_path / "base"), tmp_path)
    storage = open_storage(str(tmp_path / "checkpoints"))
    manifest = manifest_of(storage, STEPS)
    refuse_other_model(manifest, job_of(tmp_path / "moved"), storage, weights_alone=False)
    for is_alone in (False, True):
        with pytest.raises(PlanError, match="trained beside the weights of"):
            refuse_other_model(manifest, job_of(tmp_path / "other"), storage, weights_alone=is_alone)


def test_adapters_of_random_weights_belong_to_their_seed_and_are_no_files_of_peft(tmp_path: Path) -> None:
    model = {"layers": 2, "hidden": 32, "heads": 8, "sequence": 16, "vocab": 61, "adapter": {"rank": 4}}
    fields: dict[str, Any] = {"model": model, "batch": {"global_batch_size": 4}}
    trained(make_job(fields), tmp_path)
    storage = open_storage(str(tmp_path / "checkpoints"))
    manifest = manifest_of(storage, STEPS)
    assert not has_family(manifest)
    with pytest.raises(PlanError, match="beside random weights"):
        exported(tmp_path)
    with pytest.raises(PlanError, match="beside random weights of run"):
        refuse_other_model(manifest, make_job(fields | {"run": {"seed": 1}}), storage, weights_alone=False)
