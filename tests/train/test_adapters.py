"""Adapters: trained as peft trains them, alike on any ranks; frozen weights are values alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.memory.job_memory import rank_memory
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.schedule.job_program import job_program
from shardwright.sharding.memory_account import RankMemory
from shardwright.sharding.mesh import MeshShape
from shardwright.train.build import Replica, build, job_mesh
from shardwright.train.checkpoint.starting_weights import initial_values, released_weights_of
from shardwright.train.train_step import train_step
from support.cases import made_up_tokens, small_job
from support.ranks import run_on_mesh

ALL = ("query", "key", "value", "out", "gate", "up", "down")
CPU = torch.device("cpu")


def job_of(
    targets: tuple[str, ...] = ALL, kind: str = "llama", precision: dict[str, Any] | None = None, **plan: Any
) -> JobSpec:
    fields = small_job(kind, batch=4, layers=2, **plan).model_dump()
    fields["model"]["adapter"] = {"rank": 4, "alpha": 8.0, "targets": targets}
    return make_job(fields | {"precision": precision or {}})


def few_steps(mesh: Mesh, job: JobSpec) -> tuple[list[float], RankMemory]:
    replica = build(job, mesh)
    share = job.batch.global_batch_size // job.plan.dp
    losses = [
        train_step(replica, step, made_up_tokens(job, step)[mesh.dp.index * share :][:share]).loss for step in range(4)
    ]
    return losses, replica.memory()


PLANS: dict[str, dict[str, Any]] = {
    "zero1": {"dp": 2, "zero": 1},
    "zero2": {"dp": 2, "zero": 2, "bucket_mib": 0.01},
    "zero3": {"dp": 2, "zero": 3},
    "tp2": {"tp": 2},
    "sp2": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "zero3 x sp2": {"dp": 2, "zero": 3, "tp": 2, "sequence_parallel": True},
    "cp2, recomputed": {"cp": 2, "recompute": "full"},
    "selective": {"tp": 2, "recompute": "selective"},
}


@pytest.mark.processes
@pytest.mark.parametrize("targets", [ALL, ("query", "value")], ids=["all", "query and value"])
@pytest.mark.parametrize("name", PLANS)
def test_ranks_train_as_one_rank_does_and_hold_what_is_predicted(name: str, targets: tuple[str, ...]) -> None:
    one, _ = few_steps(job_mesh(job_of(targets), 0, CPU), job_of(targets))
    job = job_of(targets, **PLANS[name])
    program = job_program(job)
    for rank, (losses, measured) in enumerate(run_on_mesh(job, few_steps, job)):
        assert losses == pytest.approx(one, rel=2e-6)
        place = MeshShape.of(job.plan).coordinates(rank)
        predicted = rank_memory(job, program, place["pp"], place["tp"])
        assert measured.parameters_bytes == predicted.parameters_bytes
        assert measured.gradients_bytes == predicted.gradients_bytes
        assert measured.optimizer_bytes == predicted.optimizer_bytes


# The modules of transformers' Llama whose adapters lie side by side in a matrix, and where they are.
MODULES = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
SETTINGS = {"learning_rate": 3e-3, "warmup_steps": 0, "schedule": "constant", "clip_grad_norm": 0.5, "epsilon": 1e-8}


def test_ten_steps_are_those_of_peft(tmp_path: Path) -> None:
    """Over a released model in float32 whose adapters begin alike: losses to 1e-6."""
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds, and most tests do without

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=61, max_position_embeddings=16))
    llama.save_pretrained(tmp_path)
    model = {"weights": str(tmp_path), "sequence": 16, "layers": 2, "hidden": 32, "heads": 8, "kv_heads": 4, "ffn": 48}
    model |= {"vocab": 61, "norm_epsilon": 1e-6, "longest_sequence": 16, "adapter": {"rank": 4, "alpha": 8.0}}
    job = make_job({"model": model, "batch": {"global_batch_size": 4}, "optimizer": SETTINGS})
    replica = build(job, job_mesh(job, 0, CPU), initial_values(job, released_weights_of(job)))
    targets = [module.split(".")[1] for modules in MODULES.values() for module in modules]
    adapted = peft.get_peft_model(llama, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    _copy_downs(replica, dict(adapted.named_parameters()))
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    betas = (job.optimizer.beta1, job.optimizer.beta2)
    plain = torch.optim.AdamW(trained, lr=3e-3, betas=betas, eps=1e-8, weight_decay=job.optimizer.weight_decay)
    for step in range(10):
        tokens = made_up_tokens(job, step)
        loss = torch.nn.functional.cross_entropy(adapted(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        plain.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        plain.step()
        assert train_step(replica, step, tokens).loss == pytest.approx(loss.item(), abs=1e-6)


def _copy_downs(replica: Replica, others: dict[str, Tensor]) -> None:
    """Copy each A of a replica to peft's parameters; every B begins as zeros."""
    downs = {p.place.name: p for unit in replica.shards[0].units for p in unit.parameters}
    with torch.no_grad():
        for layer in range(2):
            for matrix, modules in MODULES.items():
                for number, module in enumerate(modules):
                    name = f"base_model.model.model.layers.{layer}.{module}.lora_A.default.weight"
                    others[name].copy_(downs[f"layers.{layer}.{matrix}.adapter.a"][number])


def test_what_has_no_adapters_is_refused() -> None:
    for fields, words in (
        ({"rank": 0, "alpha": 8.0}, "its rank 0 means no adapters"),
        ({"rank": 4, "targets": []}, "names no map"),
    ):
        with pytest.raises(PlanError, match=words):
            make_job({"model": {"adapter": fields}})
    with pytest.raises(PlanError, match="for maps of dense layers, and model"):
        make_job({"model": {"adapter": {"rank": 4}, "mtp_layers": 1}})
