"""What stands in a layer where tokens are routed to experts, in place of an MLP.

Experts are whole on a rank, or cut over tp like an MLP (`Cut.expert_tp`). Whole, each of the tp ranks sends its own
tokens. Cut, each sends all tokens of the tp line to its part of the experts: under sequence parallel they are gathered
before, and either way the parts of what the experts make are summed over tp after they came back (model/moe_block.py).
Megatron-core gathers the rows behind the all-to-all instead, once for each choice: less to send, more to gather.

Letters and units are those of operators.py.
"""

import numpy as np

from shardwright.workload.arrays import Numbers
from shardwright.workload.layer_operators import LayerOperator
from shardwright.workload.operators import FLOAT32, HALF, Context, Exchange, MatrixProduct, Operator, entering, leaving


def route(c: Context, o: LayerOperator) -> Operator:
    """The router's product and choice, in float32, on the rows of this rank; its input is kept."""
    traffic = c.sizes["logits"] * FLOAT32 * 8
    product = MatrixProduct.of(c.sizes.routed, o.products[0].matrix, 1)
    return Operator(o, (product,), None, traffic, traffic, kept=c.bytes_of(o.takes) + traffic / 4, keeps_input=True)


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
    forward, (sums, parts, _) = entering(c, _is_cut(c))
    return Operator(o, forward=forward, backward=(sums, parts), given=c.bytes_of(o.gives))


def total(c: Context, o: LayerOperator) -> Operator:
    """The sum over tp of what parts of experts gave."""
    forward, backward = leaving(c, _is_cut(c))
    return Operator(o, forward=forward, backward=backward, given=c.bytes_of(o.gives))


def _is_cut(c: Context) -> Numbers:
    return np.asarray(c.cut.expert_tp) > 1


def dispatch(c: Context, o: LayerOperator) -> Operator:
    """Tokens to their experts: a permutation on each side of an all-to-all over ep.

    Each token travels topk times, and lies in two orders meanwhile. What arrives at the experts is kept as their input.
    On the way to experts, tokens forward and gradients backward, software may send 8 bits (arXiv 2412.19437, section
    3.3.3).
    """
    n, moved, there, back = _travel(c)
    kept = c.software.dispatch_bytes * n
    return Operator(o, (), None, moved, moved, (there,), (back,), kept, given=HALF * n, inside=HALF * n)


def combine(c: Context, o: LayerOperator) -> Operator:
    """What experts gave, on its way back; it is kept where it meets the weights of the choices."""
    n, moved, there, back = _travel(c)
    given, kept = c.bytes_of(o.gives), c.software.returned_kept * n
    return Operator(o, (), None, moved, moved, (back,), (there,), kept, given=given, inside=HALF * n)


def _travel(c: Context) -> tuple[Numbers, Numbers, Exchange, Exchange]:
    """Elements that a rank sends, bytes that permutations move, and the exchanges to experts and back."""
    is_sent, n = c.cut.ep > 1, c.sizes["rows to send"]
    there, back = (Exchange("all_to_all", "ep", size * n * is_sent) for size in (c.software.dispatch_bytes, HALF))
    return n, n * HALF * np.where(is_sent, 4, 2), there, back
