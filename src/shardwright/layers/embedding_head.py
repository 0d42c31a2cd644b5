"""The operators before and after the layers: the embedding, the head and the loss, and the modules of further tokens.

Letters and units are those of operators.py.
"""

from dataclasses import replace

from shardwright.config.elementwise_kernels import loss_traffic
from shardwright.layers.arrays import Numbers
from shardwright.layers.layer_operators import LayerOperator
from shardwright.layers.layer_tensors import FLOAT32, HALF
from shardwright.layers.operators import Context, Exchange, MatrixProduct, Operator, enter
from shardwright.sharding.block_sizes import logit_columns


def embed(c: Context, o: LayerOperator) -> Operator:
    """The lookup, and the sum over tp if the table is cut by its vocabulary."""
    forward, backward = c.leaving
    return Operator(
        o,
        forward_bytes=3 * c.whole,
        backward_bytes=3 * c.whole,
        forward=forward,
        backward=backward,
        kernel="embedding",
        elements=c.whole / HALF,
    )


def project(c: Context, o: LayerOperator) -> Operator:
    """The join of an embedding and hidden states, which is kept, and the product that each tp rank computes for the
    tokens that it has between the layers."""
    (product,) = o.products
    joined = c.bytes_of(o.takes)
    return Operator(
        o,
        products=(MatrixProduct.of(c.sizes.tokens_here, product.matrix, c.grid.tp),),
        forward_bytes=2 * joined,
        backward_bytes=joined,
        kept=joined,
        given=c.bytes_of(o.gives),
        keeps_input=True,
    )


def loss_bytes(c: Context) -> Numbers:
    """The peak bytes of the loss and the backward of the head: the logits in some forms, the product's input, gathered
    again under sequence parallel, and its gradient, and a placeholder of the weight's gradient."""
    weight = head_rows(c) * c.shape.hidden
    products = (c.whole + c.gathered) * c.grid.element_bytes / HALF
    return logits(c) * c.software.logit_peak + products + c.software.placeholder_bytes * weight


def head_rows(c: Context) -> Numbers:
    """Rows of the vocabulary's table that a tp rank computes logits with: its part, padded to a multiple as the
    software does. This runtime pads no table, and copies one whose rows are no multiple of 8."""
    multiple = c.software.vocab_multiple
    rows = -(-c.shape.vocab // (multiple * c.grid.tp)) * multiple
    return logit_columns(rows, is_cuda=True) if c.software.is_own else rows


def logits(c: Context) -> Numbers:
    """Elements of the logits that a rank's loss is computed from."""
    return c.tokens * c.shape.vocab / (c.grid.tp if c.software.head_parallel else 1)


def enter_head(c: Context, o: LayerOperator) -> Operator:
    """The gather of sharded rows before the head. If the loss is computed in the backward, so is the gather, and under
    sequence parallel nothing hides it."""
    entered = enter(c, o)
    if not c.software.loss_in_backward:
        return entered
    return replace(
        entered, forward=(), backward=tuple(replace(e, is_hidden=False, is_put_off=False) for e in entered.backward)
    )


def head(c: Context, o: LayerOperator) -> Operator:
    """The product with the vocabulary and the cross entropy over it, cut by vocabulary. Scaled or capped logits take
    one more pass that reads and writes them."""
    s, w = c.shape, c.software
    n, changed, (forward, backward) = logits(c), 2 * FLOAT32 * s.changes_logits, loss_traffic(w.loss)
    gathered = () if w.head_parallel else (Exchange("all_gather", "tp", HALF * n * (c.grid.tp > 1)),)
    return Operator(
        o,
        products=(MatrixProduct(c.tokens, s.hidden, head_rows(c)),),
        forward_bytes=n * (forward + changed),
        backward_bytes=n * backward,
        forward=gathered,
        in_backward=w.loss_in_backward,
        kernel="loss",
        elements=n,
    )
