"""Tokens travel to their experts and back: outputs, gradients and bytes, whatever the size of the axis."""

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import small_job
from ranks import run_on_mesh
from shardwright.parallel.collectives import Axis
from shardwright.parallel.expert import Routing, through_experts
from shardwright.parallel.ledger import Ledger
from shardwright.parallel.mesh import Mesh

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


def outcome(case: dict[str, torch.Tensor], ep: Axis) -> dict[str, torch.Tensor]:
    """Output and gradients of this rank's tokens and experts."""
    num_experts = case["matrices"].shape[0]
    mine = case["matrices"].chunk(ep.size)[ep.index].clone().requires_grad_()
    x, weights = (case[name].chunk(ep.size)[ep.index].clone().requires_grad_() for name in ("x", "weights"))
    routing = Routing(case["experts"].chunk(ep.size)[ep.index], weights)

    def compute(x_NH: torch.Tensor, counts_e: torch.Tensor) -> torch.Tensor:
        rows = x_NH.split(counts_e.tolist())
        return torch.cat([torch.relu(part @ matrix) for part, matrix in zip(rows, mine, strict=True)])

    out = through_experts(x, routing, compute, num_experts, ep)
    out.backward(case["dout"].chunk(ep.size)[ep.index])
    parts = {"out": out.detach(), "dx": x.grad, "dweights": weights.grad, "dmatrices": mine.grad}
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


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 3), st.integers(3, 6), st.sampled_from([0.0, 0.1, 2.0]), st.integers(0, 99))
def test_one_rank_equals_loops(num_tokens: int, num_choices: int, num_experts: int, skew: float, seed: int) -> None:
    case = made_up(num_tokens, num_choices, num_experts, skew, seed)
    mine = outcome(case, alone())
    for name, expected in by_loops(case).items():
        torch.testing.assert_close(mine[name], expected, rtol=1e-5, atol=1e-6)


def _on_ranks(mesh: Mesh, cases: list[Any]) -> list[Any]:
    results = []
    for case in cases:
        mesh.ledger.clear()
        results.append((outcome(case, replace(mesh.dp, name="ep")), mesh.ledger.table()))
    return results


def test_ranks_equal_one_rank_bit_for_bit_and_count_what_leaves_them() -> None:
    """Even and skewed choices, up to one where all go to the first rank; more experts than ranks, and as many."""
    cases = [made_up(24, 3, 8, skew, seed) for seed, skew in enumerate([0.0, 0.2, 9.0])] + [made_up(24, 1, 4, 0.3)]
    by_rank = run_on_mesh(small_job(dp=4), _on_ranks, cases)
    for number, case in enumerate(cases):
        expected = outcome(case, alone())
        for name, whole in expected.items():
            together = torch.cat([results[number][0][name] for results in by_rank])
            assert torch.equal(together, whole), (number, name)
        num_experts = case["matrices"].shape[0]
        for rank, results in enumerate(by_rank):
            table = results[number][1]
            assert table["all_to_all ep"] == {"count": 1, "bytes": 8 * num_experts}
            home = case["experts"] // (num_experts // 4)  # stays -1 where dropped
            source = torch.arange(24)[:, None].expand_as(home) // 6
            leaves = (home >= 0) & (home != source)
            # There with the token and the output's gradient, back with the output and the token's gradient.
            rows = 2 * (leaves & (source == rank)).sum() + 2 * (leaves & (home == rank)).sum()
            assert table["all_to_all_v ep"] == {"count": 4, "bytes": 4 * HIDDEN * int(rows)}
