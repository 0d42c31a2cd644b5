"""Metrics that a run writes of its steps: the loss scale, steps that were left out, and what compression saved."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from shardwright.config import catalog
from shardwright.config.cluster import DeviceSpec
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.phrase import below, started_processes_speak
from shardwright.config.plan import PlanSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.report.expert_use import read_use
from shardwright.sharding.compression import reduced_bucket, wire_bytes
from shardwright.sharding.memory_account import RankMemory
from shardwright.sharding.mesh import MeshShape
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.train.build import build
from shardwright.train.metrics import MetricsLog
from shardwright.train.router_update import LayerRouting
from shardwright.train.step_metrics import MeasuredStep, Shares, job_peak_flops, measure_shares
from shardwright.train.steps_measured import predicted_lines
from shardwright.train.train_step import StepResult
from shardwright.train.trainer import train
from support.cases import small_job
from support.languages import differing, num_chinese
from support.ranks import run_on_mesh

STEPS = 3
ROUTING = (
    LayerRouting(1, (6, 2), 0.25, 0.0, 0.5, 0.0, 0.0, None),
    LayerRouting(3, (4, 4), 0.0, 0.0, 0.6, 0.0, 0.0, None),
)


def job_on_text(tmp_path: Path, plan: dict[str, Any], precision: dict[str, Any], kind: str = "llama") -> JobSpec:
    """A small model that reads bytes."""
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 40)
    fields = small_job(kind, batch=4, layers=2, **plan).model_dump()
    fields["model"]["vocab"] = 256
    fields["precision"] |= precision
    fields["data"]["path"] = str(tmp_path / "text.txt")
    fields["optimizer"]["steps"] = STEPS
    fields["run"] |= {"eval_batches": 1, "log_every": 1}
    return make_job(fields)


def train_and_count(mesh: Mesh, job: JobSpec, folder: Path) -> list[list[ParameterShard]]:
    """Train. Returns what is in each bucket of this rank."""
    train(job, mesh, folder)
    units = [unit for shards in build(job, mesh).shards.values() for unit in shards.units]
    return [[p.place for p in unit.parameters] for unit in units]


def steps_in(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are of training steps."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def test_skipped_steps_and_saved_bytes_are_written(tmp_path: Path) -> None:
    """In a pipeline of two stages on two replicas: what is saved is summed over the stages, each counted once."""
    plan = {"dp": 2, "pp": 2, "compress": "bf16", "compress_least": 256}
    job = job_on_text(tmp_path, plan, {"compute": "fp16", "loss_scale": 2.0**23})
    ranks = run_on_mesh(job, train_and_count, job, tmp_path)
    steps = steps_in(tmp_path)
    assert len(steps) == STEPS
    assert steps[0]["skipped"] and steps[0]["grad_norm"] is None
    assert (steps[0]["skipped_because"], steps[0]["num_skipped"], steps[0]["num_spikes"]) == ("overflow", 1, 0)
    assert [step["loss_scale"] for step in steps[:2]] == [2.0**23, 2.0**22]
    buckets = [places for rank in ranks for places in rank]
    plain, sent = (sum(wire_bytes(reduced_bucket(p, b, 2), 2) for b in buckets) for p in (PlanSpec(), job.plan))
    saved = (plain - sent) // 2  # both replicas have listed their buckets
    assert saved > 0
    assert [step["compression_bytes_saved"] for step in steps] == [saved] * STEPS


def test_losses_of_further_tokens_are_told(tmp_path: Path) -> None:
    job = job_on_text(tmp_path, {}, {})
    job = job.model_copy(update={"model": job.model.model_copy(update={"mtp_layers": 2})})
    run_on_mesh(job, train_and_count, job, tmp_path)
    for step in steps_in(tmp_path):
        assert len(step["mtp_losses"]) == 2
        assert all(loss == pytest.approx(step["loss"], rel=0.5) for loss in step["mtp_losses"])


def test_what_does_not_apply_is_null(tmp_path: Path) -> None:
    job = job_on_text(tmp_path, {}, {})
    run_on_mesh(job, train_and_count, job, tmp_path)
    for step in steps_in(tmp_path):
        assert (step["loss_scale"], step["skipped"], step["compression_bytes_saved"]) == (None, False, None)
        assert step["mtp_losses"] is None


@pytest.mark.parametrize(
    ("plan", "result", "saved_bytes", "words"),
    [
        ({}, StepResult(1.0, 2.0, 3e-3), 0, ""),
        ({}, StepResult(1.0, 2.0, 3e-3, 4096.0), 0, "scale 4096  "),
        ({}, StepResult(1.0, 2.0, 3e-3, mtp_losses=(3.25, 4.0)), 0, "further 3.250 4.000  "),
        ({}, StepResult(1.0, None, 3e-3, 65536.0, True), 0, "scale 65536  skipped: gradients overflowed  "),
        ({"compress": "bf16"}, StepResult(1.0, 2.0, 3e-3), 3 << 20, "compression saved 3.00 MiB  "),
        ({}, StepResult(1.0, 2.0, 3e-3, routing=ROUTING), 0, "busiest expert 1.50 x mean, 12.5 % dropped  "),
    ],
)
def test_the_progress_line_shows_what_applies(
    tmp_path: Path, plan: dict[str, Any], result: StepResult, saved_bytes: int, words: str
) -> None:
    job = job_on_text(tmp_path, plan, {})
    out = StringIO()
    log = run_on_mesh(job, lambda mesh: MetricsLog(job, mesh, tmp_path, out=out))[0]
    log.step(MeasuredStep(1, result, 1.0, Shares(1.0, 0.0, 0.0, 2**20, saved_bytes)))
    log.close()
    assert f"lr 3.00e-03  {words}{job.tokens_per_step} tok/s" in out.getvalue()


def test_lines_of_a_run_have_the_same_numbers_in_chinese(tmp_path: Path) -> None:
    job = job_on_text(tmp_path, {}, {})
    memory, lines = RankMemory(2**20, 2**21, 2**22, 2**23, 2**24), {}
    for language in ("en", "zh"):
        out = StringIO()
        with started_processes_speak(language):
            log = run_on_mesh(job, lambda mesh, out=out: MetricsLog(job, mesh, tmp_path, out=out))[0]
            result = StepResult(3.0, 1.5, 3e-3, routing=ROUTING)
            log.step(MeasuredStep(1, result, 1.0, Shares(0.5, 0.25, 0.25, 2**20, 2**20)))
            log.memory([replace(memory, parameters_bytes=2**19)], [memory])
            for line in (*predicted_lines([memory]), below(MeshShape.of(job.plan).lines())):
                log.tell(line)
            log.close()
        lines[language] = out.getvalue()
    assert not differing(lines["en"], lines["zh"])
    for words in ("第 1/3 步  损失 3.0000  梯度 1.500  学习率 3.00e-03  最忙的专家", "网格 pp 1 x dp 1", "剩余 0:02"):
        assert words in lines["zh"]
    assert "持有：参数 1.0 MiB、预测 0.5 MiB、" in lines["zh"] and "将占 31.0 MiB（参数 1.0 MiB" in lines["zh"]
    assert "step 1/3  loss 3.0000" in lines["en"] and not num_chinese(lines["en"])


def sent_by_hand(mesh: Mesh) -> Shares:
    """Two steps: each rank sends 10 bytes to each other rank for experts and 1 to the next for gradients."""
    others = {rank: 10 for rank in range(4) if rank != mesh.rank}
    mesh.ledger.clear()
    for _ in range(2):
        mesh.ledger.record("all_to_all_v", "ep", 30, others)
        mesh.ledger.record("all_reduce", "dp", 1, {(mesh.rank + 1) % 4: 1})
    return measure_shares(mesh, 1.0, num_steps=2)


def test_bytes_of_all_ranks_are_told_by_kind_of_link() -> None:
    job = small_job(dp=4)
    assert {shares.sent_bytes for shares in run_on_mesh(job, sent_by_hand)} == {None}
    two_nodes = job.cluster.model_copy(update={"devices_per_node": 2, "nodes": 2})
    (shares,) = set(run_on_mesh(job.model_copy(update={"cluster": two_nodes}), sent_by_hand))
    # Of 4 x 3 messages for experts one of three stays inside; of the ring 0 to 1 and 2 to 3.
    assert shares.sent_bytes == (40 + 2, 80 + 2, 40, 80)


def test_experts_are_told(tmp_path: Path) -> None:
    """Every step how each layer used them, and who was chosen together where there is a progress line."""
    job = job_on_text(tmp_path, {"pp": 2, "ep": 2, "dp": 2}, {}, "switch")
    run_on_mesh(job, train_and_count, job, tmp_path)
    steps = steps_in(tmp_path)
    assert len(steps) == STEPS
    for step in steps:
        (layer,) = step["experts"]
        assert layer["layer"] == 1
        assert sum(layer["load"]) == job.tokens_per_step
        assert layer["together"] == [[0] * 4] * 4  # of one expert a token
        assert layer["largest_load"] == max(layer["load"]) * 4 / job.tokens_per_step
    board = next((tmp_path / "tensorboard").iterdir()).read_bytes()
    assert b"experts/layer 1/dropped_share" in board
    (layer,) = read_use(tmp_path).layers
    assert layer.loads == [step["experts"][0]["load"] for step in steps]


@pytest.mark.parametrize(
    ("device", "precision", "tflops"),
    [
        ("h100-sxm", {}, 66.9),
        ("h100-sxm", {"compute": "bf16"}, 989.4),
        ("h100-sxm", {"compute": "fp16"}, 989.4),
        ("h100-sxm", {"compute": "bf16", "float8": "rowwise"}, 1978.9),
        ("a100-sxm-80g", {"compute": "bf16", "float8": "rowwise"}, 312.0),  # emulated: it has no fp8 products
    ],
)
def test_mfu_is_over_the_peak_of_the_products(device: str, precision: dict[str, Any], tflops: float) -> None:
    job = make_job({"plan": {"dp": 2}, "batch": {"global_batch_size": 8}, "precision": precision})
    spec = DeviceSpec(**catalog.read("devices", device))
    assert job_peak_flops(job, spec) == pytest.approx(2e12 * tflops)


def test_no_peak_is_guessed() -> None:
    spec = DeviceSpec(name="new", memory_gib=1.0, peak_tflops={"float32": 10.0})
    assert job_peak_flops(make_job({"precision": {"compute": "bf16"}}), spec) is None
