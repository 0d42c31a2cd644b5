"""The attention half of a layer: the tensors that model/attention.py and latent_attention.py keep for each operator.

Letters: S sequence, B microbatch size, T = S x B tokens, H hidden, N query heads and G key/value heads of a rank, D
width of a head's query and key. Sizes are bytes on one rank.
"""

from shardwright.config.array_math import holds
from shardwright.config.job import JobSpec
from shardwright.layers.layer_operators import attention_operators
from shardwright.layers.layer_tensors import ATTENTION, BLOCK, LATENT, LabelledTensor
from shardwright.memory.cast_inputs import FIRST, cast_inputs, waiting_operands
from shardwright.memory.kept_chain import Chain, UnitTensors, chain_bytes, kept_chain
from shardwright.memory.kept_tensors import IN_ATTENTION, IN_LATENT, HeadCounts, Share, TensorBytes, Tensors


def attention_of(job: JobSpec, layer: int) -> tuple[TensorBytes, Chain]:
    """(bytes of the tensors of a layer's attention, its operators), for one microbatch on any rank."""
    share = Share.of(job)
    operators = attention_operators(share.tensors.shape)
    core_keeps = _latent_core(job) if job.model.is_latent else _grouped_core(job, share, layer)
    norm = BLOCK.input, IN_ATTENTION.norm_statistics
    keeps: UnitTensors = {
        "norm": norm,
        "norm of both": norm,
        "attention": (*core_keeps, ATTENTION.log_sum_exp),
        "out norm": (BLOCK.attention_out, IN_ATTENTION.out_norm_statistics),
    }
    # Other operators also keep latents and the result of attention, so casts would not replace them.
    cast, in_place = cast_inputs(job, share, operators, () if job.model.is_latent else FIRST)
    in_float8 = waiting_operands(job, share, operators) | cast
    waits_in_float8, adapter = job.precision.float8_weight_gradients, job.model.adapter
    chain = kept_chain(operators, keeps | in_place, waits_in_float8=waits_in_float8, adapter=adapter)
    return chain_bytes(share, chain, in_float8), chain


def _grouped_core(job: JobSpec, share: Share, layer: int) -> Tensors:
    """The tensors that grouped-query attention keeps between its first and its last product."""
    model, counts = job.model, HeadCounts.of(share)
    kept = list[LabelledTensor]()
    whole_qkv: LabelledTensor = IN_ATTENTION.biased_qkv if model.has_attention_bias or model.qkv_bias else ATTENTION.qkv
    if model.qk_norm == "full":
        kept += [whole_qkv, IN_ATTENTION.all_heads_statistics]
        whole_qkv = IN_ATTENTION.all_heads_norm_out
    if model.clip_qkv:
        kept += [whole_qkv]
        whole_qkv = IN_ATTENTION.clipped_qkv
    if job.plan.trades_heads:
        whole_qkv = IN_ATTENTION.traded_qkv
    query, key, value = IN_ATTENTION.query, IN_ATTENTION.key, IN_ATTENTION.value
    if model.qk_norm == "head" or (model.norms_heads and not model.is_turned(layer)):
        kept += [whole_qkv, IN_ATTENTION.head_statistics, query, key]  # the value is a view
    elif model.is_turned(layer):
        if model.qk_norm in ("l2", "head-turned"):
            kept += [IN_ATTENTION.turned_query, IN_ATTENTION.turned_key, IN_ATTENTION.head_statistics]
        kept += [query, key, value]
    elif model.temperature_tuning.scale:
        kept += [whole_qkv, query]  # queries after scaling
    elif holds((counts.heads == counts.kv_heads) | (counts.kv_heads == 1)):
        kept += [whole_qkv]  # three views of it
    else:
        kept += [whole_qkv, query]  # queries of one key are copied to be contiguous
    return (*kept, IN_ATTENTION.attended_before_trade if job.plan.trades_heads else ATTENTION.attended)


def _latent_core(job: JobSpec) -> Tensors:
    """The tensors that latent attention keeps between its first and its last product."""
    latents: Tensors = LATENT.latents, IN_LATENT.latents_norm_out
    if not job.model.latent.q_rank:
        latents = IN_LATENT.key_latent, LATENT.key_latent_norm_out
    core = LATENT.query, IN_LATENT.key, IN_LATENT.value, IN_LATENT.padded_attended, ATTENTION.attended
    return (*latents, IN_LATENT.statistics, *core)
