"""The operators before and after the layers: the embedding, the head and the loss, and the modules of further tokens.

Letters and units are those of operators.py.
"""

from dataclasses import replace

from shardwright.config.model_shape import ModelShape
from shardwright.layers.arrays import Numbers
from shardwright.layers.layer_operators import LayerOperator
from shardwright.layers.operators import FLOAT32, HALF, Context, Exchange, MatrixProduct, Operator, enter


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
    weight = padded_vocab(c.shape, c.grid.tp) // c.grid.tp * c.shape.hidden
    products = (c.whole + c.gathered) * c.grid.element_bytes / HALF
    return logits(c) * c.software.logit_peak + products + c.software.placeholder_bytes * weight


def padded_vocab(shape: ModelShape, tp: Numbers) -> Numbers:
    """Rows of the table, padded so that each tp rank's part is a multiple of 128, as Megatron-LM and XLA do. Software
    that does not pad is priced so too, which is too little for a vocabulary that is no multiple of 8 (docs/gpu.md)."""
    return -(-shape.vocab // (128 * tp)) * 128 * tp


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
    columns = padded_vocab(s, c.grid.tp) // c.grid.tp
    n, changed = logits(c), 2 * FLOAT32 * s.changes_logits
    gathered = () if w.head_parallel else (Exchange("all_gather", "tp", HALF * n * (c.grid.tp > 1)),)
    return Operator(
        o,
        products=(MatrixProduct(c.tokens, s.hidden, columns),),
        forward_bytes=n * (w.loss[0] + changed),
        backward_bytes=n * w.loss[1],
        forward=gathered,
        in_backward=w.loss_in_backward,
        kernel="loss",
        elements=n,
    )
