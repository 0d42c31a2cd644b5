"""Kernels of CUDA on tensors of the CPU, which read memory as their sources do: strides that a kernel does not look at
are those that it takes for granted.

Shape suffixes: S queries, T keys, B batch, N heads, D head width.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

_ROWS = 32  # of a sum of exponentials, which is padded to so many (kernel_forward.h, kAlignLSE)


def efficient_attention(
    q_BNSD: Tensor, k_BNTD: Tensor, v_BNTD: Tensor, bias: Tensor | None, with_sums: bool, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """aten::_scaled_dot_product_efficient_attention, whose result lies as [B, S, N, D] in memory."""
    assert with_sums and not dropout_p
    scores_BNST = _scores(q_BNSD, k_BNTD, bias, is_causal=is_causal, scale=scale)
    lse_BNS = scores_BNST.logsumexp(-1)
    out_BNSD = (scores_BNST - lse_BNS[..., None]).exp() @ v_BNTD.float()
    padded_BNS = torch.full((*lse_BNS.shape[:2], -(-lse_BNS.shape[2] // _ROWS) * _ROWS), math.inf)
    padded_BNS[:, :, : lse_BNS.shape[2]] = lse_BNS
    seed = torch.zeros((), dtype=torch.int64)
    return out_BNSD.to(q_BNSD.dtype).transpose(1, 2).contiguous().transpose(1, 2), padded_BNS, seed, seed


def efficient_attention_backward(
    dout_BNSD: Tensor, q_BNSD: Tensor, k_BNTD: Tensor, v_BNTD: Tensor, bias: Tensor | None, out_BNSD: Tensor,
    lse_BNS: Tensor, seed: Tensor, offset: Tensor, dropout_p: float, mask: list[bool], is_causal: bool = False, *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, None]:  # fmt: skip
    """aten::_scaled_dot_product_efficient_attention_backward. In 16 bits the kernel makes the sums of dO x O, and takes
    rows of O to be N x D apart (mem_eff_attention/kernel_backward.h, o_strideM); in float32 torch makes them."""
    assert not dropout_p and mask == [True, True, True, False]
    B, N, S, D = out_BNSD.shape
    assert lse_BNS.shape == (B, N, -(-S // _ROWS) * _ROWS) and lse_BNS.dtype == torch.float32
    if out_BNSD.element_size() == 2:
        strides = (out_BNSD.stride(0), out_BNSD.stride(1), N * D, 1)
        out_BNSD = out_BNSD.as_strided((B, N, S, D), strides)
    delta_BNS = (dout_BNSD.float() * out_BNSD.float()).sum(-1)
    scores_BNST = _scores(q_BNSD, k_BNTD, bias, is_causal=is_causal, scale=scale)
    shares_BNST = (scores_BNST - lse_BNS[:, :, :S, None]).exp()
    dshares_BNST = dout_BNSD.float() @ v_BNTD.float().transpose(2, 3)
    dscores_BNST = shares_BNST * (dshares_BNST - delta_BNS[..., None]) * (scale or D**-0.5)
    dq_BNSD = dscores_BNST @ k_BNTD.float()
    dk_BNTD = dscores_BNST.transpose(2, 3) @ q_BNSD.float()
    dv_BNTD = shares_BNST.transpose(2, 3) @ dout_BNSD.float()
    dtype = q_BNSD.dtype
    return dq_BNSD.to(dtype), dk_BNTD.to(dtype), dv_BNTD.to(dtype), None


def _scores(q_BNSD: Tensor, k_BNTD: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    scores_BNST = q_BNSD.float() @ k_BNTD.float().transpose(2, 3) * (scale or q_BNSD.shape[3] ** -0.5)
    if bias is not None:
        assert bias.shape == scores_BNST.shape and bias.stride(3) == 1
        assert bias.stride(2) * bias.element_size() % 16 == 0, "rows of a bias begin at multiples of 16 bytes"
        scores_BNST = scores_BNST + bias.float()
    if is_causal:
        later_ST = torch.ones(scores_BNST.shape[2:], dtype=torch.bool).triu(1)
        scores_BNST = scores_BNST.masked_fill(later_ST, -math.inf)
    return scores_BNST


@pytest.fixture
def cuda_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's operators for CUDA are those of this file."""
    operators = SimpleNamespace(
        _scaled_dot_product_efficient_attention=efficient_attention,
        _scaled_dot_product_efficient_attention_backward=efficient_attention_backward,
    )
    monkeypatch.setattr(
        "shardwright.parallel.context.block_attention.torch",
        _TorchWith(SimpleNamespace(aten=operators)),
    )


class _TorchWith:
    """torch, with other operators."""

    def __init__(self, ops: SimpleNamespace) -> None:
        self.ops = ops

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)
