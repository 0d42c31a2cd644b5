"""Models with experts train under any plan to what one rank trains to, and their routers agree on all ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.moe import MoeSpec
from shardwright.memory.job_memory import job_memory
from shardwright.memory.step_collectives import Traffic, step_ledger
from shardwright.model.decoder import DecoderStage
from shardwright.model.router_state import Totals
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.pipeline.pipeline_stage import Microbatch
from shardwright.schedule.job_program import job_program
from shardwright.train.build import build
from shardwright.train.router_update import LayerRouting
from shardwright.train.train_step import evaluate, train_step
from support.cases import EXPERTS, against_one_rank, by_one_rank, made_up_tokens, of_replicas, small_job
from support.ranks import leaves_nothing, run_on_mesh
from support.rounding import check_rounding

SP2 = {"tp": 2, "sequence_parallel": True}
# Between them: ep 1, 2, 4; experts cut over tp, or spread over it; ZeRO 0 to 3; all kinds of schedules and gates.
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "ep2": ("mixtral", {"dp": 2, "ep": 2}),
    "ep4-zero2": ("deepseek", {"dp": 4, "ep": 4, "zero": 2}),
    "ep2-of-dp4-zero3": ("gshard", {"dp": 4, "ep": 2, "zero": 3}),
    "ep2-tp2-zero3": ("qwen-moe", {"dp": 2, "ep": 2, "tp": 2, "zero": 3}),
    "ep2-sp2-pp2": ("gshard", {"dp": 2, "ep": 2, "pp": 2, **SP2}),
    "ep4-over-sp2-zero1": ("switch", {"dp": 2, "ep": 4, "expert_tp": 1, "zero": 1, **SP2}),
    "ep2-over-sp2": ("expert-choice", {"ep": 2, "expert_tp": 1, **SP2}),
    "sp2": ("deepseek", {**SP2, "zero": 0}),
    "sp2-reroute": ("correlation", SP2),
    "ep2-pp2-zb": ("correlation", {"dp": 2, "ep": 2, "pp": 2, "schedule": "zb-h1", "zero": 1}),
    "ep2-pp2-dualpipev": ("deepseek", {"dp": 2, "ep": 2, "pp": 2, "schedule": "dualpipev", "zero": 2}),
    "ep2-pp2-dualpipe": ("mixtral", {"dp": 2, "ep": 2, "pp": 2, "schedule": "dualpipe", "zero": 1}),
    "cp2-ep2-zero1": ("mixtral", {"cp": 2, "ep": 2, "zero": 1}),
    "cp2-ep4-over-sp2-zero3": ("deepseek", {"cp": 2, "ep": 4, "expert_tp": 1, "zero": 3, **SP2}),
    "cp2-ulysses-ep2-pp2": ("gshard", {"cp": 2, "cp_method": "ulysses", "ep": 2, "pp": 2}),
    "ep2-sp2-recompute": ("switch", {"dp": 2, "ep": 2, "recompute": "full", **SP2}),
}


def expert_job(kind: str, **plan: Any) -> JobSpec:
    """Of four microbatches a pipeline, or two where there are four."""
    return small_job(kind, batch=8 if plan.get("dp", 1) == 1 else 16, microbatch_size=2, **plan)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PLANS)
def test_plan_equals_one_rank(name: str) -> None:
    kind, plan = PLANS[name]
    job = expert_job(kind, **plan)
    check_rounding(against_one_rank(job), job)


BITWISE: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "stage": {"recompute": "stage", "pp": 2},
    "selective": {"recompute": "selective", "recompute_operators": ["norm", "attention", "up", "activation"]},
    "offload": {"recompute": "full", "offload_activations": True, "pp": 2},
    "zb-v": {"pp": 2, "schedule": "zb-v"},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", BITWISE)
@pytest.mark.parametrize("kind", ["deepseek", "gshard", "qwen-moe"])
def test_routed_alike_when_computed_again(kind: str, how: str) -> None:
    assert against_one_rank(small_job(kind, microbatch_size=2, batch=8, **BITWISE[how])).bitwise


def with_moe(job: JobSpec, **fields: Any) -> JobSpec:
    moe = MoeSpec(**job.model.moe.model_dump() | fields)
    return job.model_copy(update={"model": job.model.model_copy(update={"moe": moe})})


@leaves_nothing
def route(mesh: Mesh, job: JobSpec) -> tuple[list[tuple[LayerRouting, ...]], dict[str, Tensor]]:
    """The routing that two steps tell, and the memory of the routers here after them."""
    replica = build(job, mesh)
    share = job.batch.global_batch_size // job.plan.dp
    answer = []
    for step in range(2):
        own = made_up_tokens(job, step)[mesh.dp.index * share :][:share]
        answer.append(train_step(replica, step, own).routing)
        evaluate(replica, own)  # is not counted
    states = [state for stage in replica.stages.values() for state in stage.routers().items()]
    return answer, {f"{layer} {name}": value for layer, state in states for name, value in state.state_dict().items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "plan",
    [{"dp": 2, "ep": 2, "pp": 2, "schedule": "dualpipe"}, {"recompute": "full", "ep": 2, "expert_tp": 1, **SP2}],
    ids=["dualpipe", "sp2"],
)
@pytest.mark.parametrize("kind", ["deepseek", "correlation", "qwen-moe"])
def test_all_ranks_see_and_remember_what_one_does(kind: str, plan: dict[str, Any]) -> None:
    job = expert_job(kind, **plan)
    answer, remembered = by_one_rank(job, route)
    for own, state in run_on_mesh(job, route, job):
        for result, expected in zip(sum(own, ()), sum(answer, ()), strict=True):
            assert (result.layer, result.load, result.together) == (expected.layer, expected.load, expected.together)
            for name, value in result.scalars().items():
                assert value == pytest.approx(expected.scalars()[name], rel=1e-5), name
        assert state
        for name, value in state.items():
            torch.testing.assert_close(value, remembered[name], rtol=0, atol=0)


def test_what_is_told_adds_up() -> None:
    job = with_moe(small_job("switch", batch=16, layers=4, microbatch_size=2), capacity_factor=0.5)
    ((answer, _),) = run_on_mesh(job, route, job)
    tokens = job.tokens_per_step
    for layer in sum(answer, ()):
        assert layer.layer in (1, 3)
        assert sum(layer.load) == tokens
        assert layer.largest_load == max(layer.load) / (tokens / 4)
        # Each of 8 microbatches has 4 tokens of room in each of 4 experts, for 32.
        assert 0.5 <= layer.dropped_share == layer.unserved_share < 1
        assert 0 < layer.entropy <= torch.tensor(4.0).log() * (1 + 1e-6)
        assert layer.balance_loss >= 0.01 * (1 - 1e-6)  # least where all are even
        assert layer.together is not None and sum(map(sum, layer.together)) == 0  # one expert a token


def test_the_bias_moves_towards_the_mean() -> None:
    job = with_moe(small_job("deepseek", batch=16, layers=4, microbatch_size=2), bias_update=0.01)
    ((answer, state),) = run_on_mesh(job, route, job)
    for row, layer in enumerate((1, 2, 3)):
        expected = torch.zeros(8)
        for step in answer:
            load = torch.tensor(step[row].load).double()
            expected += 0.01 * (load.mean() - load).sign().float()
        assert torch.equal(state[f"{layer} bias_E"], expected)


@pytest.mark.parametrize(("kind", "loss"), [("mixtral", "switch"), ("deepseek", "switch"), ("mixtral", "gshard")])
def test_the_balance_loss_weighs_what_it_says(kind: str, loss: str) -> None:
    """The gradient of the last router is that of the sum of all losses times the factor, by differences."""
    job = with_moe(small_job(kind), aux_loss=loss, aux_coefficient=50.0, z_coefficient=0.5)

    def check(mesh: Mesh) -> None:
        stage: DecoderStage = build(job, mesh).stages[0]
        tokens_BS, factor = made_up_tokens(job, 0)[:2], 0.25
        state, weight = stage.routers()[1], stage.layers["1"].moe.router.weight

        def losses() -> tuple[Tensor, float]:
            state.take_seen()
            loss = stage(tokens_BS[:, :-1], tokens_BS[:, 1:], Microbatch(1, 0, 0, factor)).mean()
            seen = Totals.of(state.seen, job.model.moe)
            return loss, loss.item() + seen.balance_loss.item() + seen.z_loss.item()

        losses()[0].backward(torch.tensor(factor))
        gradient = weight.gradient
        place = torch.unravel_index(gradient.abs().argmax(), gradient.shape)
        totals = []
        for step in (1e-3, -2e-3):
            weight.data[place] += step
            totals.append(losses()[1])
        assert gradient[place].item() == pytest.approx(factor * (totals[0] - totals[1]) / 2e-3, rel=2e-2)

    run_on_mesh(job, check)


def test_evaluation_has_neither_losses_nor_draws() -> None:
    job = small_job("gshard")

    def run(mesh: Mesh) -> list[float]:
        replica = build(job, mesh)
        return [evaluate(replica, made_up_tokens(job, 0)) for _ in range(2)]

    first, second = run_on_mesh(job, run)[0]
    assert first == second


def test_every_kind_of_gate_is_there() -> None:
    assert {EXPERTS[kind]["moe"].get("gate", "softmax") for kind, _ in PLANS.values()} == {
        "softmax", "switch", "gshard", "sigmoid", "expert-choice", "correlation",
    }  # fmt: skip


@leaves_nothing
def held_and_moved(mesh: Mesh, job: JobSpec) -> tuple[int, dict[str, dict[str, int]]]:
    """Bytes of state after a step, and what the step moved."""
    replica = build(job, mesh)
    share = job.batch.global_batch_size // job.plan.dp
    mesh.ledger.clear()
    train_step(replica, 0, made_up_tokens(job, 0)[mesh.dp.index * share :][:share])
    return replica.memory().state_bytes, mesh.ledger.table()


@pytest.mark.parametrize("name", ["ep2-of-dp4-zero3", "ep4-over-sp2-zero1"])
def test_state_and_traffic_of_replicas_are_as_predicted(name: str) -> None:
    kind, plan = PLANS[name]
    job = expert_job(kind, **plan)
    state_bytes, moved = run_on_mesh(job, held_and_moved, job)[0]
    assert state_bytes == job_memory(job)[0].state_bytes
    predicted = of_replicas(step_ledger(job, job_program(job), 0))
    assert predicted == {key: Traffic(moved[key]["count"], moved[key]["bytes"]) for key in predicted}
    assert any("edp" in key for key in predicted) == (
        name == "ep2-of-dp4-zero3"
    )  # the other has no replicas of experts
