"""Optimizers: each is its paper's, on one rank, and under every plan what one rank does; in account and checkpoint."""

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.model_shape import shape_of
from shardwright.config.optimizer import OptimizerSpec
from shardwright.measure.dryrun import dry_run
from shardwright.memory.job_memory import rank_memory
from shardwright.memory.persistent_buffers import kept_bytes
from shardwright.memory.rank_state import rank_state
from shardwright.memory.step_collectives import ledger_table, step_ledger
from shardwright.memory.zero_replay import replay
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.optimizers.elementwise import make_optimizer
from shardwright.parallel.optimizers.muon import orthogonalise
from shardwright.parallel.zero.flat_unit import FlatUnit
from shardwright.schedule.job_program import job_program
from shardwright.sharding.memory_account import RankMemory
from shardwright.sharding.mesh import MeshShape
from shardwright.sharding.optimizer_state import is_by_matrix, is_matrix
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.sharding.update_matrices import update_matrices
from shardwright.train.build import Replica, build, job_mesh
from shardwright.train.checkpoint.boxes import HeldBox
from shardwright.train.checkpoint.resuming import begin
from shardwright.train.checkpoint.saved_state import SavedState
from shardwright.train.checkpoint.writing import CheckpointWriter
from shardwright.train.train_step import train_step
from support.cases import against_one_rank, made_up_tokens, my_tokens, record, small_job, train, with_optimizer
from support.ranks import leaves_nothing, run_on_mesh
from support.rounding import check_rounding

RATE, DECAY = 1e-2, 0.1
SPEC = OptimizerSpec(learning_rate=RATE, weight_decay=DECAY, momentum=0.9)


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023 (arXiv 2302.06675, algorithm 2), line by line."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                c = SPEC.beta1 * m + (1 - SPEC.beta1) * p.grad
                p.sub_(RATE * (c.sign() + group["weight_decay"] * p))
                m.copy_(SPEC.beta2 * m + (1 - SPEC.beta2) * p.grad)


BETAS: dict[str, Any] = {"lr": RATE, "betas": (SPEC.beta1, SPEC.beta2), "eps": SPEC.epsilon, "fused": True}
THEIRS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, **BETAS),
    "adam": lambda groups: torch.optim.Adam(groups, **BETAS),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=RATE, momentum=0.9),
    "plain sgd": lambda groups: torch.optim.SGD(groups, lr=RATE),
    "lion": Lion,
}


@pytest.mark.parametrize("name", THEIRS)
def test_elementwise_optimizers_are_those_of_torch(name: str) -> None:
    """Bit for bit; Lion, which torch has not, to rounding."""
    update = {"name": name.split()[-1], "momentum": 0.0 if name == "plain sgd" else 0.9}
    spec = SPEC.model_copy(update=update)
    start = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    own, reference = ([torch.nn.Parameter(row.clone()) for row in start] for _ in range(2))
    result = make_optimizer(spec, own[:1], own[1:])
    other = THEIRS[name](
        [{"params": reference[:1], "weight_decay": DECAY}, {"params": reference[1:], "weight_decay": 0.0}]
    )
    for step in range(3):
        for left, right in zip(own, reference, strict=True):
            left.grad, right.grad = (torch.full((9,), 1.0 + step) * start[0] for _ in range(2))
        result.step()
        other.step()
    for left, right, before in zip(own, reference, start, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6 * (name == "lion"), atol=0.0)
        assert not torch.equal(left, before)


def loads_compiler(mesh: Mesh, job: JobSpec) -> bool:
    for name in [name for name in sys.modules if name.startswith("torch._dynamo")]:
        del sys.modules[name]  # the tests' fork server has it
    vars(torch).pop("_dynamo", None)
    record(mesh, job, 1)
    return "torch._dynamo" in sys.modules


@pytest.mark.parametrize("fields", [{}, {"precision": {"moments": "bf16"}}, {"optimizer": {"name": "muon"}}])
def test_a_step_does_not_load_the_compiler(fields: dict[str, Any]) -> None:
    job = make_job(small_job(dp=2, zero=1, batch=2).model_dump() | fields)
    assert run_on_mesh(job, loads_compiler, job) == [False, False]


# --- whole matrices, on one rank ---


def one_rank(job: JobSpec) -> tuple[Mesh, Replica]:
    mesh = job_mesh(job, 0, torch.device("cpu"))
    return mesh, build(job, mesh)


def matrices_of(job: JobSpec, unit: FlatUnit, flat: Tensor) -> Iterator[tuple[ParameterShard, Tensor]]:
    """The matrices of a unit, and of which parameter they are, from a flat buffer of it."""
    for parameter, offset in zip(unit.parameters, unit.layout.offsets, strict=True):
        elements, place = flat[offset : offset + parameter.numel()], parameter.place
        for matrix in update_matrices(shape_of(job.model), place):
            rows = elements.view(-1, matrix.columns)
            result = torch.cat([rows[start:stop] for start, stop in matrix.ranges])
            yield place, result if is_matrix(place.name, place.full_shape) else result.view(-1)


def difference_from(
    job: JobSpec, optimizer_of: Callable[[list[Tensor], bool], torch.optim.Optimizer], num_steps: int = 3
) -> float:
    """Train with our gradients ours and theirs, matrix by matrix: the largest difference of a weight by its step."""
    mesh, replica = one_rank(job)
    units = [unit for shards in replica.shards.values() for unit in shards.units]
    seen: dict[FlatUnit, Tensor] = {}

    def watch(unit: FlatUnit, step: Callable[..., None]) -> Callable[..., None]:
        def watched(gradients: Tensor, factor: float, *rest: Any) -> None:
            seen[unit] = gradients.float() * factor
            step(gradients, factor, *rest)

        return watched

    for unit in units:
        unit.masters.begin_step = watch(unit, unit.masters.begin_step)  # type: ignore[method-assign]
    held = {unit: [(of, torch.nn.Parameter(m)) for of, m in matrices_of(job, unit, weights_of(unit))] for unit in units}
    optimizers = {
        unit: [optimizer_of([p], is_by_matrix(job.optimizer, of.name, of.full_shape)) for of, p in held[unit]]
        for unit in units
    }
    worst = 0.0
    for step in range(num_steps):
        train_step(replica, step, my_tokens(mesh, job, step))
        for unit in units:
            now, given = (matrices_of(job, unit, flat) for flat in (weights_of(unit), seen[unit]))
            for optimizer, (of, p), (_, own), (_, gradient) in zip(
                optimizers[unit], held[unit], now, given, strict=True
            ):
                p.grad, before = gradient.contiguous(), p.detach().clone()
                for group in optimizer.param_groups:
                    group["lr"], group["weight_decay"] = RATE, DECAY if of.init == "normal" else 0.0
                optimizer.step()
                moved = float((p.detach() - before).abs().max())
                worst = max(worst, float((p.detach() - own).abs().max()) / (moved or 1.0))
    return worst


def weights_of(unit: FlatUnit) -> Tensor:
    """The master weights of a unit, as they lie."""
    return torch.cat([tensor.detach().clone() for tensor in unit.masters.tensors])


PAPERS: dict[str, Any] = {
    "learning_rate": RATE, "weight_decay": DECAY, "schedule": "constant", "warmup_steps": 0, "clip_grad_norm": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "deepseek", "olmo", "gpt-oss-moe"])
def test_adafactor_is_that_of_torch(kind: str) -> None:
    """Each matrix of a tensor is a parameter of its own there: queries, gates, experts. So is each expert's bias, and a
    norm of all heads, which are vectors."""
    job = with_optimizer(small_job(kind, batch=2), name="adafactor", **PAPERS)
    worst = difference_from(job, lambda p, _: torch.optim.Adafactor(p, lr=RATE, eps=(1e-15, 1e-3)))
    assert worst < 2e-4


def test_muon_is_that_of_torch() -> None:
    """Whose Newton-Schulz is in bf16, as that of a job whose products are."""
    fields = small_job(batch=2).model_dump() | {"precision": {"compute": "bf16"}}
    job = with_optimizer(make_job(fields), name="muon", epsilon=1e-5, **PAPERS)

    def optimizer_of(parameters: list[Tensor], by_matrix: bool) -> torch.optim.Optimizer:
        if by_matrix:
            return torch.optim.Muon(parameters, lr=RATE, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        return torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), eps=1e-5)

    assert difference_from(job, optimizer_of) < 2e-3


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16)])
@pytest.mark.parametrize("number", [torch.float32, torch.bfloat16])
def test_newton_schulz(shape: tuple[int, int], number: torch.dtype) -> None:
    """In bf16 torch's; in float32 singular values of 0.7 to 1.2, and the same singular vectors."""
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    short, long = min(shape), max(shape)
    work = torch.empty(2 * short * long + 2 * short * short, dtype=number)

    def fill(into: Tensor) -> None:
        into.copy_(matrix)

    result = orthogonalise(*shape, fill, 5, work)
    if number == torch.bfloat16:
        reference = _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
        assert torch.equal(result, reference)
        return
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    in_its_frame = u.T @ result @ v.T
    assert (in_its_frame - torch.diag(torch.diagonal(in_its_frame))).abs().max() < 1e-4
    assert torch.diagonal(in_its_frame).min() > 0.6 and torch.diagonal(in_its_frame).max() < 1.3
    assert s.max() / s.min() > 1.5


# --- under every plan ---

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1": ("llama", {"dp": 2, "zero": 1, "layers": 3, "bucket_mib": 0.005}),  # several exchanges of several units
    "zero2 offload": ("gpt-tied", {"dp": 2, "zero": 2, "bucket_mib": 0.01, "offload_optimizer": 0.5}),
    "zero3 tp": ("llama", {"dp": 2, "tp": 2, "zero": 3, "sequence_parallel": True, "layers": 2}),
    "tp": ("gpt-tied", {"tp": 2, "layers": 2}),
    "pp": ("llama-tied", {"pp": 2, "dp": 2, "zero": 1, "batch": 4}),
    "hybrid": ("latent", {"dp": 4, "zero": 2, "zero_ranks": 2}),
    "experts": ("deepseek", {"dp": 2, "tp": 2, "ep": 2, "zero": 1, "sequence_parallel": True}),
}
EACH = [("muon", plan) for plan in PLANS] + [("adafactor", plan) for plan in PLANS]
EACH += [("sgd", "zero3 tp"), ("adam", "zero2 offload"), ("lion", "pp")]


def planned(name: str, plan: str, **fields: Any) -> JobSpec:
    kind, of_plan = PLANS[plan]
    return with_optimizer(small_job(kind, **({"batch": 4} | of_plan)), name=name, **fields)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "plan"), EACH)
def test_plans_equal_one_rank(name: str, plan: str) -> None:
    job = planned(name, plan, learning_rate=1e-2 if name == "sgd" else 1e-3)
    check_rounding(against_one_rank(job, 3), job)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["adam", "sgd", "lion", "muon"])
def test_where_zero_cuts_changes_no_bit(name: str) -> None:
    """Two replicas and one microbatch: every stage adds the same two numbers. Whole matrices are the same on whoever
    owns them, and with whatever others they are exchanged."""
    jobs = (with_optimizer(small_job(zero=zero, dp=2, batch=2, layers=3), name=name) for zero in range(4))
    first, *others = (run_on_mesh(job, record, job, 2) for job in jobs)
    for ranks in others:
        for rank, expected in zip(ranks, first, strict=True):
            assert rank.steps == expected.steps
            for (place, box), (_, other) in zip(rank.boxes, expected.boxes, strict=True):
                assert torch.equal(box, other), place.name


@leaves_nothing
def account_of_steps(mesh: Mesh, job: JobSpec) -> tuple[RankMemory, dict[str, dict[str, int]]]:
    replica = build(job, mesh)
    for step in range(2):
        mesh.ledger.clear()
        train_step(replica, step, my_tokens(mesh, job, step))
    return replica.memory(), mesh.ledger.table()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "plan", "compute"),
    [(*of, ("float32", "bf16")[number % 2]) for number, of in enumerate(EACH) if of != ("muon", "pp")],
)
def test_account_and_dry_run_are_the_runs(name: str, plan: str, compute: str) -> None:
    """State, borrowed memory and every collective, on every rank; but for rows to experts, which gates choose."""
    fields = planned(name, plan).model_dump() | {"precision": {"compute": compute}}
    job = make_job(fields)
    program = job_program(job)
    for rank, (measured, table) in enumerate(run_on_mesh(job, account_of_steps, job)):
        place = MeshShape.of(job.plan).coordinates(rank)
        predicted = rank_memory(job, program, place["pp"], place["tp"])
        for kind in ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "host_bytes"):
            assert getattr(measured, kind) == getattr(predicted, kind), kind
        held = rank_state(job, program, place["pp"], place["tp"])
        assert measured.buffers_bytes == replay(job, program, place["pp"], held).pool_bytes + kept_bytes(job, held)
        answer = ledger_table(step_ledger(job, program, rank))
        answer.pop("all_to_all_v ep", None)
        table.pop("all_to_all_v ep", None)
        assert table == answer
        if rank == 1:
            dry = dry_run(job, rank, "cpu")
            assert dry.collectives == dry.account_collectives
            assert dry.peak.optimizer_bytes == measured.optimizer_bytes


def test_what_a_parameter_needs() -> None:
    """With 16-bit weights and float32 gradients: 6 bytes, a master of 4, and what is remembered."""
    for name, remembered in (("adamw", 8), ("adam", 8), ("sgd", 4), ("lion", 4), ("adafactor", 0.5), ("muon", 5)):
        fields = small_job(layers=4).model_dump() | {"precision": {"compute": "bf16"}}
        job = with_optimizer(make_job(fields), name=name)
        elements = rank_state(job, job_program(job), 0)[0].num_elements
        result = rank_memory(job, job_program(job), 0).optimizer_bytes / elements - 4
        assert result == pytest.approx(remembered, abs=1 if name in ("adafactor", "muon") else 0.0)  # of small matrices


# --- checkpoints ---


@leaves_nothing
def save(mesh: Mesh, job: JobSpec, folder: Path) -> list[HeldBox]:
    replica = build(job, mesh)
    train(replica, mesh, job, 2)
    writer = CheckpointWriter(job, replica, mesh, folder)
    writer.save(2, 2 * job.batch.global_batch_size, 0, {})
    writer.wait()
    return SavedState(replica, mesh).held()


@leaves_nothing
def take_up(mesh: Mesh, job: JobSpec, folder: Path) -> tuple[list[HeldBox], tuple[str, ...], float]:
    begun = begin(job, mesh, folder)
    held = SavedState(begun.replica, mesh).held()
    return held, begun.lines, train_step(begun.replica, 2, my_tokens(mesh, job, 2)).loss


def whole(by_rank: list[list[HeldBox]]) -> dict[str, Tensor]:
    """The full tensors, each element of which is there once."""
    result: dict[str, Tensor] = {}
    count: dict[str, Tensor] = {}
    for held in (held for boxes in by_rank for held in boxes):
        part = tuple(slice(*ends) for ends in held.box)
        result.setdefault(held.name, torch.zeros(held.full_shape))[part] = held.values.float()
        count.setdefault(held.name, torch.zeros(held.full_shape))[part] += 1
    assert all(bool((times == 1).all()) for times in count.values())
    return result


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["adafactor", "muon", "sgd"])
@pytest.mark.parametrize(("before", "after"), [("zero3 tp", "zero1"), ("experts", "hybrid experts")])
def test_any_plan_goes_on(name: str, before: str, after: str, tmp_path: Path) -> None:
    """All ranks together hold the saved state, bit for bit."""
    job = planned(name, before)
    saved = whole(run_on_mesh(job, save, job, tmp_path))
    plan = {"dp": 2, "zero": 1} if after == "zero1" else {"dp": 4, "ep": 2, "zero": 3, "zero_ranks": 2}
    other = make_job(job.model_dump() | {"plan": plan})
    taken = run_on_mesh(other, take_up, other, tmp_path)
    there = whole([held for held, _, _ in taken])
    assert there.keys() == saved.keys()
    for tensor, values in saved.items():
        assert torch.equal(there[tensor], values), tensor


def test_another_optimizer_begins_anew_unless_it_finds_all_that_it_needs(tmp_path: Path) -> None:
    job = with_optimizer(small_job(batch=2), name="adamw")
    run_on_mesh(job, save, job, tmp_path)
    for name, is_anew in (("adam", False), ("lion", False), ("muon", True), ("adafactor", True), ("sgd", True)):
        other = with_optimizer(job, name=name)
        ((held, printed, _),) = run_on_mesh(other, take_up, other, tmp_path)
        states = {box.name.split(".")[0] for box in held if box.name.startswith(("exp_avg", "momentum"))}
        assert bool(states) != is_anew
        assert any("begins anew" in line for line in printed) == is_anew


def test_moments_in_bf16_of_others() -> None:
    """The least that a step changes must not be lost; Adafactor's goes to nothing."""
    fields = {"precision": {"moments": "bf16"}}
    make_job(fields | {"optimizer": {"name": "lion", "beta1": 0.999}})
    for optimizer, words in (
        ({"name": "sgd", "momentum": 0.999}, "optimizer.momentum 0.999 takes 0.001"),
        ({"name": "muon", "momentum": 0.999}, "optimizer.momentum 0.999"),
        ({"name": "adafactor"}, "less and less"),
    ):
        with pytest.raises(PlanError, match=words):
            make_job(fields | {"optimizer": optimizer})
    job = with_optimizer(make_job(small_job(batch=2).model_dump() | fields), name="muon")
    _, replica = one_rank(job)
    losses = [train_step(replica, step, made_up_tokens(job, 0)).loss for step in range(6)]
    assert losses[-1] < losses[0] and math.isfinite(losses[-1])
