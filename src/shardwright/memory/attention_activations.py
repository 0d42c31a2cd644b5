"""The attention half of a layer: the tensors that model/attention.py and latent_attention.py keep for each operator.

Letters: S sequence, B microbatch size, T = S x B tokens, H hidden, N query heads and G key/value heads of a rank, D
width of a head's query and key. Sizes are bytes on one rank.
"""

from shardwright.config.array_math import holds, most
from shardwright.config.job import JobSpec
from shardwright.layers.layer_operators import attention_operators
from shardwright.memory.cast_inputs import FIRST, cast_inputs, waiting_operands
from shardwright.memory.kept_tensors import FLOAT32, Bytes, Chain, Share, kept_chain

Kept = tuple[str, ...]


def attention_of(job: JobSpec, layer: int) -> tuple[dict[str, Bytes], Chain]:
    """(sizes of the tensors of a layer's attention, its operators), for one microbatch on any rank."""
    share = Share.of(job)
    operators = attention_operators(share.tensors.shape)
    own_sizes, kept = _latent(job, share) if job.model.is_latent else _grouped(job, share, layer)
    sizes = share.sizes(operators) | own_sizes
    norm_bytes = share.statistics(share.tensors.tokens_here)
    sizes |= {"attention statistics": norm_bytes, "attention out statistics": norm_bytes}
    sizes["log-sum-exp"] = FLOAT32 * share.tensors["log-sum-exp"]
    keeps = {
        **dict.fromkeys(("norm", "norm of both"), ("input", "attention statistics")),
        "attention": (*kept, "log-sum-exp"),
        "out norm": ("attention output", "attention out statistics"),
    }
    # Other operators also keep latents and the result of attention, so casts would not replace them.
    cast, in_place = cast_inputs(job, share, operators, () if job.model.is_latent else FIRST)
    sizes = sizes | waiting_operands(job, share, operators) | cast
    return sizes, kept_chain(operators, keeps | in_place, waits_in_float8=job.precision.float8_weight_gradients)


def _grouped(job: JobSpec, share: Share, layer: int) -> tuple[dict[str, Bytes], Kept]:
    """(sizes of tensors of grouped-query attention that are not in the list of operators, names that attention
    keeps)."""
    model, element, tokens = job.model, share.element, share.tensors.tokens
    heads, kv_heads, width = share.tensors.heads, model.num_kv_heads // job.plan.tp, model.head_size
    # Attention computes on the rank's tokens and all its heads, or on all tokens and a part of the heads.
    cp, trades_heads = job.plan.cp, job.plan.trades_heads
    sizes_seen = (tokens * cp, heads // cp, most(1, kv_heads // cp)) if trades_heads else (tokens, heads, kv_heads)
    tokens_seen, heads_seen, kv_seen = sizes_seen
    sizes = {
        **dict.fromkeys(("biased qkv", "normal qkv", "clipped qkv"), share["qkv"]),
        "traded qkv": element * tokens_seen * (heads_seen + 2 * kv_seen) * width,
        **dict.fromkeys(("query", "turned query"), share["attended"]),
        **dict.fromkeys(("key", "turned key"), element * tokens_seen * kv_seen * width),
        "value": element * tokens_seen * kv_seen * width,
        "attended before trade": share["attended"],
        "head statistics": (FLOAT32 if model.qk_norm == "l2" else share.statistics(1))
        * tokens_seen
        * (heads_seen + kv_seen),
    }
    whole_qkv, kept = "biased qkv" if model.bias or model.qkv_bias else "qkv", list[str]()
    if model.qk_norm == "full":
        sizes["statistics of all heads"] = 2 * FLOAT32 * tokens
        kept += [whole_qkv, "statistics of all heads"]
        whole_qkv = "normal qkv"
    if model.clip_qkv:
        kept += [whole_qkv]
        whole_qkv = "clipped qkv"
    if trades_heads:
        whole_qkv = "traded qkv"
    if model.qk_norm == "head":
        kept += [whole_qkv, "head statistics", "query", "key"]  # the value is a view
    elif model.is_turned(layer):
        if model.qk_norm == "l2":
            kept += ["turned query", "turned key", "head statistics"]
        kept += ["query", "key", "value"]
    elif model.temperature_tuning.scale:
        kept += [whole_qkv, "query"]  # queries after scaling
    elif holds((heads_seen == kv_seen) | (kv_seen == 1)):
        kept += [whole_qkv]  # three views of it
    else:
        kept += [whole_qkv, "query"]  # queries of one key are copied to be contiguous
    return sizes, (*kept, "attended before trade" if trades_heads else "attended")


def _latent(job: JobSpec, share: Share) -> tuple[dict[str, Bytes], Kept]:
    """(sizes of tensors of latent attention that are not in the list of operators, names that attention keeps)."""
    is_low_rank, is_padded = job.model.latent.q_rank > 0, job.model.value_width < job.model.query_width
    sizes = {
        "latent statistics": share.statistics(share.tensors.latent_tokens) * (2 if is_low_rank else 1),
        "normal latents": share["latents"],
        "keys' latent": share["normal keys' latent"],
        "query": share["query"],
        "key": share["query"],
        # Padded to the width of a key, like the result of attention, which is copied without the padding.
        "value": share["query"],
        "padded attended": share["query"] if is_padded else 0,
    }
    latents = ("latents", "normal latents") if is_low_rank else ("keys' latent", "normal keys' latent")
    return sizes, (*latents, "latent statistics", "query", "key", "value", "padded attended", "attended")
