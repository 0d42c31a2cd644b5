"""Attention of one block whose scores are limited by a soft cap, cap x tanh(score / cap), before the softmax.

Gemma 2 (arXiv 2408.00118, section 2). torch has no kernel for it, so scores are computed here in full, in float32, and
recomputed in the backward: nothing of their size is kept. Callers split queries into blocks, so that there are few
scores at a time (attention_rule.py).

Shape suffixes: S queries, T keys, B batch, G key/value heads, Q query heads of each, N = G x Q, D head width; R = Q x S
rows of queries that share a key/value head.
"""

import math

import torch
from torch import Tensor

from shardwright.parallel.context.sight import AttentionBlock


def attend_capped(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """Output [B, N, S, D] and logarithm of the sum of exponentials [B, N, S], float32, as attend_block returns them."""
    scores_BNST = _masked(_capped(block), block)
    lse_BNS = scores_BNST.logsumexp(dim=-1)
    finite_lse_BNS = lse_BNS.masked_fill(lse_BNS == -math.inf, 0.0)
    probs_BNST = scores_BNST.sub_(finite_lse_BNS[..., None]).exp_()
    out_BGRD = _product(_by_key_head(probs_BNST, block).to(block.v_BGTD.dtype), block.v_BGTD, block.kind)
    return out_BGRD.reshape(block.q_BNSD.shape), lse_BNS


def capped_gradients(
    block: AttentionBlock, dout_BNSD: Tensor, out_BNSD: Tensor, lse_BNS: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's part of the gradients of q, k and v, float32, as block_gradients returns them.

    `lse` must be finite: the caller replaces -inf by 0.
    """
    q_BNSD, kind = block.q_BNSD, block.kind
    capped_BNST = _capped(block)
    dcap_BNST = (capped_BNST / block.rule.softcap).square_().neg_().add_(1)  # derivative of the cap
    probs_BNST = _masked(capped_BNST, block).sub_(lse_BNS[..., None]).exp_()
    dout_BGRD = _by_key_head(dout_BNSD, block)
    dv_BGTD = _product(_by_key_head(probs_BNST, block).to(q_BNSD.dtype).mT, dout_BGRD, kind)
    dprobs_BNST = _product(dout_BGRD, block.v_BGTD.mT, kind).view(probs_BNST.shape)
    delta_BNS1 = (dout_BNSD.float() * out_BNSD).sum(dim=-1, keepdim=True)
    dscores_BNST = dprobs_BNST.sub_(delta_BNS1).mul_(probs_BNST).mul_(dcap_BNST).mul_(_scale(block))
    dscores_BGRT = _by_key_head(dscores_BNST, block).to(q_BNSD.dtype)
    dq_BGRD = _product(dscores_BGRT, block.k_BGTD, kind)
    dk_BGTD = _product(dscores_BGRT.mT, _by_key_head(q_BNSD, block), kind)
    return dq_BGRD.reshape(q_BNSD.shape), dk_BGTD, dv_BGTD


def _capped(block: AttentionBlock) -> Tensor:
    """Capped scores [B, N, S, T], float32."""
    softcap = block.rule.softcap
    scores_BGRT = _product(_by_key_head(block.q_BNSD, block), block.k_BGTD.mT, block.kind)
    capped_BGRT = scores_BGRT.mul_(_scale(block) / softcap).tanh_().mul_(softcap)
    return capped_BGRT.view(*block.q_BNSD.shape[:3], block.k_BGTD.shape[2])


def _masked(scores_BNST: Tensor, block: AttentionBlock) -> Tensor:
    """Add the block's bias to its scores, in place: -inf for keys that a query does not see."""
    bias = block.bias(scores_BNST.dtype)
    return scores_BNST if bias is None else scores_BNST.add_(bias)


def _scale(block: AttentionBlock) -> float:
    return block.q_BNSD.shape[-1] ** -0.5 if block.rule.scale is None else block.rule.scale


def _by_key_head(x_BNSE: Tensor, block: AttentionBlock) -> Tensor:
    """[B, G, R, E]: rows grouped by key/value head, R rows of all query heads that share it."""
    return x_BNSE.unflatten(1, (block.k_BGTD.shape[1], -1)).flatten(2, 3)


def _product(a_BGXY: Tensor, b_BGYZ: Tensor, kind: str) -> Tensor:
    """Batched matrix products, summed and returned in float32."""
    if a_BGXY.dtype == torch.float32:
        return a_BGXY @ b_BGYZ
    if kind != "cuda":
        return a_BGXY.float() @ b_BGYZ.float()
    product = torch.bmm(a_BGXY.flatten(0, 1), b_BGYZ.flatten(0, 1), out_dtype=torch.float32)
    return product.unflatten(0, a_BGXY.shape[:2])
