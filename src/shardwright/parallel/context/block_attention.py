"""Attention of one block of queries to one block of keys, with what it takes to put blocks together.

Blocks of one query's keys are merged by the logarithms of their sums of exponentials, as in the online softmax of
Milakov and Gimelshein 2018 (arXiv 1805.02867) and FlashAttention (Dao et al. 2022, arXiv 2205.14135, section 3.1).
torch's public scaled_dot_product_attention keeps that number to itself, so here its private operators are called, and
nowhere else. Their backward takes output and logarithm as arguments: given those of all of a query's keys, it gives
the block's part of the exact gradients.

A query that sees no key of a block has output 0 and logarithm -inf there, and gradients of 0: never NaN.

Shape suffixes: S queries, T keys, B batch, N query heads, G key/value heads, D head width. Layouts are views, with
S before B in memory.
"""

import math
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.parallel.context.attention_rule import AttentionRule
from shardwright.parallel.context.capped_attention import attend_capped, capped_gradients
from shardwright.parallel.context.sight import Sight

PLAIN = AttentionRule()


def attend_block(
    q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, sight: Sight, rule: AttentionRule = PLAIN, kind: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T x scale) V [B, N, S, D], and log of the sum of exponentials [B, N, S], float32, by a rule but for
    its sinks. `kind` is that of the device whose kernel is taken."""
    scale = rule.scale
    if rule.softcap:
        return attend_capped(q_BNSD, k_BGTD, v_BGTD, sight, scale, softcap=rule.softcap, kind=kind)
    bias = sight.bias(q_BNSD.shape[2], k_BGTD.shape[2], q_BNSD.dtype, q_BNSD.device)
    is_causal = sight.is_causal and bias is None
    if kind == "cuda":
        out_BNSD, lse_BNS = _attend_on_cuda(q_BNSD, k_BGTD, v_BGTD, bias, is_causal=is_causal, scale=scale)
    else:
        out_BNSD, lse_BNS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BNSD, k_BGTD, v_BGTD, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    if bias is not None:
        blind_BNS = (bias == -math.inf).all(dim=-1)
        out_BNSD = out_BNSD.masked_fill_(blind_BNS[..., None], 0.0)
        lse_BNS = lse_BNS.masked_fill_(blind_BNS, -math.inf)  # the operator says 0
    return out_BNSD, lse_BNS


def block_gradients(
    dout_BNSD: Tensor, q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, out_BNSD: Tensor, lse_BNS: Tensor, sight: Sight,
    rule: AttentionRule = PLAIN, kind: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The block's part of the gradients of q, k and v. `out` and `lse` are those of all of a query's keys."""
    bias = None if rule.softcap else sight.bias(q_BNSD.shape[2], k_BGTD.shape[2], q_BNSD.dtype, q_BNSD.device)
    if bias is not None or rule.softcap:
        # Where no key is seen at all: -inf - -inf would be NaN, and exp(-inf - 0) is the 0 that it should be.
        lse_BNS = lse_BNS.masked_fill(lse_BNS == -math.inf, 0.0)
    if rule.softcap:
        return capped_gradients(
            dout_BNSD, q_BNSD, k_BGTD, v_BGTD, out_BNSD=out_BNSD, lse_BNS=lse_BNS, sight=sight, scale=rule.scale,
            softcap=rule.softcap, kind=kind,
        )  # fmt: skip
    is_causal = sight.is_causal and bias is None
    if kind == "cuda":
        return _gradients_on_cuda(
            dout_BNSD, q_BNSD, k_BGTD, v_BGTD, out_BNSD=out_BNSD, lse_BNS=lse_BNS, bias=bias, is_causal=is_causal,
            scale=rule.scale,
        )  # fmt: skip
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout_BNSD, q_BNSD, k_BGTD, v_BGTD, out_BNSD, lse_BNS, 0.0, is_causal, attn_mask=bias, scale=rule.scale
    )
    return gradients


def dry_attention(q_BNSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scale: float | None, kind: str) -> Tensor:
    """Causal attention of a dry run, [B, N, S, D], with a gradient: tensors without memory are on no device for whose
    kernel torch would decide, so the one that it takes for `kind` is named."""
    on_cuda, on_cpu = "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"
    kernel = getattr(torch.ops.aten, on_cuda if kind == "cuda" else on_cpu)
    return cast(Tensor, kernel(q_BNSD, k_BGSD, v_BGSD, 0.0, True, scale=scale)[0])


class Merged:
    """The output of attention so far, over the blocks of keys that were added. Sums are in float32."""

    def __init__(self, out_BNSD: Tensor, lse_BNS: Tensor) -> None:
        """Begin with a block that all queries take part in."""
        self.out_BNSD = out_BNSD.float()
        self.lse_BNS = lse_BNS

    @classmethod
    def nothing(cls, q_BNSD: Tensor) -> "Merged":
        """Before the first block, where no block is of all queries."""
        B, N, S, D = q_BNSD.shape
        lse_BNS = torch.full((B, N, S), -math.inf, dtype=torch.float32, device=q_BNSD.device)
        out_SBND = torch.zeros(S, B, N, D, dtype=torch.float32, device=q_BNSD.device)
        return cls(out_SBND.permute(1, 2, 0, 3), lse_BNS)

    def add(self, queries: slice, out_BNSD: Tensor, lse_BNS: Tensor) -> None:
        """Add a block that some of the queries take part in."""
        before_BNS = self.lse_BNS[:, :, queries]
        both_BNS = torch.logaddexp(before_BNS, lse_BNS)
        seeing_BNS = both_BNS.masked_fill(both_BNS == -math.inf, 0.0)  # no key yet: both weights are exp(-inf) = 0
        weight_BNS, of_block_BNS = (before_BNS - seeing_BNS).exp_(), (lse_BNS - seeing_BNS).exp_()
        self.out_BNSD[:, :, queries].mul_(weight_BNS[..., None]).addcmul_(out_BNSD.float(), of_block_BNS[..., None])
        before_BNS.copy_(both_BNS)

    def add_score(self, scores_N: Tensor) -> None:
        """Add a key without a value, whose score is the same for all queries of a head."""
        both_BNS = torch.logaddexp(self.lse_BNS, scores_N[:, None])
        self.out_BNSD.mul_((self.lse_BNS - both_BNS).exp_()[..., None])
        self.lse_BNS = both_BNS


# The operators for CUDA. Written after torch's own schema and never run: no machine of ours had a GPU.


def _attend_on_cuda(
    q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    queries = q_BNSD.shape[1] // k_BGTD.shape[1]
    out_BNSD, lse_BNS, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q_BNSD, k_BGTD.repeat_interleave(queries, 1), v_BGTD.repeat_interleave(queries, 1),
        _for_all_heads(bias, q_BNSD), True, 0.0, is_causal, scale=scale,
    )  # fmt: skip
    return out_BNSD, lse_BNS[:, :, : q_BNSD.shape[2]].contiguous()  # it comes padded


def _gradients_on_cuda(
    dout_BNSD: Tensor, q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, out_BNSD: Tensor, lse_BNS: Tensor,
    bias: Tensor | None, is_causal: bool, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    queries = q_BNSD.shape[1] // k_BGTD.shape[1]
    no_seed = torch.zeros((), dtype=torch.int64, device=q_BNSD.device)
    padded_BNS = functional.pad(lse_BNS, (0, -lse_BNS.shape[2] % 32), value=math.inf)
    dq_BNSD, dk_BNTD, dv_BNTD, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        dout_BNSD, q_BNSD, k_BGTD.repeat_interleave(queries, 1), v_BGTD.repeat_interleave(queries, 1),
        _for_all_heads(bias, q_BNSD), _by_rows(out_BNSD), padded_BNS, no_seed, no_seed, 0.0,
        [True, True, True, False], is_causal, scale=scale,
    )  # fmt: skip
    return dq_BNSD, dk_BNTD.unflatten(1, (-1, queries)).sum(2), dv_BNTD.unflatten(1, (-1, queries)).sum(2)


def _by_rows(out_BNSD: Tensor) -> Tensor:
    """The output with the heads of a row side by side and rows behind each other, copied where it is not so already.

    Of `out` the kernel of the backward takes the strides of samples and heads alone, and its rows as N x D apart
    (torch's mem_eff_attention/kernel_backward.h, o_strideM). In 16 bits it makes the sums of dO x O itself.
    """
    return out_BNSD.transpose(1, 2).contiguous().transpose(1, 2)


def _for_all_heads(bias: Tensor | None, q_BNSD: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(q_BNSD.shape[0], q_BNSD.shape[1], -1, -1)
