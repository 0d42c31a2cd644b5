"""Every gate, every way of making room and every balance rule, against plain loops (moe_reference.py)."""

from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwright.config.gate_facts import GATES as ALL_GATES
from shardwright.config.moe import MoeSpec
from shardwright.model.balance import Chosen, add_losses, balance_loss, z_loss
from shardwright.model.capacity import fit
from shardwright.model.gates.choice import Choice, Known, make_gate
from shardwright.parallel.tensor.counter_rng import uniform
from support import moe_reference as plain

SEQUENCE, BATCH, EXPERTS = 6, 3, 8
TOKENS = SEQUENCE * BATCH
GATES: dict[str, dict[str, Any]] = {
    "softmax": {"top_k": 3},
    "softmax-as-it-is": {"top_k": 3, "normalise": False, "routed_scaling": 1.5},
    "mixtral": {"softmax_over": "chosen"},
    "deepseek-v2": {"top_k": 3, "num_groups": 4, "groups_kept": 2, "group_score": "max", "normalise": False},
    "deepseek-v3": {"top_k": 3, "gate": "sigmoid", "num_groups": 4, "groups_kept": 2, "routed_scaling": 2.5},
    "sigmoid-as-it-is": {"gate": "sigmoid", "normalise": False},
    "ernie": {"top_k": 3, "gate": "biased-softmax"},
    "switch": {"gate": "switch"},
    "gshard": {"gate": "gshard"},
    "expert-choice": {"gate": "expert-choice", "capacity_factor": 1.3},
    "correlation": {"top_k": 3, "gate": "correlation", "partners": 3},
}
ROOM: dict[str, dict[str, Any]] = {
    "dropless": {},
    "position": {"capacity_factor": 0.8},
    "probability": {"capacity_factor": 0.8, "overflow": "drop-probability"},
    "reroute": {"capacity_factor": 1.0, "overflow": "reroute"},
    "reroute-tight": {"capacity_factor": 0.6, "overflow": "reroute"},
}


def test_every_gate_is_held_against_a_plain_loop() -> None:
    """And its facts name what there is."""
    assert {case.get("gate", "softmax") for case in GATES.values()} == set(ALL_GATES)
    for facts in ALL_GATES.values():
        assert facts.reads <= MoeSpec.model_fields.keys() and facts.adds_to_one in ("always", "never", "as asked")
        module, _, name = facts.rule.partition(":")
        assert hasattr(import_module(module), name)


def spec_of(gate: str, **more: Any) -> MoeSpec:
    spec = MoeSpec(**{"experts": EXPERTS} | GATES[gate] | more)
    assert spec.faults(2) == []
    return spec


def known(seed: int) -> Known:
    generator = torch.Generator().manual_seed(seed + 1000)
    together_EE = torch.randint(0, 3, (EXPERTS, EXPERTS), generator=generator).float()
    together_EE[2] = 0  # was never chosen with another
    bias_E = torch.randn(EXPERTS, generator=generator) * 0.3
    return Known(bias_E, together_EE, uniform(torch.arange(TOKENS), seed))


def chosen_logits(seed: int) -> Tensor:
    """Skewed, so that some experts overflow."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, EXPERTS, generator=generator) + torch.linspace(1.0, 0.0, EXPERTS)


def as_dicts(choice: Choice, weights_TK: Tensor) -> list[dict[int, float]]:
    rows = zip(choice.experts_TK.tolist(), choice.holds_TK.tolist(), weights_TK.tolist(), strict=True)
    return [{e: w for e, holds, w in zip(*row, strict=True) if holds} for row in rows]


def reference(spec: MoeSpec, logits_TE: Tensor, about: Known) -> tuple[plain.Routed, list[dict[int, float]]]:
    """The choices of the real tokens, and their weights, as if there were no others."""
    real_T = slice(None) if about.real_T is None else about.real_T
    logits = logits_TE[real_T].double().tolist()
    draws = None if about.draws_T is None else about.draws_T[real_T].tolist()
    routed = plain.route(spec, logits, about.bias_E.tolist(), about.together_EE.tolist(), draws)
    return routed, plain.with_room(spec, logits, routed)


def with_filling(about: Known, filling: set[int]) -> Known:
    """The known facts, where these tokens only fill samples up."""
    real_T = torch.tensor([t not in filling for t in range(TOKENS)])
    return replace(about, real_T=real_T, num_real=TOKENS - len(filling))


@pytest.mark.parametrize(
    ("gate", "room"), [(gate, room) for gate in GATES for room in ROOM if gate != "expert-choice" or room == "dropless"]
)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), filling=st.none() | st.sets(st.integers(0, TOKENS - 1), max_size=TOKENS - 1))
def test_gate_and_room(gate: str, room: str, seed: int, filling: set[int] | None) -> None:
    """Filling asks for no expert, takes no room, and has no part in how much there is."""
    spec, logits_TE, about = spec_of(gate, **ROOM[room]), chosen_logits(seed), known(seed)
    about = about if filling is None else with_filling(about, filling)
    real = [t for t in range(TOKENS) if t not in (filling or ())]
    rule = make_gate(spec)
    scores_TE = rule.score(logits_TE)
    choice = rule.choose(scores_TE, about)
    weights_TK = rule.weigh(logits_TE, scores_TE, choice.experts_TK)
    routed, expected = reference(spec, logits_TE, about)
    result = as_dicts(choice, weights_TK)
    assert [list(result[t]) for t in real] == routed.experts
    capacity = None if rule.sees_all else spec.capacity(len(real))
    if capacity is not None:
        choice = fit(choice, weights_TK, capacity, spec.overflow)
        weights_TK = rule.weigh(logits_TE, scores_TE, choice.experts_TK)
        assert torch.bincount(choice.experts_TK[choice.holds_TK], minlength=EXPERTS).max() <= capacity
    result = as_dicts(choice, weights_TK)
    assert not any(result[t] for t in filling or ())
    assert [set(result[t]) for t in real] == [set(token) for token in expected]
    for token, wanted in zip((result[t] for t in real), expected, strict=True):
        assert token == pytest.approx(wanted, rel=1e-5)


def test_something_overflows_in_these_tests() -> None:
    for room in ("position", "reroute-tight"):
        spec = spec_of("softmax", **ROOM[room])
        routed, expected = reference(spec, chosen_logits(0), known(0))
        assert sum(map(len, expected)) < sum(map(len, routed.experts))
    spec = spec_of("softmax", **ROOM["reroute"])
    routed, expected = reference(spec, chosen_logits(0), known(0))
    assert any(set(after) - set(before) for after, before in zip(expected, routed.experts, strict=True))


def test_among_equals_the_lower_number() -> None:
    for gate, wanted in (("softmax", [0, 1, 2]), ("switch", [0]), ("gshard", [0, 1])):
        spec = spec_of(gate)
        rule, about = make_gate(spec), replace(known(0), draws_T=None)
        scores_TE = rule.score(torch.zeros(2, EXPERTS))
        assert rule.choose(scores_TE, about).experts_TK.tolist() == [wanted, wanted]


@pytest.mark.parametrize(("gate", "room"), [("expert-choice", "dropless"), ("softmax", "probability")])
def test_among_tokens_that_differ_by_rounding_the_earlier(gate: str, room: str) -> None:
    """Four tokens begin a document alike. Whatever the last bits of their scores, the first ones find room."""
    spec, about = spec_of(gate, **ROOM[room]), known(0)
    rule, logits_TE = make_gate(spec), chosen_logits(1)
    alike = [2, 7, 11, 13]
    logits_TE[alike] = logits_TE[0] + 1.0
    results = []
    for seed in range(8):
        noise_AE = torch.rand(len(alike), EXPERTS, generator=torch.Generator().manual_seed(seed)) - 0.5
        rounded_TE = logits_TE.index_add(0, torch.tensor(alike), noise_AE * 2.0**-21)
        scores_TE = rule.score(rounded_TE)
        choice = rule.choose(scores_TE, about)
        if not rule.sees_all:
            weights_TK = rule.weigh(rounded_TE, scores_TE, choice.experts_TK)
            choice = fit(choice, weights_TK, 3, spec.overflow)
        results.append([set(token) for token in as_dicts(choice, choice.experts_TK.float())])
    assert all(other == results[0] for other in results)
    assert any(results[0][a] != results[0][b] for a, b in pairwise(alike))  # there is not room for all of them


def test_the_second_expert_is_drawn_as_often_as_it_weighs() -> None:
    spec = spec_of("gshard")
    rule, n = make_gate(spec), 4000
    scores_TE = rule.score(torch.tensor([2.0, 1.0, *[-5.0] * 6]).repeat(n, 1))
    about = replace(known(0), draws_T=uniform(torch.arange(n), 7))
    second = rule.weigh(torch.empty(0), scores_TE, rule.choose(scores_TE, about).experts_TK)[0, 1].item()
    share = rule.choose(scores_TE, about).holds_TK[:, 1].float().mean().item()
    assert share == pytest.approx(2 * second, abs=4 * (2 * second * (1 - 2 * second) / n) ** 0.5)
    assert rule.choose(scores_TE, replace(about, draws_T=None)).holds_TK.all()


def test_draws_are_even() -> None:
    draws = uniform(torch.arange(100_000), 3)
    assert draws.min() >= 0 and draws.max() < 1
    counts = torch.histc(draws, 10, 0, 1)
    assert (counts - 10_000).abs().max() < 4 * (100_000 * 0.1 * 0.9) ** 0.5


def gradient(make: Any, logits_TE: Tensor) -> Tensor:
    leaf = logits_TE.double().requires_grad_()
    make(leaf).backward()
    assert leaf.grad is not None
    return leaf.grad


SCOPES = ("microbatch", "sequence", "global")


@pytest.mark.parametrize("filling", [set(), {3, 6, 9, 12, 15, 17}], ids=["full", "filled-up"])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("loss", ["switch", "gshard"])
@pytest.mark.parametrize("gate", ["softmax", "deepseek-v3", "gshard"])
def test_balance_losses(gate: str, loss: str, scope: str, filling: set[int]) -> None:
    """Value and gradient. The gradient of the reference is taken by differences, with the choices held fast.

    The parts of real tokens weigh as their share of all, and filling has none.
    """
    spec = spec_of(gate, aux_loss=loss, aux_scope=scope, aux_coefficient=0.03, z_coefficient=0.02)
    logits_TE, about = chosen_logits(5), with_filling(known(5), filling)
    real = [t for t in range(TOKENS) if t not in filling]
    samples = [t % BATCH for t in real]
    shares = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(0)).double()
    routed, _ = reference(spec, logits_TE, about)
    counts_BE = torch.zeros(BATCH, EXPERTS)
    for sample, experts in zip(samples, routed.experts, strict=True):
        for e in experts[: 1 if loss == "gshard" else None]:
            counts_BE[sample, e] += 1
    chosen = Chosen(counts_BE, torch.bincount(torch.tensor(samples), minlength=BATCH))

    def mine(logits_TE: Tensor) -> Tensor:
        scores_TE = make_gate(spec).score(logits_TE)
        likelihood_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True) * about.real_T[:, None]
        balance = balance_loss(likelihood_TE.unflatten(0, (SEQUENCE, BATCH)), chosen, shares, SEQUENCE, spec)
        return balance + z_loss(logits_TE, about.real_T, TOKENS, spec)

    def expected(logits_TE: Tensor) -> float:
        losses = plain.losses_of(spec, logits_TE[real].tolist(), routed, samples, shares.tolist())
        return sum(losses) * len(real) / TOKENS

    exact_TE = logits_TE.double()
    assert mine(exact_TE).item() == pytest.approx(expected(exact_TE), rel=1e-6)
    result, step = gradient(mine, logits_TE), 1e-5
    assert not result[sorted(filling)].any()
    for t, e in ((0, 0), (4, 3), (17, 7)):
        up, down = exact_TE.clone(), exact_TE.clone()
        up[t, e] += step
        down[t, e] -= step
        assert result[t, e].item() == pytest.approx((expected(up) - expected(down)) / (2 * step), rel=1e-4, abs=1e-9)


def test_the_losses_hang_on_the_weights() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = add_losses(x * 3.0, (x**2).sum(), 0.5)
    assert torch.equal(y, x * 3.0)
    (y * 10.0).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [30.0 + 0.5 * 2.0, 30.0 + 0.5 * 4.0]
