"""What stands in a layer where tokens are routed to experts, in place of an MLP.

Experts are whole on a rank, or cut over tp like an MLP (`Cut.expert_tp`). Whole, each of the tp ranks sends its own
tokens. Cut, each sends all tokens of the tp line to its part of the experts: under sequence parallel they are gathered
before, and either way the parts of what the experts make are summed over tp after they came back (model/moe_block.py).
Megatron-core gathers the rows behind the all-to-all instead, once for each choice: less to send, more to gather.

Letters and units are those of operators.py.
"""

import numpy as np

from shardwright.workload.arrays import Numbers
from shardwright.workload.operators import FLOAT32, HALF, Context, Exchange, MatrixProduct, Operator, mlp


def route(c: Context) -> Operator:
    """The router's product and choice, in float32, on the rows of this rank; its input is kept."""
    of = c.shape.experts
    assert of is not None, "only a mixture of experts has a router"
    # Where experts are whole tp ranks share the tokens, be the residual stream sharded or not.
    rows = c.tokens / np.where((c.cut.expert_tp == 1) | np.asarray(c.cut.sequence_parallel), c.cut.tp, 1)
    traffic = rows * of.num * FLOAT32 * 8
    product = MatrixProduct.of(rows, c.shape.gate_matrices[0], 1)
    return Operator("router", (product,), None, traffic, traffic, kept=c.stream + traffic / 4)


def assemble(c: Context) -> Operator:
    """All tokens of the tp line come together on each of its ranks, whose experts are cut; in the backward their
    gradients are summed. The rows that are sent to experts are kept, and not what they are taken from."""
    gather = Exchange("all_gather", "tp", _is_cut(c) * c.scattered)
    sums = Exchange("all_reduce", "tp", _is_cut(c) * c.summed)
    parts = Exchange("reduce_scatter", "tp", _is_cut(c) * c.scattered)
    return Operator("experts enter", forward=(gather,), backward=(sums, parts), given=c.stream)


def total(c: Context) -> Operator:
    """The sum over tp of what parts of experts gave."""
    sums = Exchange("all_reduce", "tp", _is_cut(c) * c.summed)
    parts = Exchange("reduce_scatter", "tp", _is_cut(c) * c.scattered)
    back = Exchange("all_gather", "tp", _is_cut(c) * c.scattered)
    return Operator("experts leave", forward=(sums, parts), backward=(back,), given=c.stream)


def _is_cut(c: Context) -> Numbers:
    return np.asarray(c.cut.expert_tp) > 1


def _sent(c: Context) -> Numbers:
    """Tokens that a rank sends to experts."""
    return c.tokens * c.cut.expert_tp / c.cut.tp


def trade(c: Context, name: str) -> Operator:
    """Tokens to their experts, or back: a permutation on each side of an all-to-all over ep.

    Each token travels topk times, and lies in two orders meanwhile. What arrives at the experts is kept as their input;
    what comes back from them where it meets the weights of the choices. On the way to experts, tokens forward and
    gradients backward, software may send 8 bits (arXiv 2412.19437, section 3.3.3).
    """
    s, cut, w = c.shape, c.cut, c.software
    assert s.experts is not None, "only a mixture of experts trades tokens"
    n = _sent(c) * s.hidden * s.experts.topk
    moved = n * HALF * np.where(cut.ep > 1, 4, 2)
    there, back = ((Exchange("all_to_all", "ep", size * n * (cut.ep > 1)),) for size in (w.dispatch_bytes, HALF))
    if name == "dispatch":
        return Operator(
            name, (), None, moved, moved, there, back, w.dispatch_bytes * n, given=HALF * n, inside=HALF * n
        )
    return Operator(name, (), None, moved, moved, back, there, w.returned_kept * n, given=c.stream, inside=HALF * n)


def experts(c: Context) -> list[Operator]:
    """The routed experts of a rank: grouped products over what ep ranks sent, evenly."""
    of = c.shape.experts
    assert of is not None, "only a mixture of experts has experts"
    held = np.maximum(1, of.num // c.cut.ep)
    return mlp(c, of.ffn, _sent(c) * of.topk * c.cut.ep / of.num, held, c.cut.expert_tp)
