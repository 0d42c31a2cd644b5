"""Tokens travel to their experts and back: outputs, gradients and bytes, whatever the size of the axis and the way."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.checks.check import job_faults
from shardwright.config.job import JobSpec
from shardwright.parallel.comm.collectives import Axis
from shardwright.parallel.comm.ledger import Ledger
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.expert.dispatch import Routing, start_trip, through_experts
from shardwright.precision.float8 import E4M3, quantise
from shardwright.precision.float8_product import dequantise
from support.cases import against_one_rank, small_job
from support.expert_traffic import ExpertRanks, Sent, sent_direct, sent_node_aware
from support.ranks import run_on_mesh
from support.rounding import check_rounding

HIDDEN = 16


def alone() -> Axis:
    return Axis("ep", (0,), 0, None, Ledger(torch.device("cpu")), None)


def made_up(num_tokens: int, num_choices: int, num_experts: int, skew: float, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tokens, choices (a tenth of them dropped), weights, experts' matrices and an output gradient."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator) - 0.5

    scores_TE = rand(num_tokens, num_experts) - skew * torch.arange(num_experts)
    experts_TK = scores_TE.topk(num_choices, dim=1).indices
    experts_TK[torch.rand(experts_TK.shape, generator=generator) < 0.1] = -1
    return {
        "x": rand(num_tokens, HIDDEN),
        "experts": experts_TK,
        "weights": rand(num_tokens, num_choices),
        "matrices": rand(num_experts, HIDDEN, HIDDEN),
        "dout": rand(num_tokens, HIDDEN),
    }


def outcome(case: dict[str, torch.Tensor], ep: Axis, in_float8: bool = False) -> dict[str, torch.Tensor]:
    """Output and gradients of this rank's tokens and experts."""
    num_experts = case["matrices"].shape[0]
    own = case["matrices"].chunk(ep.size)[ep.index].clone().requires_grad_()
    x, weights = (case[name].chunk(ep.size)[ep.index].clone().requires_grad_() for name in ("x", "weights"))
    routing = Routing(case["experts"].chunk(ep.size)[ep.index], weights)

    def compute(x_NH: torch.Tensor, weight_N1: torch.Tensor, counts_e: torch.Tensor) -> torch.Tensor:
        rows = x_NH.split(counts_e.tolist())
        return weight_N1 * torch.cat([torch.relu(part @ matrix) for part, matrix in zip(rows, own, strict=True)])

    out = through_experts(x, start_trip(routing, num_experts, ep), compute, in_float8=in_float8)
    out.backward(case["dout"].chunk(ep.size)[ep.index])
    parts = {"out": out.detach(), "dx": x.grad, "dweights": weights.grad, "dmatrices": own.grad}
    return {name: part.clone() for name, part in parts.items()}


def by_loops(case: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same without any permutation."""
    x, weights, matrices = (case[name].clone().requires_grad_() for name in ("x", "weights", "matrices"))
    rows = []
    for t, chosen in enumerate(case["experts"].tolist()):
        row = 0 * (x[t] + weights.sum() + matrices.sum())  # everything has a gradient, chosen or not
        for k, expert in enumerate(chosen):
            if expert >= 0:
                row = row + weights[t, k] * torch.relu(x[t] @ matrices[expert])
        rows.append(row)
    out = torch.stack(rows)
    out.backward(case["dout"])
    return {"out": out.detach(), "dx": x.grad, "dweights": weights.grad, "dmatrices": matrices.grad}


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 3), st.integers(3, 6), st.sampled_from([0.0, 0.1, 2.0]), st.integers(0, 99))
def test_one_rank_equals_loops(num_tokens: int, num_choices: int, num_experts: int, skew: float, seed: int) -> None:
    case = made_up(num_tokens, num_choices, num_experts, skew, seed)
    own = outcome(case, alone())
    for name, expected in by_loops(case).items():
        torch.testing.assert_close(own[name], expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 3), st.integers(3, 6), st.integers(0, 99))
def test_fp8_rounds_what_goes_to_experts(num_tokens: int, num_choices: int, num_experts: int, seed: int) -> None:
    """All follows from tokens and output gradients that were cast first: the expert's work is as it was."""
    case = made_up(num_tokens, num_choices, num_experts, 0.1, seed)
    rounded = {
        name: dequantise(quantise(case[name], "tile", E4M3), torch.float32) if name in ("x", "dout") else of
        for name, of in case.items()
    }
    own, expected = outcome(case, alone(), in_float8=True), outcome(rounded, alone())
    for name, of in expected.items():
        assert torch.equal(own[name], of), name


def _on_ranks(mesh: Mesh, cases: list[Any], in_float8: bool) -> list[Any]:
    """Each case both ways, with the account of each."""
    assert mesh.ep.by_node is not None
    results = []
    for case in cases:
        for ep in (replace(mesh.ep, by_node=None), mesh.ep):
            mesh.ledger.clear()
            results.append((outcome(case, ep, in_float8), mesh.ledger.table(), mesh.ledger.by_link()))
    return results


@pytest.mark.parametrize("in_float8", [False, True])
def test_ranks_equal_one_rank_and_send_what_is_predicted(in_float8: bool) -> None:
    """Even and skewed choices, up to one where all go to the first rank; more experts than ranks, and as many.

    Direct, all is equal bit for bit, and node-aware but for the order of additions.
    """
    cases = [made_up(24, 3, 8, skew, seed) for seed, skew in enumerate([0.0, 0.2, 9.0])] + [made_up(24, 1, 4, 0.3)]
    by_rank = run_on_mesh(on_nodes(small_job("mixtral", dp=4, ep=4), 2), _on_ranks, cases, in_float8)
    there = HIDDEN + 4 if in_float8 else 4 * HIDDEN  # one scale
    for number, case in enumerate(cases):
        direct, node_aware = ([results[2 * number + way] for results in by_rank] for way in range(2))
        for name, whole in outcome(case, alone(), in_float8).items():
            assert torch.equal(torch.cat([results[0][name] for results in direct]), whole), (number, name)
            torch.testing.assert_close(torch.cat([results[0][name] for results in node_aware]), whole)
        num_experts, top_k = case["matrices"].shape[0], case["experts"].shape[1]
        ranks = ExpertRanks(num_experts, num_ranks=4, ranks_per_node=2)
        counts, copies = count_choices(case["experts"].tolist(), ranks)
        backward = sent_direct(counts, ranks, 4 * HIDDEN, is_backward=True, there_bytes=there)
        for rank, (_, table, links) in enumerate(direct):
            assert sent(links) == sent_direct(counts, ranks, 4 * HIDDEN, there_bytes=there)[rank] + backward[rank]
            answer = 3 * 8 * num_experts // 4  # to three others
            assert table == {
                "all_to_all ep": {"count": 1, "bytes": 8 * num_experts},
                "all_to_all_v ep": {"count": 8 if in_float8 else 6, "bytes": sum(links.values()) - answer},
            }
        for rank, (_, _, links) in enumerate(node_aware):
            passes = [
                sent_node_aware(counts, copies, ranks, 4 * HIDDEN, top_k, is_backward, there_bytes=there)[rank]
                for is_backward in (False, True)
            ]
            assert sent(links) == passes[0] + passes[1]


def on_nodes(job: JobSpec, devices_per_node: int) -> JobSpec:
    """The job with node-aware dispatch on nodes of so many devices, as many as its plan needs."""
    nodes = max(1, job.plan.world // max(1, devices_per_node))
    plan = job.plan.model_copy(update={"dispatch": "node-aware"})
    cluster = job.cluster.model_copy(update={"devices_per_node": devices_per_node, "nodes": nodes})
    return job.model_copy(update={"plan": plan, "cluster": cluster})


@pytest.mark.parametrize(
    ("kind", "devices_per_node", "plan"),
    [
        (
            "deepseek",
            2,
            {"dp": 4, "ep": 4, "layers": 2, "recompute": "full"},
        ),  # groups of experts, and all computed twice
        # Dropped tokens; passes side by side, and in a backward a forward again.
        ("switch", 1, {"pp": 2, "dp": 2, "ep": 2, "schedule": "dualpipev", "recompute": "full"}),
    ],
)
def test_a_node_aware_plan_trains_as_one_rank_does(kind: str, devices_per_node: int, plan: dict[str, Any]) -> None:
    job = on_nodes(small_job(kind, **plan), devices_per_node)
    assert job_faults(job) == []
    check_rounding(against_one_rank(job), job)


def test_nodes_that_are_unknown_or_uneven_are_refused() -> None:
    job = small_job("mixtral", dp=4, ep=4)
    (unknown,) = job_faults(on_nodes(job, 0))
    assert "cluster.devices_per_node does not say where nodes end" in unknown
    (uneven,) = [fault for fault in job_faults(on_nodes(job, 3)) if "dispatch" in fault]
    assert "ep 4 = 4 neighbouring ranks exchange tokens, and nodes of 3 cut them unevenly" in uneven


def sent(links: dict[str, int]) -> Sent:
    return Sent(links.get("ep inside the node", 0), links.get("ep between nodes", 0))


def count_choices(experts_TK: list[list[int]], ranks: ExpertRanks) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of each rank that chose each expert, and each node, token by token."""
    counts = [[0] * ranks.num_experts for _ in range(ranks.num_ranks)]
    copies = [[0] * ranks.num_nodes for _ in range(ranks.num_ranks)]
    for token, chosen in enumerate(experts_TK):
        rank = token * ranks.num_ranks // len(experts_TK)
        kept = [expert for expert in chosen if expert >= 0]
        for expert in kept:
            counts[rank][expert] += 1
        for node in {ranks.node_of(ranks.rank_of(expert)) for expert in kept}:
            copies[rank][node] += 1
    return counts, copies
