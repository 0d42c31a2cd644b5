"""The cost of attention: its products, rotation and core, and the exchanges of ranks that share its sequences.

Letters and units are those of operators.py.
"""

import math
from dataclasses import replace

import numpy as np

from shardwright.config.attention_kernels import ATTENTION_KERNELS
from shardwright.config.context_facts import CONTEXT_METHODS
from shardwright.config.elementwise_kernels import norm_traffic, rotary_traffic
from shardwright.layers.arrays import Numbers
from shardwright.layers.kept_inputs import input_bytes
from shardwright.layers.layer_operators import LayerOperator
from shardwright.layers.layer_tensors import ATTENTION, FLOAT32, HALF, LATENT
from shardwright.layers.operators import Context, Exchange, Exchanges, MatrixProduct, Operator, Scores, entering, rise


def project(c: Context, o: LayerOperator) -> Operator:
    """The product before the heads: it gives query, key and value themselves, or the latents of each tp rank's own
    rows.

    Without low-rank queries the gather that brings the queries' rows also lets each rank make the latents of all rows.
    """
    if c.shape.latent is None:
        product = rise(c, o)
        return replace(product, kept=_kept_heads(c, product.kept) * _copies_of_keys(c))
    m, (down, q_up, *_), rows = c.shape.latent, c.shape.attention_matrices, c.sizes.latent_tokens
    query_product = MatrixProduct.of(rows, q_up, c.grid.tp)
    if m.query_rank:
        query_product = MatrixProduct(rows, down.inner, m.query_rank)
    products = query_product, MatrixProduct(rows, down.inner, down.columns - m.query_rank)
    kept, inside = c.bytes_of(LATENT.latents), 0.0 if m.query_rank else c.gathered
    return Operator(o, products=products, kept=kept, given=c.bytes_of(o.gives), inside=inside)


def heads_of_latents(c: Context, o: LayerOperator) -> Operator:
    """Norms of the latents, and the products that make query, key and value of a rank's heads.

    With low-rank queries tp ranks gather the latents and sum their gradients (model/latent_attention.py; so does
    Megatron-core, whose down projections are duplicated).
    """
    s, m, rows = c.shape, c.shape.low_ranks, c.sizes.latent_tokens
    products = tuple(MatrixProduct.of(c.tokens, product.matrix, c.grid.tp) for product in o.products)
    ranks = m.query_rank + m.key_rank
    moved = rows * ((2 * ranks + m.rotary) * (norm_traffic(c.software.norm).rms[0] + HALF))
    forward_bytes, backward_bytes = moved, 2 * moved
    if c.software.latent:
        forward_bytes, backward_bytes = (
            rows * (ranks + m.rotary) * element_bytes for element_bytes in c.software.latent
        )
    given = c.bytes_of(o.gives)
    kept = HALF * rows * ranks + _kept_heads(c, given)
    share = (ranks + m.rotary) / s.hidden if m.query_rank else 0.0
    forward, backward = entering(c, share)
    return Operator(
        o,
        products=products,
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        forward=forward,
        backward=backward,
        kept=kept,
        given=given,
        inside=share * c.gathered,
    )


def _copies_of_keys(c: Context) -> float:
    """Elements of query, key and value that attention keeps over those of the product that gives them."""
    s = c.shape
    return 3 * s.heads / (s.heads + 2 * s.kv_heads) if c.software.repeats_keys else 1.0


def _kept_heads(c: Context, in_half: Numbers) -> Numbers:
    """Bytes kept of query, key and value, which have `in_half` in 16 bits: as attention keeps them."""
    return in_half * (ATTENTION_KERNELS[c.software.attention].kept_input_bytes / HALF)


def rotate(c: Context, o: LayerOperator) -> Operator:
    """Rotary positions, and the copies that put heads into their order."""
    n, s, w = c.sizes[o.gives], c.shape, c.software
    batched = n * (np.asarray(c.grid.microbatch) > 1)
    forward, backward = (
        moved + batched * more for moved, more in zip(_turned(c, n), rotary_traffic(w.rotary).batched, strict=True)
    )
    if s.clips:  # the forward reads and writes; the backward moves the gradient and the clipped values
        forward, backward = forward + 2 * HALF * n, backward + 3 * HALF * n
    return Operator(
        o,
        forward_bytes=forward,
        backward_bytes=backward,
        kept=n * w.rotary_kept * s.is_turned(c.kind),
        given=HALF * n,
        kernel="rotary",
        elements=n,
    )


def _turned(c: Context, n: Numbers) -> tuple[Numbers, Numbers]:
    """Bytes moved to make `n` elements of query, key and value ready, forward and backward.

    Queries and keys are rotated; of latent attention the rotary part of queries. Latent attention also pads values to
    the width of keys, and cuts the results of attention again.
    """
    s, traffic = c.shape, rotary_traffic(c.software.rotary)
    if not s.is_turned(c.kind):
        return n * traffic.learned[0], n * traffic.learned[1]
    if s.latent:
        turned_share, heads = s.latent.rotary / (2 * s.query_width + s.value_width), c.tokens * c.sizes.heads
        padded = heads * (s.query_width + s.value_width) * (s.value_width < s.query_width)
    else:
        turned_share, padded = (s.heads + s.kv_heads) / (s.heads + 2 * s.kv_heads), 0.0
    norms = norm_traffic(c.software.norm).heads if s.head_norms else (0.0, 0.0)
    forward, backward = (
        n * turned_share * (of_turned + of_norm) + (n * (1 - turned_share) + padded) * of_copied
        for of_turned, of_norm, of_copied in zip(traffic.turned, norms, traffic.copied, strict=True)
    )
    return forward, backward


def attention(c: Context, o: LayerOperator) -> Operator:
    """The attention core: one kernel, or two products with a softmax between them that keeps the scores.

    Under cp with "ulysses" a rank has a share of the heads for all tokens, else all heads for a share of the queries.
    """
    keeps_scores = ATTENTION_KERNELS[c.software.attention].keeps_scores
    return _core_of_products(c, o) if keeps_scores else _core_of_one_kernel(c, o)


def _core_of_products(c: Context, o: LayerOperator) -> Operator:
    """Queries times keys, softmax, weights times values."""
    s, grid, w, heads = c.shape, c.grid, c.software, c.sizes.heads
    queries, given = s.sequence // grid.cp, c.bytes_of(o.gives)
    forward, backward = _keys_to_queries(c, heads, s.query_width)
    batch, n = heads * grid.microbatch, 1.0 * heads * grid.microbatch * queries * s.sequence
    if CONTEXT_METHODS[grid.cp_method].trades_heads:
        batch, queries = np.maximum(1, batch // grid.cp), s.sequence
    products = (
        MatrixProduct(queries, s.query_width, s.sequence, batch, weight=False),
        MatrixProduct(queries, s.sequence, s.value_width, batch, weight=False),
    )
    # Kept: the softmax's result; with dropout the mask and the remaining scores. Backward: the gradients on both sides
    # of the softmax.
    kernel = ATTENTION_KERNELS[w.attention]
    per_score = kernel.kept_score_bytes + 3 * w.dropout
    return Operator(
        o,
        products=products,
        forward_bytes=n * w.softmax_bytes[0],
        backward_bytes=n * w.softmax_bytes[1],
        forward=forward,
        backward=backward,
        kept=n * per_score + given,
        kept_result=given,
        given=given,
        inside=2 * n * kernel.score_gradient_bytes,
    )


def _core_of_one_kernel(c: Context, o: LayerOperator) -> Operator:
    """Attention that keeps no scores, and merges the results of visits with the keys of other ranks or blocks."""
    s, grid, w, heads = c.shape, c.grid, c.software, c.sizes.heads
    queries, given, method = s.sequence // grid.cp, c.bytes_of(o.gives), CONTEXT_METHODS[grid.cp_method]
    forward, backward = _keys_to_queries(c, heads, s.query_width)
    keys, kernel = s.keys_seen(c.kind), ATTENTION_KERNELS[w.attention]
    computed = keys if w.is_own or s.window.chunked else _in_blocks(keys, s.sequence, kernel.block)
    pairs_of_key = (0.5 if w.causal else 1.0) * heads * c.tokens
    pairs = pairs_of_key * computed
    unseen = 0.0 if kernel.skips_backward else pairs_of_key * (s.sequence - computed)
    length = np.minimum(queries if method.exchange == "ring" else s.sequence, math.ceil(keys))
    sums = FLOAT32 * c.sizes[ATTENTION.log_sum_exp]
    visits = grid.cp * (grid.cp > 1) * (not method.trades_heads)
    if s.is_blockwise(c.kind):
        visits = np.maximum(1, visits)
    merged = c.sizes[ATTENTION.attended] * visits
    forward_bytes, backward_bytes = (merged * element_bytes for element_bytes in w.ring)
    forward_bytes = forward_bytes + kernel.cast[0] * c.sizes[o.takes]
    backward_bytes = backward_bytes + kernel.cast[1] * c.sizes[ATTENTION.attended]
    if s.caps:
        forward_bytes, backward_bytes = forward_bytes + pairs * w.capped[0], backward_bytes + pairs * w.capped[1]
    # The product behind it keeps what it gave once more, where it casts that.
    cast = input_bytes(grid, w)
    kept = given + sums + cast * c.sizes[ATTENTION.attended] * (cast < HALF)
    return Operator(
        o,
        scores=Scores(pairs, length, s.query_width + s.value_width, unseen),
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        forward=forward,
        backward=backward,
        kept=kept,
        kept_result=kept,
        given=given,
        # The gradient of queries is accumulated in float32, in the kernel and where visits are.
        inside=sums * s.query_width * (1.0 + (w.visits_in_float32 and not w.is_own) * (visits > 1))
        + (0.0 if w.is_own else _bytes_of_other_keys(c, backward)),
        needs_kept=True,
        kernel="merge",
        elements=merged,
    )


def _bytes_of_other_keys(c: Context, exchanges: tuple[Exchange, ...]) -> Numbers:
    """Bytes of the keys and values of other ranks, and of their gradients, that are there while a rank's backward of
    attention runs: all that are gathered, or those of the rank whose turn it is and of the next."""
    kept: Numbers = 0.0
    for exchange in exchanges:
        in_turn = 2 * exchange.size / c.grid.cp
        if exchange.kind == "reduce_scatter" and c.software.visits_in_float32:
            kept = kept + in_turn * FLOAT32 / HALF
        elif exchange.kind in ("all_gather", "reduce_scatter"):
            kept = kept + exchange.size
        elif exchange.kind == "ring":
            kept = kept + in_turn
    return kept


def _in_blocks(keys: float, sequence: int, block: int) -> float:
    """Twice the mean number of keys that a query meets, if it sees `keys` in the same measure, and kernels compute
    whole blocks of `block` queries and keys at a window's far edge, as at the diagonal: of that, the measure counts
    half."""
    if not block or keys >= sequence:
        return keys
    window = sequence * (1 - math.sqrt(max(0.0, 1 - keys / sequence)))  # keys = window x (2 - window / sequence)
    return min(float(sequence), max(keys, block * (2 * math.ceil((window - 1) / block) + 1)))


def _keys_to_queries(c: Context, heads: Numbers, width: int) -> Exchanges:
    """The exchange of cp ranks around attention, forward and backward.

    ring (Liu et al. 2023, arXiv 2310.01889): keys and values travel round the ring, in the backward with their
    gradients. all-gather (Dubey et al. 2024, arXiv 2407.21783, section 3.3.2): they are gathered, in the backward
    again, and their gradients are scattered. In both, gradients may have another dtype. ulysses (Jacobs et al. 2023,
    arXiv 2309.14509): tokens are traded for heads and back; fewer key/value heads than cp ranks are repeated. A
    latent's values travel as wide as its keys, `width` elements, because kernels need them padded.
    """
    s, grid = c.shape, c.grid
    kv_heads, is_cut = np.maximum(1, s.kv_heads // grid.tp), grid.cp > 1
    kv = HALF * c.tokens * kv_heads * 2 * width * grid.cp * is_cut
    gradient_bytes = c.software.key_gradient_bytes
    gradients = kv * gradient_bytes / grid.element_bytes if gradient_bytes else kv
    exchange = CONTEXT_METHODS[grid.cp_method].exchange
    if exchange == "ring":
        return (Exchange("ring", "cp", kv),), (Exchange("ring", "cp", kv + gradients, rounds=2),)
    if exchange == "all_gather":
        gather = Exchange("all_gather", "cp", kv)
        return (gather,), (gather, Exchange("reduce_scatter", "cp", gradients))
    per_token = (heads + 2 * np.maximum(kv_heads, grid.cp)) * width
    to_heads = Exchange("all_to_all", "cp", HALF * c.tokens * per_token * is_cut)
    to_tokens = Exchange("all_to_all", "cp", HALF * c.tokens * heads * width * is_cut)
    return (to_heads, to_tokens), (to_tokens, to_heads)
