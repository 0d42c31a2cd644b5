"""Timing of one rank's computing: this runtime's own operators, forward and backward, at some sizes.

An operator runs as in a step: a product was computed just before, which leaves little of other data in the caches; then
the input was written; and the operator's output, its weights and its saved tensors are not in caches. Alone, in a loop,
it would take a fraction of that time. On a device with a clock of its own many calls are one round, each with other
tensors than the previous calls (device_rounds.py): work between calls would be measured, too.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardwright.config.measured_table import Work
from shardwright.config.model import ModelSpec
from shardwright.config.optimizer import OptimizerSpec
from shardwright.measure.calibrate.device_rounds import DeviceClock, rounds_call
from shardwright.measure.calibrate.measuring_place import Call, Place
from shardwright.model.activation import activate, activate_gated
from shardwright.model.attention_core import dot_product_attention
from shardwright.model.decoder import DecoderStage, StageSpan
from shardwright.model.forward_pass import ForwardPass
from shardwright.model.norm import Norm
from shardwright.model.position_tables import PositionTables
from shardwright.model.rotary import rotary_angles, split_and_rotate
from shardwright.parallel.context.attention_rule import AttentionRule
from shardwright.parallel.context.block_attention import Merged
from shardwright.parallel.optimizers.elementwise import make_optimizer
from shardwright.parallel.tensor.linear import ColumnLinear
from shardwright.parallel.zero.master_weights import Masters, ShardPiece

_WIDTH, _HEADS, _HEAD = 512, 4, 64  # width of a residual stream; heads of attention, and their width
_IN_A_ROW = 3  # calls of an operator, before their backwards


def operator_call(
    place: Place, function: Callable[[Tensor], Tensor], *shape: int, other_inputs: Sequence[Tensor] = ()
) -> Call:
    """An operator of one tensor: several forwards, then their backwards in reverse order. `other_inputs` get a gradient
    too."""
    if place.clock is not None:
        return rounds_call(place.clock, _operator_passes(place, function, shape, other_inputs))
    inputs = [place.random(*shape).requires_grad_() for _ in range(_IN_A_ROW)]
    compute_product = place.product_between()
    with torch.no_grad():
        gradient = place.random(*function(inputs[0]).shape)

    def call() -> tuple[float, ...]:
        forward_s, backward_s, results = 0.0, 0.0, []
        for x in inputs:
            compute_product()
            x.detach().mul_(1.0)
            start_s = place.now_s()
            results.append(function(x))
            forward_s += place.now_s() - start_s
        while results:
            result = results.pop()
            compute_product()
            gradient.mul_(1.0)
            start_s = place.now_s()
            torch.autograd.backward(result, gradient)
            backward_s += place.now_s() - start_s
            del result
        for x in inputs:
            x.grad = None
        return forward_s / len(inputs), backward_s / len(inputs)

    return call


def _operator_passes(
    place: Place, function: Callable[[Tensor], Tensor], shape: Sequence[int], other_inputs: Sequence[Tensor]
) -> list[Callable[[int], object]]:
    """Forward and backward; each call takes the next of some inputs and their results."""
    values = place.random(*shape)
    inputs = [values.clone().requires_grad_() for _ in range(place.copies_of(values.nbytes))]
    results = [function(x) for x in inputs]
    gradient = place.random(*results[0].shape)

    def backward(number: int) -> None:
        for leaf in (*inputs, *other_inputs):
            leaf.grad = None  # else the gradient would be added to the previous one
        torch.autograd.backward(results[number % len(results)], gradient, retain_graph=True)

    return [lambda number: function(inputs[number % len(inputs)]), backward]


def product_call(place: Place, rows: int, inner: int, columns: int) -> Call:
    """Y = X W', dX = dY W, and dW = dY' X, which is accumulated; each call takes the next of some weights."""
    weights_bytes = inner * columns * (place.dtype.itemsize + 4)
    written_bytes = rows * columns * place.dtype.itemsize if place.clock is not None else 0  # of Y
    linears = [
        place.filled(ColumnLinear(inner, (columns,), 0, place.sharding, std=0.02))
        for _ in range(place.copies_of(weights_bytes + written_bytes))
    ]
    x = place.random(rows, 1, inner).requires_grad_()
    dy = place.random(rows, 1, columns)
    if place.clock is not None:
        return _product_rounds(place, place.clock, linears, x, dy)
    number, results = 0, deque[Tensor](maxlen=place.copies_of(dy.nbytes))

    def call() -> tuple[float, ...]:
        nonlocal number
        number += 1
        linear = linears[number % len(linears)]
        x.detach().mul_(1.0)
        times = [place.now_s()]
        y = linear(x)
        times.append(place.now_s())
        with place.sharding.deferred.keeping(0):
            torch.autograd.backward(y, dy)
        times.append(place.now_s())
        place.sharding.deferred.compute(0)
        times.append(place.now_s())
        x.grad = None
        results.append(y.detach())  # kept, as in a step, so that the next result is in other memory
        return tuple(end - start for start, end in pairwise(times))

    return call


def _product_rounds(
    place: Place, clock: DeviceClock, linears: Sequence[Callable[[Tensor], Tensor]], x: Tensor, dy: Tensor
) -> Call:
    """Products with some weights: a round has all results first, then all input gradients, then all weight
    gradients."""
    results, deferred = [linear(x) for linear in linears], place.sharding.deferred

    def input_gradient(number: int) -> None:
        x.grad = None
        with deferred.keeping(number):
            torch.autograd.backward(results[number % len(results)], dy, retain_graph=True)

    return rounds_call(clock, [lambda n: linears[n % len(linears)](x), input_gradient, deferred.compute])


def norm_call(place: Place, elements: int, norm: str) -> Call:
    """A norm of the residual stream."""
    spec = ModelSpec(hidden=_WIDTH, heads=_WIDTH // _HEAD, norm=norm)  # type: ignore[arg-type]
    return operator_call(place, place.filled(Norm(spec, place.sharding)), max(1, elements // _WIDTH), 1, _WIDTH)


def rotary_call(place: Place, elements: int) -> Call:
    """The rotation of queries and keys, and a copy of the values."""
    tokens = max(1, elements // (3 * _HEADS * _HEAD))
    angles = rotary_angles(torch.arange(tokens, device=place.device), _HEAD, 10_000.0)

    def rotate(x: Tensor) -> Tensor:
        q, k, v = split_and_rotate(x.view(tokens, 1, _HEADS, 3, _HEAD), *angles)
        return _OneOfThree.apply(x, q, k, v)

    return operator_call(place, rotate, tokens, 1, _HEADS, 3, _HEAD)


class _OneOfThree(torch.autograd.Function):
    """One tensor of the size of three, which represents them: it moves only views of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parts: Tensor) -> Tensor:
        ctx.parts = parts  # attention keeps them
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grads[0].split((1, 1, 1), dim=3)


def attention_call(place: Place, length: int, heads: int) -> Call:
    """Causal attention of `heads` heads over sequences of one length."""
    heads_at_once = min(heads, _HEADS)
    shape = (length, max(1, heads // heads_at_once), heads_at_once, _HEAD)
    keys, values = (place.random(*shape).requires_grad_() for _ in range(2))

    run = ForwardPass(PositionTables(), None)

    def attend(queries: Tensor) -> Tensor:
        out = dot_product_attention(queries, keys, values, AttentionRule(), sharding=place.sharding, run=run)
        return out.reshape(length, shape[1], -1)

    return operator_call(place, attend, *shape, other_inputs=(keys, values) if place.clock is not None else ())


def gated_call(place: Place, elements: int) -> Call:
    """silu(gate) x up."""
    return operator_call(place, partial(activate_gated, name="silu"), max(1, elements // _WIDTH), 1, 2 * _WIDTH)


def activation_call(place: Place, elements: int) -> Call:
    """gelu."""
    return operator_call(place, partial(activate, name="gelu"), max(1, elements // _WIDTH), 1, _WIDTH)


def join_call(place: Place, elements: int) -> Call:
    """A sum with the residual stream; in the backward the sum of its two gradients."""
    branch = place.random(max(1, elements // _WIDTH), 1, _WIDTH)

    def join(x: Tensor) -> Tensor:
        stream = x.view_as(x)
        return _Branches.apply(stream, _Branch.apply(stream), branch)

    return operator_call(place, join, *branch.shape)


class _Branch(torch.autograd.Function):
    """A reader of the stream: its backward returns a gradient in memory of its own, and moves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _Branches(torch.autograd.Function):
    """The sum stream + branch, in which `other` is read instead of the branch."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, branch: Tensor, other: Tensor) -> Tensor:
        return stream + other

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], grads[0], None


def merge_call(place: Place, elements: int) -> Call:
    """A call that merges the results of two ranks' keys for the same queries, and in the backward sums the gradients of
    queries."""
    shape = (1, max(1, elements // (2 * _WIDTH)), _WIDTH // _HEAD, _HEAD)  # [B, S, N, D] in memory
    blocks = [place.random(*shape).transpose(1, 2) for _ in range(2)]
    sums = [torch.randn(blocks[0].shape[:3], device=place.device) for _ in range(2)]

    def merge(_: int) -> None:
        merged = Merged(blocks[0], sums[0].clone())
        merged.add(slice(None), blocks[1], sums[1])
        merged.out_BNSD.to(place.dtype).permute(2, 0, 1, 3)

    def add_up(_: int) -> None:
        total = torch.zeros(blocks[0].permute(2, 0, 1, 3).shape, dtype=torch.float32, device=place.device)
        for block in blocks:
            total += block.permute(2, 0, 1, 3)
        total.to(place.dtype)

    return place.timing([merge, add_up], is_after_product=True)


_ROWS, _NARROW = 2048, 64  # rows of a vocabulary; width of a hidden state that makes its product short


def _piece(place: Place, tokens: int, is_first: bool) -> DecoderStage:
    """A stage that is only the embedding, or only the head."""
    hidden = _WIDTH if is_first else _NARROW
    spec = ModelSpec(hidden=hidden, heads=hidden // _HEAD, vocab=_ROWS, layers=1, sequence=tokens)
    stage = DecoderStage(spec, StageSpan(0, 0, 0, is_first=is_first, is_last=not is_first), place.sharding)
    assert isinstance(place.filled(stage.prepare(place.device, place.dtype)), DecoderStage)
    return stage


def embedding_call(place: Place, elements: int) -> Call:
    """A lookup, and the sum of its gradients in a table."""
    tokens = max(1, elements // _WIDTH)
    stage = _piece(place, tokens, is_first=True)
    rows = torch.randint(_ROWS, (tokens, 1), device=place.device)
    assert stage.embedding is not None
    lookup = stage.embedding
    return operator_call(place, lambda _: lookup(rows), tokens, 1, _WIDTH)


def loss_call(place: Place, elements: int) -> Call:
    """The head and the loss of `elements` logits, minus the head's product and the norm before it, timed separately."""
    tokens = max(1, elements // _ROWS)
    stage = _piece(place, tokens, is_first=False)
    targets = torch.randint(_ROWS, (1, tokens), device=place.device)
    x = place.random(tokens, 1, _NARROW).requires_grad_()
    linear = product_call(place, tokens, _NARROW, _ROWS)
    assert stage.norm is not None
    norm = operator_call(place, stage.norm, tokens, 1, _NARROW)
    if place.clock is not None:
        return _loss_rounds(place.clock, stage, x, targets, (norm, linear))

    def call() -> tuple[float, ...]:
        norm()  # and the products between
        x.detach().mul_(1.0)
        start_s = place.now_s()
        loss = stage(x, targets).mean()
        middle_s = place.now_s()
        torch.autograd.backward(loss)
        end_s = place.now_s()
        x.grad = None
        norm_s = norm()
        product_s, input_grad_s, weight_grad_s = linear()
        forward_s = max(0.0, middle_s - start_s - norm_s[0] - product_s)
        whole_s = end_s - start_s - sum(norm_s) - product_s - input_grad_s - weight_grad_s
        return forward_s, max(0.0, whole_s - forward_s)

    return call


def _loss_rounds(
    clock: DeviceClock, stage: DecoderStage, x: Tensor, targets: Tensor, separate_calls: tuple[Call, Call]
) -> Call:
    """The head and the loss by rounds, minus the norm and the product."""
    loss = [stage(x, targets).mean()]

    def forward(_: int) -> None:
        loss[0] = stage(x, targets).mean()

    def backward(_: int) -> None:
        x.grad = None
        torch.autograd.backward(loss[0], retain_graph=True)

    timed_round = rounds_call(clock, [forward, backward])

    def call() -> tuple[float, ...]:
        forward_s, backward_s = timed_round()
        norm_s, product_s = (call_once() for call_once in separate_calls)
        net_forward_s = max(0.0, forward_s - norm_s[0] - product_s[0])
        whole_s = forward_s + backward_s - sum(norm_s) - sum(product_s)
        return net_forward_s, max(0.0, whole_s - net_forward_s)

    return call


def update_call(place: Place, elements: int) -> Call:
    """The norm of some gradients, and AdamW's update."""
    size = max(_WIDTH, elements // _WIDTH * _WIDTH)
    values, gradients = place.random(size), place.random(size).float()
    masters = Masters([ShardPiece(0, size, True, False)], values, place.device)
    masters.make_optimizer(partial(make_optimizer, OptimizerSpec()))
    masters.step(gradients, 1.0, 1e-4)

    def update(_: int) -> None:
        lengths = torch.linalg.vector_norm(gradients.view(-1, _WIDTH), dim=-1, dtype=torch.float32)
        torch.linalg.vector_norm(lengths, dtype=torch.float64).square()
        masters.step(gradients, 0.999, 1e-4)
        masters.write_values(values)

    return place.timing([update])


ELEMENTWISE: dict[Work, Callable[[Place, int], Call]] = {
    "rms norm": partial(norm_call, norm="rmsnorm"),
    "layer norm": partial(norm_call, norm="layernorm"),
    "rotary": rotary_call,
    "gated activation": gated_call,
    "activation": activation_call,
    "join": join_call,
    "embedding": embedding_call,
    "loss": loss_call,
    "merge": merge_call,
    "update": update_call,
}
