"""The operators of a layer whose tokens are routed to experts, in place of an MLP.

Experts are whole on a rank, or cut over tp like an MLP (`PlanGrid.expert_tp`). If experts are whole, each tp rank sends
its own tokens. If they are cut, each rank sends all tokens of the tp line to its part of the experts: under sequence
parallel the tokens are gathered first, and in any case the parts of the experts' results are summed over tp after they
came back (model/moe_block.py). Megatron-core gathers the rows after the all-to-all instead, once for each choice: less
to send, more to gather.

Letters and units are those of operators.py.
"""

from dataclasses import replace

import numpy as np

from shardwright.layers import operators as op
from shardwright.layers.arrays import Numbers
from shardwright.layers.layer_operators import LayerOperator
from shardwright.layers.layer_tensors import FLOAT32, HALF, ROUTING
from shardwright.layers.operators import Context, Exchange, MatrixProduct, Operator, entering, leaving


def route(c: Context, o: LayerOperator) -> Operator:
    """The router's product and choice, in float32, for the rows of this rank; it keeps its input."""
    logits, w = c.sizes[ROUTING.logits], c.software
    product = MatrixProduct.of(c.sizes.routed, o.products[0].matrix, 1)
    forward, backward = (
        logits * (of_logit + of_choice * c.shape.mixture.topk) + c.sizes.routed * c.shape.hidden * of_input
        for of_logit, of_choice, of_input in zip(w.router, w.choices, w.router_input, strict=True)
    )
    kept = c.bytes_of(o.takes) + logits * FLOAT32 * 2
    return Operator(o, products=(product,), forward_bytes=forward, backward_bytes=backward, kept=kept, keeps_input=True)


def weigh_shared(c: Context, o: LayerOperator) -> Operator:
    """The gate of shared experts: a product with one column, and its sigmoid times the experts' result, which is kept.
    The router keeps the product's input, which is its own input too."""
    n, product = c.sizes[o.gives], MatrixProduct.of(c.sizes[ROUTING.shared_gate_logits], o.products[0].matrix, 1)
    kept = c.bytes_of(o.takes)
    return Operator(
        o,
        products=(product,),
        forward_bytes=2 * HALF * n,
        backward_bytes=3 * HALF * n,
        kept=kept,
        given=c.bytes_of(o.gives),
        needs_kept=True,
    )


def assemble(c: Context, o: LayerOperator) -> Operator:
    """The gather of all tokens of the tp line on each of its ranks, if experts are cut; the backward sums the tokens'
    gradients. The rows sent to experts are kept, instead of the tokens that they are copied from."""
    forward, (*sums, _) = entering(c, _is_cut(c))
    exposed_sums = tuple(replace(exchange, beside_weights=False) for exchange in sums)
    return Operator(o, forward=forward, backward=exposed_sums, given=c.bytes_of(o.gives))


def total(c: Context, o: LayerOperator) -> Operator:
    """The sum over tp of the results of the experts' parts."""
    forward, backward = leaving(c, _is_cut(c))
    return Operator(o, forward=forward, backward=backward, given=c.bytes_of(o.gives))


def _is_cut(c: Context) -> Numbers:
    return np.asarray(c.grid.expert_tp) > 1


def dispatch(c: Context, o: LayerOperator) -> Operator:
    """Tokens to their experts: a permutation on each side of an all-to-all over ep.

    Each token travels topk times, and lies in two orders meanwhile. The rows that arrive at the experts are kept as
    their input. On the way to experts, tokens forward and gradients backward, software may send 8 bits (arXiv
    2412.19437, section 3.3.3).
    """
    n, to_experts, from_experts = _travel(c)
    forward, backward = _moved(c, n, c.software.dispatch, 0)
    kept = c.software.dispatch_bytes * n
    return Operator(
        o,
        forward_bytes=forward,
        backward_bytes=backward,
        forward=(to_experts,),
        backward=(from_experts,),
        kept=kept,
        given=HALF * n,
        inside=HALF * n,
    )


def weigh_rows(c: Context, o: LayerOperator) -> Operator:
    """The rows times the weights of their choices, before experts; our runtime recomputes them, other software keeps
    them."""
    n, given = c.sizes[o.gives], c.bytes_of(o.gives)
    kept = 0.0 if c.software.is_own else given
    return Operator(o, forward_bytes=2 * HALF * n, backward_bytes=3 * HALF * n, kept=kept, given=given, needs_kept=True)


def combine(c: Context, o: LayerOperator) -> Operator:
    """The results of experts on their way back; kept if they are multiplied by the weights of the choices."""
    n, to_experts, from_experts = _travel(c)
    moved = _moved(c, n, c.software.combine, 1)
    forward, backward = (pass_bytes + n * own for pass_bytes, own in zip(moved, _of_results(c), strict=True))
    given, kept = c.bytes_of(o.gives), c.software.returned_kept * n
    return Operator(
        o,
        forward_bytes=forward,
        backward_bytes=backward,
        forward=(from_experts,),
        backward=(to_experts,),
        kept=kept,
        given=given,
        inside=HALF * n,
    )


def activate(c: Context, o: LayerOperator) -> Operator:
    """The activation of experts, whose inputs may have limits."""
    activation, n = op.activate(c, o), c.sizes[o.gives]
    if not c.shape.mixture.limited:
        return activation
    forward, backward = c.software.expert_limits
    return activation.with_more_traffic(forward * n, backward * n)


def _of_results(c: Context) -> tuple[Numbers, Numbers]:
    """Bytes by element of the rows of experts, forward and backward, for biases that no product adds, and for slices
    where experts are computed one after the other."""
    software, (_, num_experts) = c.software, c.expert_rows
    has_bias = float(c.shape.bias or c.shape.mlp_bias)
    forward, backward = (
        has_bias * (bias + more * software.float32_weights * (bias > 0)) + once + num_experts * each
        for bias, more, once, each in zip(
            software.expert_bias,
            software.expert_weights,
            software.expert_slices,
            software.one_expert_slices,
            strict=True,
        )
    )
    return forward, backward


def _moved(
    c: Context, n: Numbers, element_bytes: tuple[float, float] | None, to_experts: int
) -> tuple[Numbers, Numbers]:
    """Bytes that permutations of `n` elements move, forward and backward. Pass number `to_experts` (0 forward, 1
    backward) sends rows to experts.

    A permutation is a copy, and rows from other ranks lie in two orders.
    """
    is_sent = c.grid.ep > 1
    if element_bytes is None:
        num_bytes = n * HALF * np.where(is_sent, 4, 2)
        return num_bytes, num_bytes
    is_sent = is_sent & (not c.software.expert_gather)
    forward, backward = (
        n * (pass_bytes + 2 * HALF * (is_sent & (number == to_experts)))
        for number, pass_bytes in enumerate(element_bytes)
    )
    return forward, backward


def _travel(c: Context) -> tuple[Numbers, Exchange, Exchange]:
    """Elements that a rank sends, and the exchanges to experts and back."""
    is_sent, n = c.grid.ep > 1, c.sizes[ROUTING.rows_to_send]
    if c.software.expert_gather:
        size = HALF * n / c.shape.mixture.topk * c.grid.ep * is_sent
        return n, Exchange("all_gather", "ep", size), Exchange("reduce_scatter", "ep", size)
    to_experts, from_experts = (
        Exchange("all_to_all", "ep", size * n * is_sent) for size in (c.software.dispatch_bytes, HALF)
    )
    return n, to_experts, from_experts
