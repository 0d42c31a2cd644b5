"""The attention half of a layer, operator by operator: what model/attention.py and latent_attention.py keep.

Letters: S sequence, B microbatch size, T = S x B tokens, H hidden, N query heads and G key/value heads of a rank, D
width of a head's query and key, E of its value. Sizes are bytes on one rank.
"""

from shardwright.account.kept_tensors import FLOAT32, Chain, KeptTensors, Share
from shardwright.config.job import JobSpec


def stream_sizes(share: Share) -> dict[str, int]:
    """Tensors of the residual stream and of the norms of a block; those called whole are so along the sequence."""
    names = ("attention normal", "middle", "mlp normal", "output")
    return {
        **dict.fromkeys(("input", *names), share.stream),
        **dict.fromkeys((f"whole {name}" for name in names), share.whole_stream),
        "attention statistics": share.statistics(share.tokens_here),
        "mlp statistics": share.statistics(share.tokens_here),
    }


def attention_of(job: JobSpec) -> tuple[dict[str, int], Chain]:
    """Sizes of the tensors of any layer's attention, and its operators, for one microbatch on any rank."""
    share = Share.of(job)
    sizes, project, attend = _latent(job, share) if job.model.is_latent else _grouped(job, share)
    norm = KeptTensors("norm", "input", ("input", "attention statistics"), "attention normal")
    leave = KeptTensors("output", "attended", ("attended",), "middle", ("attended", "whole middle"))
    return sizes, (norm, project, attend, leave)


def _grouped(job: JobSpec, share: Share) -> tuple[dict[str, int], KeptTensors, KeptTensors]:
    """Attention with grouped queries."""
    model, element, tokens = job.model, share.element, share.tokens
    heads, kv_heads, width = model.heads // share.tp, model.num_kv_heads // share.tp, model.head_size
    qkv_width = (heads + 2 * kv_heads) * width
    # What attention sees: its tokens, or all of them of fewer heads, of which a group has its key and value at least.
    cp, trades = job.plan.cp, job.plan.cp > 1 and job.plan.cp_method == "ulysses"
    seen = (tokens * cp, heads // cp, max(1, kv_heads // cp)) if trades else (tokens, heads, kv_heads)
    tokens_seen, heads_seen, kv_seen = seen
    sizes = {
        "qkv": element * tokens * qkv_width,
        "biased qkv": element * tokens * qkv_width,
        "traded qkv": element * tokens_seen * (heads_seen + 2 * kv_seen) * width,
        "query": element * tokens_seen * heads_seen * width,
        "key": element * tokens_seen * kv_seen * width,
        "value": element * tokens_seen * kv_seen * width,
        "attended before trade": element * tokens_seen * heads_seen * width,
        "attended": element * tokens * heads * width,
        "log-sum-exp": FLOAT32 * tokens_seen * heads_seen,
        "head statistics": share.statistics(tokens_seen * (heads_seen + kv_seen)),
    }
    is_rotary = model.positions == "rotary"
    whole_qkv = "traded qkv" if trades else "biased qkv" if model.bias else "qkv"
    if model.qk_norm:
        kept: tuple[str, ...] = (whole_qkv, "head statistics", "query", "key")  # the value is a view
    elif is_rotary:
        kept = ("query", "key", "value")
    elif heads_seen == kv_seen or kv_seen == 1:
        kept = (whole_qkv,)  # three views of it
    else:
        kept = (whole_qkv, "query")  # several queries of a key are copied side by side
    output = "attended before trade" if trades else "attended"
    return (
        sizes,
        KeptTensors("qkv", "attention normal", ("attention normal",), "qkv", ("whole attention normal", "qkv")),
        KeptTensors("attention", "qkv", (*kept, output, "log-sum-exp"), "attended"),
    )


def _latent(job: JobSpec, share: Share) -> tuple[dict[str, int], KeptTensors, KeptTensors]:
    """Multi-head latent attention. Its "qkv" makes the latents; "attention" makes the heads from them, too."""
    model, latent, element, tokens = job.model, job.model.latent, share.element, share.tokens
    heads, width, value_width = model.heads // share.tp, model.query_width, model.value_width
    is_low_rank = latent.q_rank > 0
    # Without low-rank queries the latents are made of all tokens on each rank.
    rows = share.tokens_here if is_low_rank else tokens
    latents = latent.q_rank + latent.kv_rank + latent.rope_dim
    query, made = heads * width, heads * (latent.nope_dim + value_width)
    sizes = {
        "latents": element * rows * latents,
        "latent statistics": share.statistics(rows) * (2 if is_low_rank else 1),
        "normal latents": element * rows * latents,
        "whole latents": element * tokens * latents,
        "keys' latent": element * tokens * latent.kv_rank,
        "normal keys' latent": element * tokens * latent.kv_rank,
        "projected": element * tokens * (query + latents),
        "made keys and values": element * tokens * made,
        "query": element * tokens * query,
        "key": element * tokens * query,
        # Padded to the width of a key, as the output of the softmax is. What that gives is a copy then.
        "value": element * tokens * query,
        "padded attended": element * tokens * query if value_width < width else 0,
        "attended": element * tokens * heads * value_width,
        "log-sum-exp": FLOAT32 * tokens * heads,
    }
    heads_kept = ("query", "key", "value", "padded attended", "attended", "log-sum-exp")
    if not is_low_rank:
        return (
            sizes,
            KeptTensors(
                "qkv", "attention normal", ("attention normal",), "projected",
                ("whole attention normal", "query", "whole latents"),
            ),
            KeptTensors(
                "attention", "projected",
                ("keys' latent", "latent statistics", "normal keys' latent", *heads_kept), "attended",
                ("normal keys' latent", "made keys and values"),
            ),
        )  # fmt: skip
    return (
        sizes,
        KeptTensors(
            "qkv", "attention normal", ("attention normal",), "latents", ("attention normal", "latents"),
        ),
        KeptTensors(
            "attention", "latents", ("latents", "latent statistics", "normal latents", *heads_kept), "attended",
            ("whole latents", "query", "made keys and values"),
        ),
    )  # fmt: skip
