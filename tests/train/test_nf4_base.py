"""Adapters beside matrices in NF4 (QLoRA): trained as beside the numbers that these are, alike on any ranks, and in the
bytes predicted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import job_of_fields, make_job
from shardwright.config.nf4_rows import Nf4Row
from shardwright.parallel.tensor.initial_values import initial_box
from shardwright.precision.nf4 import dequantise, quantise
from shardwright.train.build import build, job_mesh
from shardwright.train.checkpoint.kept import manifest_of, steps_kept
from shardwright.train.checkpoint.other_job import refuse_other_model
from shardwright.train.checkpoint.starting_weights import initial_values, released_weights_of
from shardwright.train.checkpoint.storage import open_storage
from shardwright.train.train_step import train_step
from support.adapted_runs import check_equals_one_rank
from support.cases import made_up_tokens
from support.going_on import go_on, save_and_go_on
from support.ranks import run_on_mesh

CPU = torch.device("cpu")
SETTINGS = {"learning_rate": 3e-3, "warmup_steps": 0, "schedule": "constant", "clip_grad_norm": 0.5, "epsilon": 1e-8}


def job_of(is_double: bool = False, adapter: dict[str, Any] | None = None, **plan: Any) -> JobSpec:
    model = {"layers": 2, "hidden": 64, "heads": 8, "kv_heads": 2, "head_dim": 16, "ffn": 256, "vocab": 61}
    base = {"rank": 4, "alpha": 8.0, "base": "nf4", "double_quantization": is_double}
    model |= {"sequence": 16, "adapter": base | (adapter or {})}
    return make_job({"model": model, "batch": {"global_batch_size": 4}, "plan": plan, "optimizer": SETTINGS})


PLANS: dict[str, dict[str, Any]] = {
    "zero1": {"dp": 2, "zero": 1},
    "zero2": {"dp": 2, "zero": 2, "bucket_mib": 0.01},
    "zero3": {"dp": 2, "zero": 3},
    "tp2": {"tp": 2},
    "zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "zero3 x sp2, recomputed": {"dp": 2, "zero": 3, "tp": 2, "sequence_parallel": True, "recompute": "full"},
    "offloaded": {"dp": 2, "zero": 3, "offload_optimizer": 0.5, "offload_parameters": True},
}


@pytest.mark.sampled(5)
@pytest.mark.processes
@pytest.mark.parametrize("is_double", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize("name", PLANS)
def test_ranks_train_as_one_rank_does_and_hold_and_send_what_is_predicted(name: str, is_double: bool) -> None:
    check_equals_one_rank(job_of(is_double, **PLANS[name]), job_of(is_double))


def test_matrices_of_layers_alone_are_in_nf4_with_the_values_of_its_levels() -> None:
    job = job_of(is_double=True)
    replica, names = build(job, job_mesh(job, 0, CPU)), list[str]()
    for parameter in (p for unit in replica.shards[0].units for p in unit.parameters):
        drawn = initial_box(parameter.place, job.run.seed, CPU)
        if (row := parameter.place.nf4_row) is not None:
            names.append(parameter.place.name.split(".", 2)[2])
            drawn = dequantise(quantise(drawn.flatten(0, -2), row), row, torch.float32).view(drawn.shape)
        assert torch.equal(parameter.box_values(), drawn)
    assert sorted(names) == sorted(
        2 * ["attention.qkv.weight", "attention.out.weight", "mlp.up.weight", "mlp.down.weight"]
    )


@pytest.mark.processes
def test_a_run_goes_on_under_another_plan_with_the_base_of_its_weights(tmp_path: Path) -> None:
    """A checkpoint has the adapters alone: each plan quantises its parts of the base again, to the same bits."""
    before, after = job_of(is_double=True, dp=2, zero=3), job_of(is_double=True, tp=2)
    (losses, boxes), _ = run_on_mesh(before, save_and_go_on, before, tmp_path)
    assert all(".adapter." in name for name in boxes)
    for went_on, _ in run_on_mesh(after, go_on, after, tmp_path):
        assert went_on == pytest.approx(losses, rel=2e-6)
    manifest = manifest_of(storage := open_storage(str(tmp_path / "checkpoints")), steps_kept(storage)[-1])
    for adapter in ({"base": "compute", "double_quantization": False}, {"double_quantization": False}):
        with pytest.raises(PlanError, match=r"its model\.adapter is"):
            refuse_other_model(manifest, job_of(is_double=True, adapter=adapter), storage, weights_alone=False)


def released_in_nf4(folder: Path) -> tuple[Any, JobSpec]:
    """A small Llama of transformers whose matrices of layers have the values of NF4, and a job that begins with the
    model as it was."""
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds, and most tests do without

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=61, max_position_embeddings=16))
    llama.save_pretrained(folder)
    for name, parameter in llama.named_parameters():
        if name.endswith("proj.weight"):
            row = Nf4Row(0, parameter.shape[1], parameter.shape[1], is_double=False)
            parameter.data = dequantise(quantise(parameter.data, row), row, torch.float32)
    adapter = {"rank": 4, "alpha": 8.0, "targets": ["query", "value"], "base": "nf4"}
    model = {"weights": str(folder), "sequence": 16, "adapter": adapter}
    fields = {"model": model, "batch": {"global_batch_size": 4}, "optimizer": SETTINGS}
    return llama, job_of_fields(fields, [], "a job beside NF4")


def test_ten_steps_are_those_of_a_model_whose_matrices_have_the_values_of_nf4(tmp_path: Path) -> None:
    """Plain LoRA, written out over transformers' Llama: losses to 1e-6."""
    llama, job = released_in_nf4(tmp_path)
    replica = build(job, job_mesh(job, 0, CPU), initial_values(job, released_weights_of(job)))
    downs = {p.place.name: p for unit in replica.shards[0].units for p in unit.parameters}
    trained = list[Tensor]()
    for number, layer in enumerate(llama.model.layers):
        a = downs[f"layers.{number}.attention.qkv.adapter.a"].detach().clone()
        for module, down in ((layer.self_attn.q_proj, a[0]), (layer.self_attn.v_proj, a[1])):
            trained += _adapt(module, down, scale=8.0 / 4)
    plain = torch.optim.AdamW(trained, lr=3e-3, betas=(job.optimizer.beta1, job.optimizer.beta2), eps=1e-8)
    for group in plain.param_groups:
        group["weight_decay"] = job.optimizer.weight_decay
    for step in range(10):
        tokens = made_up_tokens(job, step)
        loss = torch.nn.functional.cross_entropy(llama(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        plain.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        plain.step()
        assert train_step(replica, step, tokens).loss == pytest.approx(loss.item(), abs=1e-6)


def _adapt(module: torch.nn.Linear, down: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Add a low-rank product to a linear map, as torch computes it. Returns its factors."""
    a, b = down.clone().requires_grad_(), torch.zeros(module.out_features, len(down), requires_grad=True)
    module.register_forward_hook(lambda _, inputs, y: y + scale * (inputs[0] @ a.t() @ b.t()))
    return a, b
