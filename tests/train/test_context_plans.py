"""Context parallel in whole plans: losses, gradients and weights are those of one rank, whatever else the plan does."""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.schedule.job_program import job_program
from shardwright.sharding.token_marks import FILLING, UNCOUNTED
from shardwright.train.async_step import train_stream
from shardwright.train.build import build
from shardwright.train.text_generation import generate
from shardwright.train.train_step import evaluate, train_step
from support.cases import against_one_rank, context_bytes, made_up_tokens, record, skewed_tokens, small_job
from support.ranks import leaves_nothing, run_on_mesh
from support.rounding import check_rounding

# Each layer and microbatch is many collectives over tp: two microbatches.
SP2 = {"tp": 2, "sequence_parallel": True, "microbatch_size": 2}
METHODS = ("ring", "all-gather", "ulysses")
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "cp2": ("llama", {"cp": 2}),
    **{f"cp4-{method}": ("gpt-tied", {"cp": 4, "cp_method": method, "microbatch_size": 2}) for method in METHODS},
    "cp2-tp2-sp": ("llama", {"cp": 2, **SP2}),
    "cp4-tp2-sp-more-ranks-than-keys": ("llama", {"cp": 4, "cp_method": "ulysses", **SP2}),
    "cp2-tp2-sp-latent": ("latent", {"cp": 2, **SP2}),
    "cp2-ulysses-qwen": ("qwen", {"cp": 2, "cp_method": "ulysses"}),
    "cp2-gpt-oss": ("gpt-oss", {"cp": 2, "zero": 3}),
    "cp2-ulysses-tp2-gpt-oss": ("gpt-oss", {"cp": 2, "tp": 2, "cp_method": "ulysses"}),
    "cp4-all-gather-llama4": ("llama4", {"cp": 4, "cp_method": "all-gather", "microbatch_size": 2}),
    "cp4-ulysses-bloom": ("bloom", {"cp": 4, "cp_method": "ulysses", "microbatch_size": 2}),
    "cp2-pp2": ("gpt-tied", {"cp": 2, "pp": 2}),
    "cp2-zb-v": ("llama", {"cp": 2, "pp": 2, "schedule": "zb-v", "cp_method": "ulysses"}),
    "cp2-dualpipev": ("llama", {"cp": 2, "pp": 2, "schedule": "dualpipev"}),
    "cp2-dualpipev-tp2-full": (
        "gpt", {"cp": 2, "pp": 2, "tp": 2, "schedule": "dualpipev", "recompute": "full", "sequence_parallel": True},
    ),
    "cp2-dualpipe": ("llama", {"cp": 2, "pp": 2, "schedule": "dualpipe", "cp_method": "all-gather"}),
    "cp2-dp2-zero1": ("llama", {"cp": 2, "dp": 2, "zero": 1}),
    "cp2-zero2-again": ("gpt-tied", {"cp": 2, "zero": 2, "cp_method": "all-gather", "recompute": "selective"}),
    "cp2-dp2-zero3": ("llama", {"cp": 2, "dp": 2, "zero": 3, "recompute": "full"}),
    "cp2-zero3-pp2": ("gpt", {"cp": 2, "pp": 2, "zero": 3, "cp_method": "ulysses", "recompute": "selective"}),
}  # fmt: skip


def dropping(job: JobSpec, **data: Any) -> JobSpec:
    model, answer = job.model.model_copy(update={"dropout": 0.1}), job.data.model_copy(update=data)
    return job.model_copy(update={"model": model, "data": answer})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PLANS)
def test_plan_equals_one_rank(name: str) -> None:
    kind, fields = PLANS[name]
    job = dropping(small_job(kind, batch=4, **fields))
    check_rounding(against_one_rank(job), job)


PACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("llama", {"dp": 2}),
    "pp2-zb-h1": ("gpt-tied", {"pp": 2, "schedule": "zb-h1"}),
    "cp2": ("llama", {"cp": 2}),
    "cp4-all-gather": ("gpt", {"cp": 4, "cp_method": "all-gather", "microbatch_size": 2}),
    "cp2-ulysses-dp2": ("llama", {"cp": 2, "dp": 2, "cp_method": "ulysses"}),
    "cp2-pp2-dualpipev": ("llama", {"cp": 2, "pp": 2, "schedule": "dualpipev", "recompute": "full"}),
    "cp2-tp2-sp-zero3": ("gpt-tied", {"cp": 2, "zero": 3, **SP2}),
    "cp2-ulysses-llama4": ("llama4", {"cp": 2, "cp_method": "ulysses", "microbatch_size": 2}),
    "cp2-llama4": ("llama4", {"cp": 2, "pp": 2, "recompute": "full"}),
    "tp2-sp-bloom": ("bloom", SP2),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PACKED)
def test_packed_documents_equal_one_rank(name: str) -> None:
    """The first two samples have few targets that count, or none: so does all of a rank's, or of a microbatch's."""
    kind, fields = PACKED[name]
    job = dropping(small_job(kind, **fields), separate_documents=True)
    check_rounding(against_one_rank(job), job)


ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in ("llama", "gpt", "bloom", "llama4", "gemma", "latent")},
    "llama4-cp2": ("llama4", {"cp": 2}),
    "llama4-ulysses": ("llama4", {"cp": 2, "cp_method": "ulysses"}),
    "gpt-cp2-tp2-sp": ("gpt", {"cp": 2, "tp": 2, "sequence_parallel": True}),
    "gpt-pp2": ("gpt", {"pp": 2}),
}


@leaves_nothing
def loss_of(mesh: Mesh, job: JobSpec, marked_BT: torch.Tensor) -> float:
    return evaluate(build(job, mesh), marked_BT)


@pytest.mark.parametrize("name", ALONE)
def test_packing_changes_nothing(name: str) -> None:
    """Documents of 3, 7 and 5 tokens, and one of 2, in one sequence and in one each: positions of all kinds begin anew
    with each, and so do chunks and what queries are multiplied with."""
    kind, plan = ALONE[name]
    job = small_job(kind, batch=1, **plan)
    job = job.model_copy(update={"data": job.data.model_copy(update={"separate_documents": True})})
    tokens, _ = skewed_tokens(job, 5)
    packed, alone, first = tokens.clone(), [], 0
    for length in (3, 7, 5, 2):
        one = torch.full_like(tokens, FILLING | UNCOUNTED)
        one[0, length] = -1 - FILLING
        one[0, :length] = tokens[0, first : first + length]
        packed[0, first] = one[0, 0] = -1 - tokens[0, first]
        alone.append(one)
        first += length
    of_four = job.model_copy(update={"batch": job.batch.model_copy(update={"global_batch_size": 4})})
    together = set(run_on_mesh(job, loss_of, job, packed))
    apart = set(run_on_mesh(of_four, loss_of, of_four, torch.cat(alone)))
    assert len(together) == len(apart) == 1
    assert together.pop() == pytest.approx(apart.pop(), rel=1e-6)


def test_a_document_is_as_if_alone() -> None:
    """Losses of two documents in one sequence are those of each at the beginning of a sequence of its own."""
    job = small_job().model_copy(update={"data": small_job().data.model_copy(update={"separate_documents": True})})

    def losses(mesh: Mesh, tokens_BT: torch.Tensor, documents_BT: torch.Tensor) -> torch.Tensor:
        stage = build(job, mesh).stages[0]
        begins_BT = torch.diff(documents_BT, dim=1, prepend=documents_BT[:, :1]) > 0
        marked_BT = torch.where(begins_BT, -1 - tokens_BT, tokens_BT)
        with torch.no_grad():
            logits_SBV = stage.logits(stage(tokens_BT[:, :-1], None, None, marked_BT))
            mean = stage(tokens_BT[:, :-1], tokens_BT[:, 1:], None, marked_BT)
        losses_SB = cross_entropy(logits_SBV.permute(0, 2, 1), tokens_BT[:, 1:].t(), reduction="none")
        losses_SB[(documents_BT[:, 1:] != documents_BT[:, :-1]).t()] = 0.0
        torch.testing.assert_close(mean, losses_SB.mean(), rtol=1e-6, atol=0)
        return losses_SB

    def apart(mesh: Mesh) -> None:
        tokens = made_up_tokens(small_job(), 0)[:2]
        packed_BT = torch.cat((tokens[:1, :7], tokens[1:, :10]), dim=1)
        numbers_BT = (torch.arange(17) >= 7).int()[None]
        packed_SB = losses(mesh, packed_BT, numbers_BT)
        alone_SB = losses(mesh, tokens, torch.zeros(2, 17, dtype=torch.int32))
        torch.testing.assert_close(packed_SB[:6, 0], alone_SB[:6, 0], rtol=0, atol=1e-6)
        torch.testing.assert_close(packed_SB[7:, 0], alone_SB[:9, 1], rtol=0, atol=1e-6)
        assert packed_SB[6, 0] == 0  # its target begins a document

    run_on_mesh(job, apart)


def test_the_mean_is_over_targets_that_count() -> None:
    def means(mesh: Mesh, job: JobSpec) -> None:
        replica, marked_BT = build(job, mesh), made_up_tokens(job, 0)
        tokens_BT = torch.where(marked_BT < 0, -1 - marked_BT, marked_BT) % UNCOUNTED
        with torch.no_grad():
            of_all = replica.stages[0](tokens_BT[:, :-1], tokens_BT[:, 1:], None, marked_BT).item()
        asked = (marked_BT[:, 1:] >= 0) & (marked_BT[:, 1:] < UNCOUNTED)
        assert 0 < asked.sum() < (marked_BT[:, 1:] >= 0).sum()
        mean = of_all * asked.numel() / asked.sum().item()
        assert evaluate(replica, marked_BT) == pytest.approx(mean, rel=1e-6)
        assert train_step(replica, 0, marked_BT).loss == pytest.approx(mean, rel=1e-6)

    job = small_job()
    job = job.model_copy(update={"data": job.data.model_copy(update={"separate_documents": True})})
    run_on_mesh(job, means, job)


@leaves_nothing
def streamed(mesh: Mesh, job: JobSpec) -> tuple[float, dict[str, torch.Tensor]]:
    replica = build(job, mesh)
    share = job.batch.global_batch_size // job.plan.dp

    def mine(step: int) -> torch.Tensor:
        return made_up_tokens(job, step)[mesh.dp.index * share :][:share]

    (result,) = train_stream(replica, job_program(job, 1), 0, mine)
    return result.loss, {p.place.name: p.detach().clone() for p in replica.stages[0].parameters()}


def test_a_pipeline_that_does_not_drain_counts_them_too() -> None:
    """One batch, of which there is no older version: then PipeDream-2BW is what one rank does."""
    job = small_job("gpt", schedule="pipedream-2bw", dp=2, batch=4)
    fields = {"optimizer": job.optimizer.model_copy(update={"clip_grad_norm": 0.0})}
    job = job.model_copy(update=fields | {"data": job.data.model_copy(update={"separate_documents": True})})
    (expected,) = run_on_mesh(job.as_one_rank(), record, job.as_one_rank(), 1)
    for loss, parameters in run_on_mesh(job, streamed, job):
        assert loss == pytest.approx(expected.steps[0].loss, abs=1e-6)
        for place, box in expected.boxes:
            torch.testing.assert_close(parameters[place.name], box, rtol=0, atol=1e-6)


def test_documents_that_are_not_separate_change_nothing() -> None:
    """All in one document, and not separate: the same to rounding; the switch itself is off by default."""
    job = small_job()
    separate = job.model_copy(update={"data": job.data.model_copy(update={"separate_documents": True})})

    def one_document(mesh: Mesh, job: JobSpec) -> float:
        replica, tokens = build(job, mesh), made_up_tokens(small_job(), 0)
        return train_step(replica, 0, tokens).loss

    (off,), (on,) = run_on_mesh(job, one_document, job), run_on_mesh(job, one_document, separate)
    assert on == pytest.approx(off, abs=1e-6)


@leaves_nothing
def forward_bytes(mesh: Mesh, job: JobSpec) -> tuple[int, list[int]]:
    """Bytes over cp in an evaluation, and some generated tokens."""
    replica = build(job, mesh)
    mesh.ledger.clear()
    evaluate(replica, made_up_tokens(job, 0))
    moved = sum(tally.num_bytes for (_, axis), tally in mesh.ledger.tallies.items() if axis == "cp")
    return moved, generate(replica, [1, 2, 3], 20, seed=5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_predicted_and_text_is_the_same(method: str) -> None:
    job = small_job(cp=4, pp=2, cp_method=method, batch=4, layers=3)
    (_, text), *_ = run_on_mesh(job.as_one_rank(), forward_bytes, job.as_one_rank())
    for rank, (moved, written) in enumerate(run_on_mesh(job, forward_bytes, job)):
        layers = job.plan.stage_layers(3)[rank // 4]
        assert moved == layers * job.num_microbatches * context_bytes(job)
        assert written == text


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        (
            {"cp": 3},
            "ring attention cuts 16 tokens into plan.cp 3 x 2 chunks a rank = 6 equal parts (16 / 6 = 2.67); use a "
            "sequence that is a multiple of 6, such as 12, or plan.cp = 2 or 4",
        ),
        (
            {"cp": 3, "cp_method": "ulysses"},
            "ulysses attention cuts 16 tokens into plan.cp 3 equal parts (16 / 3 = 5.33)",
        ),
        (
            {"cp": 8, "tp": 4, "sequence_parallel": True},
            "sequence parallel shards the 16 / cp 8 = 2 tokens of a rank over tp 4 (2 / 4 = 0.50); use a sequence that "
            "is a multiple of 32",
        ),
        (
            {"cp": 16, "cp_method": "ulysses"},
            "ulysses gives each of plan.cp 16 ranks as many of 8 heads (8 / 16 = 0.50); use plan.cp = 8",
        ),
    ],
)
def test_what_does_not_divide_is_refused(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(PlanError) as caught:
        small_job(**fields)
    assert fault in str(caught.value)
