"""The core of attention: softmax(Q K^T x scale) V, causal. Vaswani et al. 2017, section 3.2.1.

Every kind of attention calls this with its own queries, keys and values. If one rank has all tokens, torch picks the
kernel. If the sequence is split over ranks, documents are separate, or the rule is not plain, attention runs block by
block (parallel/context/ring_attention.py). Kernels that keep no matrix of scores (Dao et al. 2022, arXiv 2205.14135)
need keys and values of one width.

Shape suffixes: B batch, N query heads and G key/value heads of this rank, S tokens of this rank, or of the whole
sequence if tokens were traded for heads, D width of queries and keys, E width of values.
"""

from dataclasses import replace
from pkgutil import resolve_name

from torch import Tensor
from torch.nn import functional

from shardwright.config.context_facts import CONTEXT_METHODS
from shardwright.model.forward_pass import ForwardPass
from shardwright.parallel.context.attention_rule import AttentionRule
from shardwright.parallel.context.block_attention import dry_attention
from shardwright.parallel.tensor.linear import LayerSharding


def dot_product_attention(
    q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, rule: AttentionRule, sharding: LayerSharding, run: ForwardPass
) -> Tensor:
    """Causal attention by a rule over the whole sequence, [S, B, N, E]; E may be less than D, and G must divide N.

    Query head n attends with key/value head n // (N / G). `run` has the values of the forward pass.
    """
    width, padding = v_SBGE.shape[-1], q_SBND.shape[-1] - v_SBGE.shape[-1]
    if padding:
        v_SBGE = functional.pad(v_SBGE, (0, padding))
    cp = sharding.cp.alone("cp") if sharding.trades_heads else sharding.cp
    documents = run.documents
    if rule.reach.is_chunked and run.chunks is not None:
        # Chunks are handled as documents. No key is further back than a chunk is long, so other blocks are skipped.
        documents, rule = run.chunks, replace(rule, reach=replace(rule.reach, is_chunked=False))
    if cp.size > 1 or documents is not None or not rule.is_plain(len(q_SBND)):
        across_ranks = resolve_name(CONTEXT_METHODS[sharding.cp_method].rule)
        out_SBND: Tensor = across_ranks(q_SBND, k_SBGD, v_SBGE, cp, documents, rule)
    else:
        q_BNSD, k_BGSD, v_BGSD = (x.permute(1, 2, 0, 3) for x in (q_SBND, k_SBGD, v_SBGE))
        if q_SBND.is_meta:
            out_BNSD = dry_attention(q_BNSD, k_BGSD, v_BGSD, rule.scale, device_type=cp.kind)
        else:
            out_BNSD = functional.scaled_dot_product_attention(
                q_BNSD, k_BGSD, v_BGSD, is_causal=True, scale=rule.scale, enable_gqa=q_SBND.shape[2] > k_SBGD.shape[2]
            )
        out_SBND = out_BNSD.permute(2, 0, 1, 3)
    return out_SBND[..., :width] if padding else out_SBND
