"""Operators that CUDA's compiler makes one kernel of give what a CPU computes in turn, to rounding, as one graph."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.model import activation, fused_softmax, loss, rotary, weighed_activation
from shardwright.parallel.expert import expert_bias
from shardwright.precision import fused_operator
from shardwright.precision.fused_operator import compiled

pytestmark = pytest.mark.long

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


def _into_halves(work: Callable[..., None]) -> Callable[..., None]:
    """The work into the halves of its last argument."""
    return lambda *args: work(*args[:-1], *args[-1].chunk(2, dim=-1))


def _turned_back(width: int) -> Callable[[torch.dtype, torch.Generator], tuple[Any, ...]]:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        angles = _draw(generator, torch.float32, 5, 1, 1, 1, width // 2)
        dq, dk, dv = (_draw(generator, dtype, 5, 2, 3, heads, 8) for heads in (4, 1, 1))
        return dq, dk, dv, angles.cos(), angles.sin(), torch.empty(5, 2, 3, 6, 8, dtype=dtype)

    return arguments


def _split(part: int) -> Callable[[torch.dtype, torch.Generator], tuple[Any, ...]]:
    """Queries, keys and values of one tensor; the part that is looked at stands last."""

    def arguments(dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        angles = _draw(generator, torch.float32, 5, 1, 1, 1, 3)
        outs = [torch.empty(5, 2, 3, heads, 8, dtype=dtype) for heads in (4, 1, 1)]
        others = [out for i, out in enumerate(outs) if i != part]
        return _draw(generator, dtype, 5, 2, 3, 6, 8), angles.cos(), angles.sin(), *others, outs[part]

    return arguments


def _in_order(work: Callable[..., None], part: int) -> Callable[..., None]:
    def call(qkv: Tensor, cosine: Tensor, sine: Tensor, *outs: Tensor) -> None:
        others = list(outs[:2])
        others.insert(part, outs[2])
        work(qkv, cosine, sine, *others)

    return call


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
            lambda dtype, g, name=name: (_draw(g, dtype, 10, 16), name, torch.empty(10, 8, dtype=dtype)), 4,
        )
        for name in NAMES
    },
    **{
        f"gate backward {name}": Case(
            _into_halves(activation.gate_backward_in_turn), _into_halves(activation._gate_backward_at_once),
            lambda dtype, g, name=name: (
                _draw(g, dtype, 10, 8), _draw(g, dtype, 10, 16), name, torch.empty(10, 16, dtype=dtype)
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
        expert_bias._weight_gradients_in_turn, expert_bias._weight_gradients_at_once,
        lambda dtype, g: (
            _draw(g, dtype, T, V), _draw(g, dtype, 3, V), torch.randint(3, (T,), generator=g), torch.empty(T, 1)
        ), 4,
    ),
    "scaled and capped logits": Case(
        lambda logits: loss._change_in_turn(logits, 0.3, 2.0),
        lambda logits: loss._change_at_once(logits, 0.3, 2.0),
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
    "weigh backward": Case(
        weighed_activation._weigh_backward_in_turn, weighed_activation._weigh_backward_at_once,
        lambda dtype, g: (
            _draw(g, dtype, T, 8), _draw(g, dtype, T, 8), torch.rand(T, 1, generator=g), "gelu", torch.empty(T, 1),
            torch.empty(T, 8, dtype=dtype),
        ), 10,
    ),
    "weigh backward, gated": Case(
        _into_halves(weighed_activation._weigh_gated_backward_in_turn),
        _into_halves(weighed_activation._weigh_gated_backward_at_once),
        lambda dtype, g: (
            _draw(g, dtype, T, 8), _draw(g, dtype, T, 16), torch.rand(T, 1, generator=g), "gelu", torch.empty(T, 1),
            torch.empty(T, 16, dtype=dtype),
        ), 10,
    ),
    "turn": Case(rotary._turn_in_turn, rotary._turn_at_once, _turned(interleaved=False, is_view=False), 4),
    "turn into a view": Case(rotary._turn_in_turn, rotary._turn_at_once, _turned(interleaved=True, is_view=True), 4),
    **{
        f"turn back, {width} of 8": Case(
            rotary._turn_back_in_turn, rotary._turn_back_at_once, _turned_back(width), 4
        )
        for width in (6, 8)
    },
    **{
        f"split and turn, {name}": Case(
            _in_order(rotary._split_and_turn_in_turn, part), _in_order(rotary._split_and_turn_at_once, part),
            _split(part), 4,
        )
        for part, name in enumerate(("queries", "keys", "values"))
    },
    "sums": Case(
        fused_softmax._sums_in_turn, fused_softmax._sums_at_once,
        lambda dtype, g: (_draw(g, torch.float32, T, V), _draw(g, torch.float32, T), False, torch.empty(T)), 2 * V,
    ),
}  # fmt: skip


def test_a_kernel_serves_any_number_of_tokens_and_one_width() -> None:
    """It is compiled for halves of one tensor as for two tensors: the warm-up has the layouts alone."""
    torch.compiler.reset()
    num_graphs = 0

    def counted_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    # A function of its own: what is compiled is kept for each.
    work = compiled(lambda *args: activation._gate_backward_at_once(*args), counted_graph)
    for rows, width, number in ((4, 8, 1), (6, 8, 1), (5, 8, 1), (5, 6, 2)):
        dy, fused = torch.randn(rows, width), torch.randn(rows, 2 * width)
        apart = [torch.empty_strided((rows, width), (2 * width, 1)) for _ in range(2)]
        whole = torch.empty_like(fused)
        work(dy, fused, "silu", *apart)
        work(dy, fused, "silu", *activation.halves(whole))
        torch.testing.assert_close(whole, torch.cat(apart, dim=1))
        assert num_graphs == number


@pytest.mark.sampled(4)
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


@pytest.mark.sampled(2)
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


def test_the_compiler_counts_the_layouts_of_each_operator_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two operators of as many layouts as one may have: each layout has its graph."""
    monkeypatch.setattr(fused_operator, "_MOST_LAYOUTS", 2)
    num_graphs = 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    def add(x: Tensor, out: Tensor) -> None:
        out.copy_(x + 1)

    def double(x: Tensor, out: Tensor) -> None:
        out.copy_(x * 2)

    for work in (add, double):
        for width in (3, 5):
            x = torch.ones(T, 2, width)
            compiled(work, counting)(x, out := torch.empty_like(x))
            assert torch.equal(out, torch.full_like(x, 2))
    assert num_graphs == 4
