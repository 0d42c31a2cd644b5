"""The operators of a layer whose tokens are routed to experts, in place of an MLP.

Experts are whole on a rank, or cut over tp like an MLP (`Cut.expert_tp`). Whole, each of the tp ranks sends its own
tokens. Cut, each sends all tokens of the tp line to its part of the experts: under sequence parallel they are gathered
before, and either way the parts of what the experts make are summed over tp after they came back (model/moe_block.py).
Megatron-core gathers the rows behind the all-to-all instead, once for each choice: less to send, more to gather.

Letters and units are those of operators.py.
"""

from dataclasses import replace

import numpy as np

from shardwright.workload.arrays import Numbers
from shardwright.workload.layer_operators import LayerOperator
from shardwright.workload.operators import FLOAT32, HALF, Context, Exchange, MatrixProduct, Operator, entering, leaving


def route(c: Context, o: LayerOperator) -> Operator:
    """The router's product and choice, in float32, on the rows of this rank; its input is kept."""
    logits, w = c.sizes["logits"], c.software
    product = MatrixProduct.of(c.sizes.routed, o.products[0].matrix, 1)
    forward, backward = (
        logits * (of_logit + of_choice * c.shape.mixture.topk) + c.sizes.routed * c.shape.hidden * of_input
        for of_logit, of_choice, of_input in zip(w.router, w.choices, w.router_input, strict=True)
    )
    kept = c.bytes_of(o.takes) + logits * FLOAT32 * 2
    return Operator(o, (product,), None, forward, backward, kept=kept, keeps_input=True)


def weigh_shared(c: Context, o: LayerOperator) -> Operator:
    """The gate of shared experts: a product with one column, and its sigmoid times what they give, which is kept. The
    product's input is the router's, which keeps it."""
    n, product = c.sizes[o.gives], MatrixProduct.of(c.sizes["shared gate logits"], o.products[0].matrix, 1)
    kept = c.bytes_of(o.takes)
    return Operator(
        o, (product,), None, 2 * HALF * n, 3 * HALF * n, kept=kept, given=c.bytes_of(o.gives), needs_kept=True
    )


def assemble(c: Context, o: LayerOperator) -> Operator:
    """All tokens of the tp line come together on each of its ranks, whose experts are cut; in the backward their
    gradients are summed. The rows that are sent to experts are kept, and not what they are taken from."""
    forward, (*sums, _) = entering(c, _is_cut(c))
    waited = tuple(replace(exchange, beside_weights=False) for exchange in sums)
    return Operator(o, forward=forward, backward=waited, given=c.bytes_of(o.gives))


def total(c: Context, o: LayerOperator) -> Operator:
    """The sum over tp of what parts of experts gave."""
    forward, backward = leaving(c, _is_cut(c))
    return Operator(o, forward=forward, backward=backward, given=c.bytes_of(o.gives))


def _is_cut(c: Context) -> Numbers:
    return np.asarray(c.grid.expert_tp) > 1


def dispatch(c: Context, o: LayerOperator) -> Operator:
    """Tokens to their experts: a permutation on each side of an all-to-all over ep.

    Each token travels topk times, and lies in two orders meanwhile. What arrives at the experts is kept as their input.
    On the way to experts, tokens forward and gradients backward, software may send 8 bits (arXiv 2412.19437, section
    3.3.3).
    """
    n, there, back = _travel(c)
    forward, backward = _moved(c, n, c.software.dispatch, 0)
    kept = c.software.dispatch_bytes * n
    return Operator(o, (), None, forward, backward, (there,), (back,), kept, given=HALF * n, inside=HALF * n)


def weigh_rows(c: Context, o: LayerOperator) -> Operator:
    """Rows times the weights of their choices, before experts; our runtime makes them again, others keep them."""
    n, given = c.sizes[o.gives], c.bytes_of(o.gives)
    kept = 0.0 if c.software.is_own else given
    return Operator(o, (), None, 2 * HALF * n, 3 * HALF * n, kept=kept, given=given, needs_kept=True)


def combine(c: Context, o: LayerOperator) -> Operator:
    """The results of experts on their way back; they are kept if they meet the weights of the choices."""
    n, there, back = _travel(c)
    forward, backward = _moved(c, n, c.software.combine, 1)
    given, kept = c.bytes_of(o.gives), c.software.returned_kept * n
    return Operator(o, (), None, forward, backward, (back,), (there,), kept, given=given, inside=HALF * n)


def _moved(c: Context, n: Numbers, of_element: tuple[float, float] | None, to_experts: int) -> tuple[Numbers, Numbers]:
    """Bytes that permutations of `n` elements move, forward and backward, of which number `to_experts` is to experts.

    A permutation is a copy, and rows that come from other ranks lie in two orders.
    """
    is_sent = c.grid.ep > 1
    if of_element is None:
        moved = n * HALF * np.where(is_sent, 4, 2)
        return moved, moved
    forward, backward = (
        n * (of_pass + 2 * HALF * (is_sent & (number == to_experts))) for number, of_pass in enumerate(of_element)
    )
    return forward, backward


def _travel(c: Context) -> tuple[Numbers, Exchange, Exchange]:
    """Elements that a rank sends, and the exchanges to experts and back."""
    is_sent, n = c.grid.ep > 1, c.sizes["rows to send"]
    there, back = (Exchange("all_to_all", "ep", size * n * is_sent) for size in (c.software.dispatch_bytes, HALF))
    return n, there, back
