"""What CUDA's compiler makes a kernel of is what a CPU computes in turn, to rounding, and is one graph."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.model import activation, fused_softmax, logit_change, rotary, weighed_activation
from shardwright.parallel.expert import expert_bias

EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}
T, V = 6, 37
NAMES = ("silu", "gelu", "gelu-tanh", "clamped-silu")


@dataclass(frozen=True)
class Case:
    """Both ways of an operator, arguments by number type, and how many roundings stand between a result and its largest
    term."""

    in_turn: Callable[..., None]
    at_once: Callable[..., None]
    arguments: Callable[[torch.dtype, torch.Generator], tuple[Any, ...]]
    roundings: int


def _draw(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def _turned(interleaved: bool, is_view: bool) -> Callable[[torch.dtype, torch.Generator], tuple[Any, ...]]:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        angles = _draw(generator, torch.float32, 5, 1, 1, 4)
        whole = torch.empty(5, 2, 3, 12, dtype=dtype)
        out = whole[..., 2:10] if is_view else torch.empty(5, 2, 3, 8, dtype=dtype)
        return _draw(generator, dtype, 5, 2, 3, 8), angles.cos(), angles.sin(), interleaved, out

    return arguments


def _gradient(dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
    """Logits, their largest, factors, rows, one of which is another rank's, gradients of targets, and where to."""
    rows = torch.randint(V, (T,), generator=generator)
    of_targets = torch.rand(T, generator=generator)
    of_targets[1] = 0.0
    logits = _draw(generator, torch.float32, T, V)
    out = logits if dtype == torch.float32 else torch.empty(T, V, dtype=dtype)
    return logits, logits.amax(-1) + 0.5, torch.rand(T, generator=generator), rows, of_targets, out


CASES = {
    **{
        f"gate {name}": Case(
            activation.gate_in_turn, activation._gate_at_once,
            lambda dtype, g, name=name: (_draw(g, dtype, 5, 2, 16), name, torch.empty(5, 2, 8, dtype=dtype)), 4,
        )
        for name in NAMES
    },
    **{
        f"gate backward {name}": Case(
            activation.gate_backward_in_turn, activation._gate_backward_at_once,
            lambda dtype, g, name=name: (
                _draw(g, dtype, 5, 2, 8), _draw(g, dtype, 5, 2, 16), name, torch.empty(5, 2, 16, dtype=dtype)
            ), 8,
        )
        for name in NAMES
    },
    **{
        f"activate {name}": Case(
            activation.activate_in_turn, activation._activate_at_once,
            lambda dtype, g, name=name: (_draw(g, dtype, 5, 16), name, torch.empty(5, 16, dtype=dtype)), 4,
        )
        for name in ("relu2", "quick-gelu")
    },
    **{
        f"activate backward {name}": Case(
            activation.activate_backward_in_turn, activation._activate_backward_at_once,
            lambda dtype, g, name=name: (
                _draw(g, dtype, 5, 16), _draw(g, dtype, 5, 16), name, torch.empty(5, 16, dtype=dtype)
            ), 10,
        )
        for name in ("relu2", "quick-gelu")
    },
    **{
        f"bias of experts{', weighed' * weighs}": Case(
            lambda *args: expert_bias._add_in_turn(args[-1], *args[:-1]),
            lambda *args: expert_bias._add_at_once(args[-1], *args[:-1]),
            lambda dtype, g, weighs=weighs: (
                _draw(g, dtype, 3, V), torch.randint(3, (T,), generator=g),
                torch.rand(T, 1, generator=g) if weighs else None, _draw(g, dtype, T, V),
            ), 4,
        )
        for weighs in (False, True)
    },
    "weights of biases": Case(
        expert_bias._of_weights_in_turn, expert_bias._of_weights_at_once,
        lambda dtype, g: (
            _draw(g, dtype, T, V), _draw(g, dtype, 3, V), torch.randint(3, (T,), generator=g), torch.empty(T, 1)
        ), 4,
    ),
    "scaled and capped logits": Case(
        lambda logits: logit_change._change_in_turn(logits, 0.3, 2.0),
        lambda logits: logit_change._change_at_once(logits, 0.3, 2.0),
        lambda dtype, g: (_draw(g, torch.float32, T, V),), 4,
    ),
    **{
        f"weigh{', gated' * gated}": Case(
            weighed_activation._weigh_in_turn, weighed_activation._weigh_at_once,
            lambda dtype, g, gated=gated: (
                _draw(g, dtype, T, 8 * (1 + gated)), torch.rand(T, 1, generator=g), "silu", gated,
                torch.empty(T, 8, dtype=dtype),
            ), 6,
        )
        for gated in (False, True)
    },
    **{
        f"weigh backward{', gated' * gated}": Case(
            weighed_activation._weigh_backward_in_turn, weighed_activation._weigh_backward_at_once,
            lambda dtype, g, gated=gated: (
                _draw(g, dtype, T, 8), _draw(g, dtype, T, 8 * (1 + gated)), torch.rand(T, 1, generator=g), "gelu",
                gated, torch.empty(T, 1), torch.empty(T, 8 * (1 + gated), dtype=dtype),
            ), 10,
        )
        for gated in (False, True)
    },
    "turn": Case(rotary._turn_in_turn, rotary._turn_at_once, _turned(interleaved=False, is_view=False), 4),
    "turn into a view": Case(rotary._turn_in_turn, rotary._turn_at_once, _turned(interleaved=True, is_view=True), 4),
    "sums": Case(
        fused_softmax._sums_in_turn, fused_softmax._sums_at_once,
        lambda dtype, g: (_draw(g, torch.float32, T, V), _draw(g, torch.float32, T), False, torch.empty(T)), 2 * V,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("name", CASES)
def test_at_once_is_what_is_computed_in_turn(name: str, dtype: torch.dtype) -> None:
    case, results = CASES[name], []
    for work in (case.in_turn, case.at_once, _traced(case.at_once)):
        arguments = case.arguments(dtype, torch.Generator().manual_seed(3))
        work(*arguments)
        results.append(arguments[-1].float())
    in_turn, *others = results
    number = torch.float32 if name == "sums" else dtype
    for other in others:
        bound = case.roundings * EPSILON[number] * in_turn.abs().amax()
        assert (other - in_turn).abs().amax() <= bound


@pytest.mark.parametrize("cap", [0.0, 4.0])
@pytest.mark.parametrize("dtype", EPSILON)
def test_gradient_of_a_softmax_at_once(dtype: torch.dtype, cap: float) -> None:
    """From exponentials in turn, and from the logits themselves at once, or where these are capped."""
    results = []
    for is_in_turn in (True, False):
        logits, largest, *rest, out = _gradient(dtype, torch.Generator().manual_seed(3))
        if is_in_turn:
            fused_softmax._sums_in_turn(logits, largest, cap > 0, torch.empty(T))
            fused_softmax._gradient_in_turn(logits, largest, *rest, cap, out)
        else:
            _traced(fused_softmax._gradient_at_once)(logits, largest, *rest, cap, out)
        results.append(out.float())
    in_turn, at_once = results
    assert (at_once - in_turn).abs().amax() <= 6 * EPSILON[dtype] * in_turn.abs().amax()
    assert (at_once[1].float() > 0).all(), "a target of another rank is not subtracted"


def _traced(work: Callable[..., None]) -> Callable[..., None]:
    """As the compiler takes it apart, in one graph and for all shapes, but computed by torch's operators."""
    torch.compiler.reset()  # each name of an activation is a graph of its own, and there may be so many of a function
    traced: Callable[..., None] = torch.compile(work, backend="aot_eager", fullgraph=True, dynamic=True)
    return traced
