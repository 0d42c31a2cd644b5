"""The one place where attention happens: softmax(Q K^T x scale) V, causal. Vaswani et al. 2017, section 3.2.1.

Every kind of attention comes here with queries, keys and values of its own making. torch picks the kernel; those that
keep no matrix of scores (Dao et al. 2022, arXiv 2205.14135) want keys and values of one width.

Shape suffixes: B batch, N query heads and G key/value heads of this rank, S sequence, D width of queries and keys,
E width of values.
"""

from torch import Tensor
from torch.nn import functional

from shardwright.model.forward_pass import ForwardPass


def dot_product_attention(q_BNSD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, scale: float, run: ForwardPass) -> Tensor:
    """Causal attention over the whole sequence, [B, N, S, E]; E may be less than D, and G must divide N.

    Query head n attends with key/value head n // (N / G). `run` is the pass that this is part of.
    """
    width, num_heads, num_kv_heads = v_BGSE.shape[-1], q_BNSD.shape[1], k_BGSD.shape[1]
    missing = q_BNSD.shape[-1] - width
    if missing:
        v_BGSE = functional.pad(v_BGSE, (0, missing))
    out_BNSE = functional.scaled_dot_product_attention(
        q_BNSD, k_BGSD, v_BGSE, is_causal=True, scale=scale, enable_gqa=num_heads > num_kv_heads
    )
    return out_BNSE[..., :width] if missing else out_BNSE
