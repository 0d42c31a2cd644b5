"""The attention half of a layer: what model/attention.py and latent_attention.py keep of each operator.

Letters: S sequence, B microbatch size, T = S x B tokens, H hidden, N query heads and G key/value heads of a rank, D
width of a head's query and key. Sizes are bytes on one rank.
"""

from shardwright.account.cast_inputs import FIRST, cast_inputs, waiting_operands
from shardwright.account.kept_tensors import FLOAT32, Bytes, Chain, Share, kept_chain
from shardwright.config.array_math import holds, most
from shardwright.config.job import JobSpec
from shardwright.workload.layer_operators import attention_operators

Kept = tuple[str, ...]


def attention_of(job: JobSpec, layer: int) -> tuple[dict[str, Bytes], Chain]:
    """Sizes of the tensors of a layer's attention, and its operators, for one microbatch on any rank."""
    share = Share.of(job)
    operators = attention_operators(share.tensors.shape)
    own, kept = _latent(job, share) if job.model.is_latent else _grouped(job, share, layer)
    sizes = share.sizes(operators) | own
    of_norm = share.statistics(share.tensors.tokens_here)
    sizes |= {"attention statistics": of_norm, "attention out statistics": of_norm}
    sizes["log-sum-exp"] = FLOAT32 * share.tensors["log-sum-exp"]
    keeps = {
        **dict.fromkeys(("norm", "norm of both"), ("input", "attention statistics")),
        "attention": (*kept, "log-sum-exp"),
        "out norm": ("attention output", "attention out statistics"),
    }
    # Of latents and of what attention gives others keep the input of products too.
    cast, in_place = cast_inputs(job, share, operators, () if job.model.is_latent else FIRST)
    sizes = sizes | waiting_operands(job, share, operators) | cast
    return sizes, kept_chain(operators, keeps | in_place, waits_in_float8=job.precision.float8_weight_gradients)


def _grouped(job: JobSpec, share: Share, layer: int) -> tuple[dict[str, Bytes], Kept]:
    """Tensors of attention with grouped queries that are not in the list, and which of all it keeps."""
    model, element, tokens = job.model, share.element, share.tensors.tokens
    heads, kv_heads, width = share.tensors.heads, model.num_kv_heads // job.plan.tp, model.head_size
    # What attention sees: its tokens, or all of them of fewer heads, of which a group has its key and value at least.
    cp, trades = job.plan.cp, job.plan.trades_heads
    seen = (tokens * cp, heads // cp, most(1, kv_heads // cp)) if trades else (tokens, heads, kv_heads)
    tokens_seen, heads_seen, kv_seen = seen
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
    if trades:
        whole_qkv = "traded qkv"
    if model.qk_norm == "head":
        kept += [whole_qkv, "head statistics", "query", "key"]  # the value is a view
    elif model.is_turned(layer):
        if model.qk_norm == "l2":
            kept += ["turned query", "turned key", "head statistics"]
        kept += ["query", "key", "value"]
    elif model.temperature_tuning.scale:
        kept += [whole_qkv, "query"]  # what queries were multiplied to
    elif holds((heads_seen == kv_seen) | (kv_seen == 1)):
        kept += [whole_qkv]  # three views of it
    else:
        kept += [whole_qkv, "query"]  # several queries of a key are copied side by side
    return sizes, (*kept, "attended before trade" if trades else "attended")


def _latent(job: JobSpec, share: Share) -> tuple[dict[str, Bytes], Kept]:
    """Tensors of multi-head latent attention that are not in the list, and which of all it keeps."""
    is_low_rank, is_padded = job.model.latent.q_rank > 0, job.model.value_width < job.model.query_width
    sizes = {
        "latent statistics": share.statistics(share.tensors.latent_tokens) * (2 if is_low_rank else 1),
        "normal latents": share["latents"],
        "keys' latent": share["normal keys' latent"],
        "query": share["query"],
        "key": share["query"],
        # Padded to the width of a key, as the output of the softmax is. What that gives is a copy then.
        "value": share["query"],
        "padded attended": share["query"] if is_padded else 0,
    }
    latents = ("latents", "normal latents") if is_low_rank else ("keys' latent", "normal keys' latent")
    return sizes, (*latents, "latent statistics", "query", "key", "value", "padded attended", "attended")
