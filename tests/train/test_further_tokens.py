"""Multi-token prediction: as its description says, under any plan, and beside the main loss."""

from typing import Any

import pytest
import torch

from fuzz.models import run
from shardwright.config.checks.check import job_faults
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.memory.step_collectives import ledger_table, step_ledger
from shardwright.model.mtp import further_ids, skipped_targets
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.context.document_mask import CountedShares
from shardwright.schedule.job_program import job_program
from shardwright.train.build import build
from shardwright.train.train_step import counted_shares, train_step
from support.cases import FURTHER, against_one_rank, by_one_rank, made_up_tokens, record, small_job
from support.ranks import run_on_mesh
from support.rounding import check_rounding

SP2 = {"tp": 2, "sequence_parallel": True}
# Between them: table and head tied or not, on one rank or on two; ZeRO 0 to 3; all axes and kinds of schedules.
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2-zero3": ("llama-mtp", {"dp": 2, "zero": 3}),
    "dp2-zero3-tied": ("gpt-tied-mtp", {"dp": 2, "zero": 3}),
    "tp2": ("gpt-tied-mtp", {"tp": 2}),
    "sp2-zero2": ("llama-mtp", {**SP2, "dp": 2, "zero": 2}),
    "pp2": ("llama-mtp", {"pp": 2}),
    "pp2-tied-again": ("gpt-tied-mtp", {"pp": 2, "recompute": "stage"}),
    "pp2-zb-zero2": ("llama-mtp", {"pp": 2, "dp": 2, "zero": 2, "schedule": "zb-h1"}),
    "pp2-vee-zero3": ("llama-mtp", {"pp": 2, "dp": 2, "zero": 3, "schedule": "zb-v"}),
    "pp2-interleaved-zero3": (
        "gpt-tied-mtp", {"pp": 2, "dp": 2, "zero": 3, "schedule": "interleaved-1f1b", "virtual_stages": 2},
    ),
    "pp2-dualpipe-ep2": ("deepseek-mtp", {"pp": 2, "dp": 2, "ep": 2, "schedule": "dualpipe", "zero": 1}),
    "dualpipev-ep2": ("deepseek-mtp", {"pp": 2, "dp": 2, "ep": 2, "schedule": "dualpipev", "zero": 2}),
    "cp2-ring-full": ("llama-mtp", {"cp": 2, "recompute": "full"}),
    "cp2-ulysses-pp2": ("gpt-tied-mtp", {"cp": 2, "cp_method": "ulysses", "pp": 2}),
    "cp2-all-gather-ep2-sp2": ("deepseek-mtp", {"cp": 2, "cp_method": "all-gather", "ep": 2, **SP2}),
}  # fmt: skip


def job_of(kind: str, separate: bool = False, **plan: Any) -> JobSpec:
    job = small_job(kind, batch=8 if plan.get("dp", 1) == 1 else 16, microbatch_size=2, **plan)
    return job.model_copy(update={"data": job.data.model_copy(update={"separate_documents": separate})})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PLANS)
def test_plan_equals_one_rank(name: str) -> None:
    kind, plan = PLANS[name]
    job = job_of(kind, **plan)
    check_rounding(against_one_rank(job), job)


@pytest.mark.parametrize("plan", [{}, {"cp": 2}, {"pp": 2, "dp": 2}], ids=["one", "cp2", "pp2-dp2"])
def test_documents_are_not_crossed(plan: dict[str, Any]) -> None:
    """Separate documents are as in the plain implementation, on one rank and on several."""
    model = small_job("llama").model.model_dump(
        include={"layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "sequence"}
    )
    fields = {"model": model | {"mtp_layers": 2}, "plan": {"microbatch_size": 2}, "batch": {"global_batch_size": 8}}
    if not plan:
        fields |= {"optimizer": {"learning_rate": 1e-3}, "run": {"seed": 7}}
        assert run(fields | {"data": {"separate_documents": True}}).kind == "equal"
        return
    job = job_of("gpt-tied-mtp", separate=True, **plan)
    check_rounding(against_one_rank(job), job)


@pytest.mark.parametrize("kind", FURTHER)
def test_one_rank_is_the_plain_implementation(kind: str) -> None:
    job = small_job(kind)
    fields = {
        "model": job.model.model_dump(exclude_defaults=True), "plan": {"microbatch_size": 2},
        "batch": {"global_batch_size": 4}, "run": {"seed": 3}, "optimizer": {"epsilon": 1e-5},
    }  # fmt: skip
    result = run(fields)
    assert result.kind == "equal", result


def ledger(mesh: Mesh, job: JobSpec) -> dict[str, dict[str, int]]:
    replica = build(job, mesh)
    share = job.batch.global_batch_size // job.plan.dp
    tokens_BT = made_up_tokens(job, 0)[mesh.dp.index * share :][:share]
    mesh.ledger.clear()
    train_step(replica, 0, tokens_BT)
    return mesh.ledger.table()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("separate", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("name", ["sp2-zero2", "pp2-tied-again", "pp2-zb-zero2", "pp2-vee-zero3"])
def test_ranks_move_what_is_foretold(name: str, separate: bool) -> None:
    kind, plan = PLANS[name]
    job = job_of(kind, separate=separate, **plan)
    for rank, moved in enumerate(run_on_mesh(job, ledger, job)):
        assert ledger_table(step_ledger(job, job_program(job), rank)) == moved


def test_the_main_loss_is_told_and_the_others_beside_it() -> None:
    """With a weight of 0 the model trains as without modules: the same losses, which are the main ones."""
    with_modules = job_of("llama-mtp")
    silent = with_modules.model_copy(update={"model": with_modules.model.model_copy(update={"mtp_weight": 0.0})})
    alone = job_of("llama")
    first, second = (by_one_rank(job, record, 2) for job in (silent, alone))
    assert [step.loss for step in first.steps] == pytest.approx([step.loss for step in second.steps], abs=1e-6)
    assert first.evaluated == pytest.approx(second.evaluated, abs=1e-6)
    assert [len(step.mtp_losses) for step in first.steps] == [1, 1]
    assert all(abs(step.mtp_losses[0] - step.loss) > 1e-4 for step in first.steps)
    trained = by_one_rank(with_modules, record, 2)
    assert trained.steps[0].loss == first.steps[0].loss  # the first loss is before any update
    assert trained.steps[1].loss != first.steps[1].loss


def test_what_has_no_target() -> None:
    ids_BS = torch.tensor([[5, 6, 7, 8]])
    assert further_ids(ids_BS, 0) is ids_BS
    assert further_ids(ids_BS, 2).tolist() == [[7, 8, 0, 0]]
    assert skipped_targets(ids_BS, None, 1).tolist() == [[False, False, False, True]]
    marked_BT = torch.tensor([[4, 5, 6, -8, 8]])
    assert skipped_targets(ids_BS, marked_BT, 1).tolist() == [[False, True, True, True]]


def test_shares_of_a_sequence() -> None:
    job = job_of("gpt-tied-mtp")
    (shares,) = run_on_mesh(job, lambda mesh: counted_shares(job, mesh, made_up_tokens(job, 0)))
    assert shares == CountedShares((1.0, 15 / 16, 14 / 16))


@pytest.mark.parametrize("kind", FURTHER)
def test_flops_of_stages_are_those_of_tokens(kind: str) -> None:
    shape = shape_of(small_job(kind).model)
    layers = [1, shape.layers - 1]
    assert 3 * sum(shape.stage_flops(layers, 2)) == pytest.approx(2 * shape.sequence * shape.flops_per_token())
    alone = shape_of(small_job(kind).model.model_copy(update={"mtp_layers": 0}))
    more = shape.flops_per_token() - alone.flops_per_token()
    last = alone.stage_flops([*[0] * (alone.layers - 1), alone.layers], 1)[-1] - sum(
        alone.stage_flops([alone.layers - 1, 1], 1)[:1]
    )
    # A layer like the last, the head once more, and the projection.
    project = 2 * shape.sequence * 2 * shape.hidden**2
    assert more * shape.sequence / 3 == pytest.approx(shape.mtp * (last + project))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"mtp_layers": 2, "sequence": 2}}, ("model.mtp_layers 2", "use at most 1")),
        ({"model": {"mtp_weight": 0.5}}, ("model.mtp_weight is 0.5", "model.mtp_layers = 1")),
        (
            {"model": {"mtp_layers": 1}, "plan": {"recompute": "budget", "memory_limit_gib": 1.0}},
            ("recompute", "model.mtp_layers 1", '"full"'),
        ),
    ],
)
def test_what_cannot_be_is_told(changes: dict[str, dict[str, Any]], words: tuple[str, ...]) -> None:
    job = small_job()
    job = job.model_copy(
        update={section: getattr(job, section).model_copy(update=fields) for section, fields in changes.items()}
    )
    (fault,) = job_faults(job)
    assert all(word in fault for word in words), fault
