"""Short runs of jobs with adapters: against one rank, and in the bytes predicted."""

import pytest
import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.memory.job_memory import rank_memory
from shardwright.memory.step_collectives import ledger_table, step_ledger
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.schedule.job_program import job_program
from shardwright.sharding.memory_account import RankMemory
from shardwright.sharding.mesh import MeshShape
from shardwright.train.build import Replica, build, job_mesh
from shardwright.train.train_step import train_step
from support.cases import made_up_tokens
from support.ranks import run_on_mesh

Sent = dict[str, dict[str, int]]

# The modules of transformers' Llama whose adapters lie side by side in a matrix, and where they are.
MODULES = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}


def few_steps(mesh: Mesh, job: JobSpec) -> tuple[list[float], RankMemory, Sent]:
    """The losses of some steps, the memory after them, and the ledger of the last."""
    replica, losses = build(job, mesh), list[float]()
    share = job.batch.global_batch_size // job.plan.dp
    for step in range(4):
        mesh.ledger.clear()
        losses.append(train_step(replica, step, made_up_tokens(job, step)[mesh.dp.index * share :][:share]).loss)
    return losses, replica.memory(), mesh.ledger.table()


def check_equals_one_rank(job: JobSpec, on_one_rank: JobSpec) -> None:
    """The ranks of a job have the losses of the job on one rank, and hold and send what is predicted."""
    one, _, _ = few_steps(job_mesh(on_one_rank, 0, torch.device("cpu")), on_one_rank)
    program = job_program(job)
    for rank, (losses, measured, sent) in enumerate(run_on_mesh(job, few_steps, job)):
        assert losses == pytest.approx(one, rel=2e-6)
        assert _without_rows(sent) == _without_rows(ledger_table(step_ledger(job, program, rank)))
        place = MeshShape.of(job.plan).coordinates(rank)
        predicted = rank_memory(job, program, place["pp"], place["tp"])
        assert measured.parameters_bytes == predicted.parameters_bytes
        assert measured.gradients_bytes == predicted.gradients_bytes
        assert measured.optimizer_bytes == predicted.optimizer_bytes


def _without_rows(sent: Sent) -> Sent:
    """The collectives of a rank, without the bytes of rows for experts, which are predicted by their mean."""
    rows = "all_to_all_v ep"
    return {name: {"count": moved["count"]} if name == rows else moved for name, moved in sent.items()}


def copy_downs(replica: Replica, others: dict[str, Tensor]) -> None:
    """Copy each A of a replica to peft's parameters; every B begins as zeros."""
    downs = {p.place.name: p for unit in replica.shards[0].units for p in unit.parameters}
    with torch.no_grad():
        for layer in range(2):
            for matrix, modules in MODULES.items():
                for number, module in enumerate(modules):
                    name = f"base_model.model.model.layers.{layer}.{module}.lora_A.default.weight"
                    others[name].copy_(downs[f"layers.{layer}.{matrix}.adapter.a"][number])
