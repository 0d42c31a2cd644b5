"""The memory of a rank, predicted before the run and measured in it: equal to the byte."""

from typing import Any

import pytest
import torch

from fuzz.ledgers import account_of, differences, told_by_values
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.memory.job_memory import job_memory, rank_memory
from shardwright.memory.persistent_buffers import kept_bytes, staying_cast_bytes
from shardwright.memory.rank_state import rank_state
from shardwright.memory.step_collectives import step_ledger
from shardwright.memory.zero_replay import replay
from shardwright.model.decoder import DecoderStage, stage_span
from shardwright.parallel.comm.collectives import Axis
from shardwright.parallel.comm.ledger import Ledger
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.initial_values import seeded
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.parallel.zero.held_memory import measured_memory
from shardwright.parallel.zero.sharded_stage import ShardedStage
from shardwright.parallel.zero.tied_embedding import TiedEmbedding
from shardwright.parallel.zero.unit_setting import Sharding, StageSharding, UnitSetting, tensor_pool
from shardwright.schedule.job_program import job_program
from shardwright.sharding.memory_account import RankMemory
from shardwright.sharding.mesh import MeshShape
from shardwright.train.async_step import train_stream
from shardwright.train.build import build
from shardwright.train.train_step import train_step
from support.cases import made_up_tokens, of_replicas, ring_bytes, small_job
from support.ranks import leaves_nothing, run_on_mesh

CPU = torch.device("cpu")
NUMBERS = {"float32": torch.float32, "bf16": torch.bfloat16}


def with_precision(job: JobSpec, **precision: Any) -> JobSpec:
    return make_job(job.model_dump() | {"precision": precision})


def axis(size: int, index: int = 0) -> Axis:
    return Axis("dp", tuple(range(size)), index, None, Ledger(CPU), None)


def allocated(job: JobSpec, index: int) -> RankMemory:
    """The engine of one rank of dp, which nobody else is with, after an update of zeros."""
    stage = DecoderStage(job.model, stage_span(job.plan, job.model.layers, 0), LayerSharding.of_tp(axis(1)))
    numbers = NUMBERS[job.precision.compute], NUMBERS[job.precision.gradient_number]
    master = NUMBERS[job.precision.master_number]
    sharding = Sharding(job.plan.zero, axis(job.plan.dp, index), axis(1), axis(1), *numbers, numbers[1], master)
    pool = tensor_pool(CPU)
    regions = stage.prepare(CPU, numbers[0]).regions()
    shards = ShardedStage(regions, [], StageSharding(sharding, sharding), UnitSetting(job, pool, seeded(job.run.seed)))
    shards.make_optimizers()
    for unit in shards.units:
        unit.masters.step(torch.zeros(unit.layout.shard_size, dtype=master), 1.0, 0.0)
    return measured_memory({0: shards}, {}, TiedEmbedding(None, None, axis(1)), pool)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("gradients", ["compute", "float32"])
@pytest.mark.parametrize("moments", ["float32", "bf16"])
def test_sixteen_bytes_a_parameter_and_their_shards(moments: str, gradients: str, num_ranks: int) -> None:
    """Rajbhandari et al. 2020 (arXiv 1910.02054, section 3.1 and figure 1), with float32 gradients 18 bytes, and with
    moments in bf16 4 bytes less."""
    g, d, o = (2 if gradients == "compute" else 4), num_ranks, (12 if moments == "float32" else 8)
    whole, shard = {0: 2 + g + o, 1: 2 + g, 2: 2, 3: 0}, {0: 0, 1: o, 2: o + g, 3: 2 + g + o}
    numbers = {"compute": "bf16", "gradients": gradients, "moments": moments}
    for zero in range(4):
        job = with_precision(small_job(layers=4, dp=d, zero=zero, bucket_mib=0.01), **numbers)
        elements = rank_state(job, job_program(job), 0)[0].num_elements
        assert elements >= 34912  # of the model; the rest is padding
        assert elements % d == 0 or zero == 0
        expected = whole[zero] * elements + shard[zero] * elements // d
        (predicted,) = job_memory(job)
        assert predicted.state_bytes == expected
        for index in (0, d - 1):
            measured = allocated(job, index)
            assert measured.state_bytes == expected
            assert measured.parameters_bytes == predicted.parameters_bytes
            assert measured.gradients_bytes == predicted.gradients_bytes
            assert measured.optimizer_bytes == predicted.optimizer_bytes


@pytest.mark.parametrize("moments", ["float32", "bf16"])
def test_eight_bytes_a_parameter_without_masters(moments: str) -> None:
    """Weights, gradients and moments in bf16 and nothing else; with moments in float32 12 bytes."""
    o = 4 if moments == "bf16" else 8
    whole, shard = {0: 4 + o, 1: 4, 2: 2, 3: 0}, {0: 0, 1: o, 2: o + 2, 3: o + 4}
    numbers = {"compute": "bf16", "gradients": "compute", "moments": moments, "master": "none"}
    for zero in range(4):
        job = with_precision(small_job(layers=4, dp=2, zero=zero, bucket_mib=0.01), **numbers)
        elements = rank_state(job, job_program(job), 0)[0].num_elements
        (predicted,) = job_memory(job)
        assert predicted.state_bytes == whole[zero] * elements + shard[zero] * elements // 2
        measured = allocated(job, 1)
        assert measured.parameters_bytes == predicted.parameters_bytes
        assert measured.gradients_bytes == predicted.gradients_bytes
        assert measured.optimizer_bytes == predicted.optimizer_bytes


def pool_bytes(job: JobSpec, pp_rank: int, tp_index: int) -> int:
    """The most that a rank borrows for ZeRO, by the replay of a step."""
    program = job_program(job)
    return replay(job, program, pp_rank, rank_state(job, program, pp_rank, tp_index)).pool_bytes


@leaves_nothing
def account_of_steps(mesh: Mesh, job: JobSpec) -> tuple[RankMemory, dict[str, dict[str, int]]]:
    """The memory that a rank has allocated after some steps, and its traffic in the last one."""
    replica = build(job, mesh)
    share = job.batch.global_batch_size // job.plan.dp
    for step in range(2):
        mesh.ledger.clear()
        train_step(replica, step, made_up_tokens(job, step)[mesh.dp.index * share :][:share])
    return replica.memory(), mesh.ledger.table()


PLANS: dict[str, dict[str, Any]] = {
    "zero0": {"dp": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero2": {"dp": 2, "zero": 2, "bucket_mib": 0.01},
    "zero3": {"dp": 2, "zero": 3},
    "one-microbatch": {"dp": 2, "zero": 3, "batch": 2},
    "one-microbatch-zero2": {"dp": 2, "zero": 2, "batch": 2, "bucket_mib": 0.01},
    "pp2": {"dp": 2, "pp": 2, "zero": 3},
    "embedding-alone": {"dp": 2, "pp": 2, "zero": 3, "layout": [0, 4]},
    "zb-v": {"dp": 2, "pp": 2, "zero": 3, "schedule": "zb-v"},
    "zb-h1": {"dp": 2, "pp": 2, "zero": 2, "schedule": "zb-h1", "bucket_mib": 0.01},
    "dualpipe": {"pp": 2, "zero": 1, "schedule": "dualpipe"},
    "sp2": {"dp": 2, "tp": 2, "zero": 3, "sequence_parallel": True, "microbatch_size": 2},
    "layers-again": {"dp": 2, "pp": 2, "zero": 3, "recompute": "full"},
    "stages-again": {"dp": 2, "pp": 2, "zero": 3, "recompute": "stage"},
    "offloaded": {"dp": 2, "zero": 3, "offload_optimizer": 0.5, "offload_parameters": True},
    "int8": {"dp": 2, "zero": 2, "compress": "int8"},
    "hybrid": {"dp": 4, "zero": 3, "zero_ranks": 2},
    "hybrid-zero1": {"dp": 4, "zero": 1, "zero_ranks": 2},
    "stages-inside": {"dp": 2, "pp": 2, "zero": 3, "order": "pp-dp"},
}
MIXED = {"compute": "bf16", "gradients": "compute"}
HALF_STATE = MIXED | {"moments": "bf16"}
NO_MASTERS = HALF_STATE | {"master": "none"}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("kind", "precision"),
    [("llama", HALF_STATE), ("gpt-tied", {}), ("llama", NO_MASTERS)],
    ids=["llama-bf16", "gpt-tied", "llama-no-masters"],
)
def test_predicted_is_measured(kind: str, precision: dict[str, str], plan: str) -> None:
    """Parameters, gradients, optimizer state, the pool's peak, and every collective."""
    plan_fields = PLANS[plan]
    if precision == NO_MASTERS and plan == "offloaded":  # the host updates master weights alone
        plan_fields = {name: value for name, value in plan_fields.items() if not name.startswith("offload")}
    job = with_precision(small_job(kind, **({"batch": 8} | plan_fields)), **precision)
    program = job_program(job)
    for rank, (measured, table) in enumerate(run_on_mesh(job, account_of_steps, job)):
        place = MeshShape.of(job.plan).coordinates(rank)
        predicted = rank_memory(job, program, place["pp"], place["tp"])
        assert measured.parameters_bytes == predicted.parameters_bytes
        assert measured.gradients_bytes == predicted.gradients_bytes
        assert measured.optimizer_bytes == predicted.optimizer_bytes
        assert measured.host_bytes == predicted.host_bytes
        kept = kept_bytes(job, rank_state(job, program, place["pp"], place["tp"]))
        assert measured.buffers_bytes == pool_bytes(job, place["pp"], place["tp"]) + kept
        ledger = step_ledger(job, program, rank)
        assert table == {name: {"count": t.calls, "bytes": t.payload_bytes} for name, t in ledger.items()}


KEPT: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "delayed": ({}, {"float8": "delayed"}),
    "rowwise-tp2": ({"tp": 2, "zero": 2}, {"float8": "rowwise"}),
    "blockwise-pp2": ({"pp": 2, "zero": 1}, {"float8": "blockwise"}),
    "experts-blockwise": ({"ep": 2, "zero": 1}, {"float8": "blockwise"}),
    "experts-rowwise": ({"ep": 2, "tp": 2, "zero": 2}, {"float8": "rowwise"}),
    "experts-delayed": ({"ep": 2}, {"float8": "delayed"}),
    "experts-of-one-rank": ({"ep": 2, "tp": 2, "zero": 3}, {"float8": "tensorwise"}),
    "experts-of-one-rank-by-row": ({"ep": 2, "tp": 2, "zero": 3}, {"float8": "rowwise"}),
    "int8": ({"compress": "int8", "compress_least": 100}, {}),
    "int8-zero2": ({"compress": "int8", "compress_least": 100, "zero": 2, "bucket_mib": 0.01}, {}),
    "powersgd": ({"compress": "powersgd", "compress_rank": 2, "compress_least": 100, "zero": 1}, {}),
    "topk": ({"compress": "topk", "compress_least": 1000}, {}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", KEPT)
def test_what_stays_beside_the_state(name: str) -> None:
    """Casts of weights to fp8, and what compression keeps of its errors. And what casting moves, which is by how long
    a cast stays: that of gathered weights goes with them, and that of experts which no replica shares stays."""
    plan, precision = KEPT[name]
    kind = "latent" if name == "rowwise-tp2" else "deepseek" if name.startswith("experts") else "llama"
    job = with_precision(small_job(kind, **({"dp": 2, "batch": 4, "compress_least": 10**6} | plan)), **precision)
    by_values = told_by_values(job)
    for rank, (measured, table) in enumerate(run_on_mesh(job, account_of_steps, job)):
        place = MeshShape.of(job.plan).coordinates(rank)
        held = rank_state(job, job_program(job), place["pp"], place["tp"])
        kept = kept_bytes(job, held)
        if job.plan.zero == 3:
            assert staying_cast_bytes(job, held) < kept
            kept = staying_cast_bytes(job, held)
        assert kept > 1000
        assert measured.buffers_bytes == pool_bytes(job, place["pp"], place["tp"]) + kept
        assert differences(account_of(job, job_program(job), rank), table, by_values) == []


def test_classic_volumes() -> None:
    """Without ZeRO and in stages 1 and 2 a rank sends 2P (d - 1) / d; in stage 3 3P, less what need not be gathered."""
    ranks = {"dp": 4}
    loss = 8 * 2 * 3 / 4  # a float64
    for zero, passes in enumerate((2, 2, 2, 3)):
        job = small_job(dp=4, zero=zero, batch=4)
        stage = rank_state(job, job_program(job), 0)[0]
        num_bytes = 4 * stage.num_elements
        expected = passes * num_bytes * 3 / 4
        if zero == 3:
            sizes = [4 * unit.layout.size for unit in stage.units]
            expected -= (sizes[0] + sizes[-1]) * 3 / 4  # the embedding's and the head's second gather
        sent = ring_bytes(of_replicas(step_ledger(job, job_program(job), 0)), ranks)
        assert sent == expected + loss


@leaves_nothing
def run_of_stream(mesh: Mesh, job: JobSpec) -> tuple[RankMemory, RankMemory]:
    replica = build(job, mesh)
    steps = job.optimizer.steps
    train_stream(replica, job_program(job, steps), 0, lambda n: made_up_tokens(job, n))
    return replica.memory(), job_memory(job)[mesh.pp.index]


@pytest.mark.parametrize("compute", ["float32", "bf16"])
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_versions_of_the_weights(schedule: str, compute: str) -> None:
    fields = small_job(pp=2, schedule="gpipe", batch=4).model_dump()
    fields["plan"]["schedule"] = schedule
    fields["optimizer"] |= {"clip_grad_norm": 0.0, "steps": 6}
    job = make_job(fields | {"precision": {"compute": compute}})
    for measured, predicted in run_on_mesh(job, run_of_stream, job):
        assert measured.parameters_bytes == predicted.parameters_bytes
        assert measured.gradients_bytes == predicted.gradients_bytes
        assert measured.optimizer_bytes == predicted.optimizer_bytes
