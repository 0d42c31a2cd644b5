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

from shardwright.parallel.context.sight import Sight


def attend_capped(
    q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, sight: Sight, scale: float | None, softcap: float, device_type: str
) -> tuple[Tensor, Tensor]:
    """Output [B, N, S, D] and logarithm of the sum of exponentials [B, N, S], float32, as attend_block returns them."""
    scores_BNST = _masked(_capped(q_BNSD, k_BGTD, scale, softcap, device_type), sight)
    lse_BNS = scores_BNST.logsumexp(dim=-1)
    finite_lse_BNS = lse_BNS.masked_fill(lse_BNS == -math.inf, 0.0)
    probs_BNST = scores_BNST.sub_(finite_lse_BNS[..., None]).exp_()
    out_BGRD = _product(_by_key_head(probs_BNST, k_BGTD).to(v_BGTD.dtype), v_BGTD, device_type)
    return out_BGRD.reshape(q_BNSD.shape), lse_BNS


def capped_gradients(
    dout_BNSD: Tensor,
    q_BNSD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    out_BNSD: Tensor,
    lse_BNS: Tensor,
    sight: Sight,
    scale: float | None,
    softcap: float,
    device_type: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's part of the gradients of q, k and v, float32, as block_gradients returns them.

    `lse` must be finite: the caller replaces -inf by 0.
    """
    dtype = q_BNSD.dtype
    capped_BNST = _capped(q_BNSD, k_BGTD, scale, softcap, device_type)
    dcap_BNST = (capped_BNST / softcap).square_().neg_().add_(1)  # derivative of the cap
    probs_BNST = _masked(capped_BNST, sight).sub_(lse_BNS[..., None]).exp_()
    dout_BGRD = _by_key_head(dout_BNSD, k_BGTD)
    dv_BGTD = _product(_by_key_head(probs_BNST, k_BGTD).to(dtype).mT, dout_BGRD, device_type)
    dprobs_BNST = _product(dout_BGRD, v_BGTD.mT, device_type).view(probs_BNST.shape)
    delta_BNS1 = (dout_BNSD.float() * out_BNSD).sum(dim=-1, keepdim=True)
    dscores_BNST = dprobs_BNST.sub_(delta_BNS1).mul_(probs_BNST).mul_(dcap_BNST).mul_(_scale(q_BNSD, scale))
    dscores_BGRT = _by_key_head(dscores_BNST, k_BGTD).to(dtype)
    dq_BGRD = _product(dscores_BGRT, k_BGTD, device_type)
    dk_BGTD = _product(dscores_BGRT.mT, _by_key_head(q_BNSD, k_BGTD), device_type)
    return dq_BGRD.reshape(q_BNSD.shape), dk_BGTD, dv_BGTD


def _capped(q_BNSD: Tensor, k_BGTD: Tensor, scale: float | None, softcap: float, device_type: str) -> Tensor:
    """Capped scores [B, N, S, T], float32."""
    scores_BGRT = _product(_by_key_head(q_BNSD, k_BGTD), k_BGTD.mT, device_type)
    capped_BGRT = scores_BGRT.mul_(_scale(q_BNSD, scale) / softcap).tanh_().mul_(softcap)
    return capped_BGRT.view(*q_BNSD.shape[:3], k_BGTD.shape[2])


def _masked(scores_BNST: Tensor, sight: Sight) -> Tensor:
    """Add the bias of a sight to scores, in place: -inf for keys that a query does not see."""
    S, T = scores_BNST.shape[2:]
    bias = sight.bias(S, T, scores_BNST.dtype, scores_BNST.device)
    return scores_BNST if bias is None else scores_BNST.add_(bias)


def _scale(q_BNSD: Tensor, scale: float | None) -> float:
    return q_BNSD.shape[-1] ** -0.5 if scale is None else scale


def _by_key_head(x_BNSE: Tensor, k_BGTD: Tensor) -> Tensor:
    """[B, G, R, E]: rows grouped by key/value head, R rows of all query heads that share it."""
    return x_BNSE.unflatten(1, (k_BGTD.shape[1], -1)).flatten(2, 3)


def _product(a_BGXY: Tensor, b_BGYZ: Tensor, device_type: str) -> Tensor:
    """Batched matrix products, summed and returned in float32."""
    if a_BGXY.dtype == torch.float32:
        return a_BGXY @ b_BGYZ
    if device_type != "cuda":
        return a_BGXY.float() @ b_BGYZ.float()
    product = torch.bmm(a_BGXY.flatten(0, 1), b_BGYZ.flatten(0, 1), out_dtype=torch.float32)
    return product.unflatten(0, a_BGXY.shape[:2])
