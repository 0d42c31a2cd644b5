"""Attention of one block of queries to one block of keys, and the merging of blocks.

Blocks of one query's keys are merged by the logarithms of their sums of exponentials, as in the online softmax of
Milakov and Gimelshein 2018 (arXiv 1805.02867) and FlashAttention (Dao et al. 2022, arXiv 2205.14135, section 3.1).
torch's public scaled_dot_product_attention does not return this logarithm, so this file calls torch's private
operators; no other file does. Their backward takes the output and the logarithm as arguments: given those of all of a
query's keys, it returns the block's part of the exact gradients.

A query that sees no key of a block has output 0 and logarithm -inf there, and gradients of 0: never NaN.

Shape suffixes: S queries, T keys, B batch, N query heads, G key/value heads, D head width. Layouts are views, with
S before B in memory.
"""

import math
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.parallel.context.capped_attention import attend_capped, capped_gradients
from shardwright.parallel.context.sight import AttentionBlock


def attend_block(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T x scale) V [B, N, S, D], and log of the sum of exponentials [B, N, S], float32."""
    if block.rule.softcap:
        return attend_capped(block)
    bias = block.bias(block.q_BNSD.dtype)
    is_causal = block.sight.is_causal and bias is None
    if block.kind == "cuda":
        out_BNSD, lse_BNS = _attend_on_cuda(block, bias, is_causal)
    else:
        out_BNSD, lse_BNS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            block.q_BNSD, block.k_BGTD, block.v_BGTD, 0.0, is_causal, attn_mask=bias, scale=block.rule.scale
        )
    if bias is not None:
        blind_BNS = (bias == -math.inf).all(dim=-1)
        out_BNSD = out_BNSD.masked_fill_(blind_BNS[..., None], 0.0)
        lse_BNS = lse_BNS.masked_fill_(blind_BNS, -math.inf)  # the operator returns 0
    return out_BNSD, lse_BNS


def block_gradients(
    block: AttentionBlock, dout_BNSD: Tensor, out_BNSD: Tensor, lse_BNS: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's part of the gradients of q, k and v. `out` and `lse` are the results over all of a query's keys."""
    bias = None if block.rule.softcap else block.bias(block.q_BNSD.dtype)
    if bias is not None or block.rule.softcap:
        # For queries that see no key at all: -inf - -inf would be NaN, but exp(-inf - 0) is 0, as it must be.
        lse_BNS = lse_BNS.masked_fill(lse_BNS == -math.inf, 0.0)
    if block.rule.softcap:
        return capped_gradients(block, dout_BNSD, out_BNSD, lse_BNS)
    is_causal = block.sight.is_causal and bias is None
    if block.kind == "cuda":
        return _gradients_on_cuda(block, dout_BNSD, out_BNSD, lse_BNS, bias, is_causal)
    q_k_v, scale = (block.q_BNSD, block.k_BGTD, block.v_BGTD), block.rule.scale
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout_BNSD, *q_k_v, out_BNSD, lse_BNS, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    return gradients


def dry_attention(q_BNSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scale: float | None, device_type: str) -> Tensor:
    """Causal attention of a dry run, [B, N, S, D], with a gradient. For tensors without memory torch cannot choose a
    kernel by device, so this calls the kernel that torch uses on devices of `device_type`."""
    on_cuda, on_cpu = "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"
    kernel = getattr(torch.ops.aten, on_cuda if device_type == "cuda" else on_cpu)
    return cast(Tensor, kernel(q_BNSD, k_BGSD, v_BGSD, 0.0, True, scale=scale)[0])


class Merged:
    """The output of attention over the blocks of keys that were added so far. Sums are in float32."""

    def __init__(self, out_BNSD: Tensor, lse_BNS: Tensor) -> None:
        """Begin with a block that has all queries."""
        self.out_BNSD = out_BNSD.float()
        self.lse_BNS = lse_BNS

    @classmethod
    def nothing(cls, q_BNSD: Tensor) -> "Merged":
        """The state before the first block, if no block has all queries. The output lies in memory as the backward's
        kernel takes it on CUDA (`_by_rows`)."""
        B, N, S, D = q_BNSD.shape
        lse_BNS = torch.full((B, N, S), -math.inf, dtype=torch.float32, device=q_BNSD.device)
        out_BSND = torch.zeros(B, S, N, D, dtype=torch.float32, device=q_BNSD.device)
        return cls(out_BSND.transpose(1, 2), lse_BNS)

    def add(self, queries: slice, out_BNSD: Tensor, lse_BNS: Tensor) -> None:
        """Add a block that has some of the queries."""
        old_lse_BNS = self.lse_BNS[:, :, queries]
        new_lse_BNS = torch.logaddexp(old_lse_BNS, lse_BNS)
        # If a query has seen no key yet, both weights are exp(-inf) = 0.
        finite_lse_BNS = new_lse_BNS.masked_fill(new_lse_BNS == -math.inf, 0.0)
        old_share_BNS, block_share_BNS = (old_lse_BNS - finite_lse_BNS).exp_(), (lse_BNS - finite_lse_BNS).exp_()
        old_out_BNSD = self.out_BNSD[:, :, queries]
        old_out_BNSD.mul_(old_share_BNS[..., None]).addcmul_(out_BNSD.float(), block_share_BNS[..., None])
        old_lse_BNS.copy_(new_lse_BNS)

    def add_score(self, scores_N: Tensor) -> None:
        """Add a key without a value, whose score is the same for all queries of a head."""
        new_lse_BNS = torch.logaddexp(self.lse_BNS, scores_N[:, None])
        self.out_BNSD.mul_((self.lse_BNS - new_lse_BNS).exp_()[..., None])
        self.lse_BNS = new_lse_BNS


# The operators for CUDA, called as torch's own schema defines them.


def _attend_on_cuda(block: AttentionBlock, bias: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor]:
    out_BNSD, lse_BNS, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
        *_for_each_query_head(block),
        _for_all_heads(bias, block.q_BNSD),
        True,
        0.0,
        is_causal,
        scale=block.rule.scale,
    )
    return out_BNSD, lse_BNS[:, :, : block.q_BNSD.shape[2]].contiguous()  # the operator pads it


def _gradients_on_cuda(
    block: AttentionBlock, dout_BNSD: Tensor, out_BNSD: Tensor, lse_BNS: Tensor, bias: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    no_seed = torch.zeros((), dtype=torch.int64, device=dout_BNSD.device)
    padded_BNS = functional.pad(lse_BNS, (0, -lse_BNS.shape[2] % 32), value=math.inf)
    dq_BNSD, dk_BNTD, dv_BNTD, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        dout_BNSD,
        *_for_each_query_head(block),
        _for_all_heads(bias, block.q_BNSD),
        _by_rows(out_BNSD),
        padded_BNS,
        no_seed,
        no_seed,
        0.0,
        [True, True, True, False],
        is_causal,
        scale=block.rule.scale,
    )
    dk_BGQTD, dv_BGQTD = (x.unflatten(1, (block.k_BGTD.shape[1], -1)) for x in (dk_BNTD, dv_BNTD))
    return dq_BNSD, dk_BGQTD.sum(2), dv_BGQTD.sum(2)


def _for_each_query_head(block: AttentionBlock) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, and the keys and values repeated for each query head, [B, N, T, D]."""
    queries_of_key = block.q_BNSD.shape[1] // block.k_BGTD.shape[1]
    k_BNTD, v_BNTD = (x.repeat_interleave(queries_of_key, 1) for x in (block.k_BGTD, block.v_BGTD))
    return block.q_BNSD, k_BNTD, v_BNTD


def _by_rows(out_BNSD: Tensor) -> Tensor:
    """The output in memory order [B, S, N, D]; copied if it has another layout.

    The backward's kernel reads only the strides of samples and heads of `out`, and assumes that its rows are N x D
    apart (torch's mem_eff_attention/kernel_backward.h, o_strideM). In 16 bits it computes the sums of dO x O itself.
    """
    return out_BNSD.transpose(1, 2).contiguous().transpose(1, 2)


def _for_all_heads(bias: Tensor | None, q_BNSD: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(q_BNSD.shape[0], q_BNSD.shape[1], -1, -1)
