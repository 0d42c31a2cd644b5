"""Names of each family's tensors and their fusions: one entry per family, as its released files have them.

{n} stands for the number of a layer, {e} for that of an expert. An empty name is a tensor that the family does not
have. Names are without ".weight" and ".bias".
"""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class FurtherNames:
    """Names of the parts of a module of multi-token prediction, by default DeepSeek's.

    The module is a layer behind the others, or `layer`, where {n} is its own number. Files have copies of the tables
    in each module if `copies_tables`. The projection takes the embedding before the hidden state, or after it if
    `hidden_first`.
    """

    layer: str = ""
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    project: str = "eh_proj"
    norm: str = "shared_head.norm"
    copies_tables: bool = True
    hidden_first: bool = False


@dataclass(frozen=True)
class FamilyNames:
    """Names of the tensors of a family.

    `fused` says how the matrix `q` holds query, key and value: only the query ("apart", and `k` and `v` are the other
    matrices), one after the other ("stacked"), or by key/value head as in this decoder ("grouped"). An MLP whose `gate`
    is empty has gate and up in one matrix, `up`, gate first. `transposed` matrices are [inputs, outputs]. `interleaved`
    heads rotate neighbouring elements. Norms with `plus_one` are 1 + weight. Experts are a matrix each ("each", names
    with {e}), or all in one tensor: [E, 2 F, H] ("rows"), [E, H, 2 F] ("columns"), or the latter with gate and up
    interleaved ("turns").
    """

    embedding: str = "model.embed_tokens"
    positions: str = ""
    embedding_norm: str = ""
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{n}"
    attention_norm: str = "input_layernorm"
    attention_out_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = ""
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    fused: Literal["apart", "stacked", "grouped"] = "apart"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    out: str = "self_attn.o_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    correction_bias: str = "mlp.gate.e_score_correction_bias"
    correction_bias_is_row: bool = False  # [1, E]
    experts: Literal["each", "rows", "columns", "turns"] = "each"
    expert_gate: str = "mlp.experts.{e}.gate_proj"
    expert_up: str = "mlp.experts.{e}.up_proj"
    expert_down: str = "mlp.experts.{e}.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    shared_gate_proj: str = "mlp.shared_experts.gate_proj"
    shared_up: str = "mlp.shared_experts.up_proj"
    shared_down: str = "mlp.shared_experts.down_proj"
    further: FurtherNames = FurtherNames()
    transposed: bool = False
    interleaved: bool = False
    plus_one: bool = False


_LLAMA = FamilyNames()
_HUNYUAN = replace(
    _LLAMA,
    q_norm="self_attn.query_layernorm",
    k_norm="self_attn.key_layernorm",
    router="mlp.gate.wg",
    shared_gate_proj="mlp.shared_mlp.gate_proj",
    shared_up="mlp.shared_mlp.up_proj",
    shared_down="mlp.shared_mlp.down_proj",
)
_GEMMA = replace(_LLAMA, plus_one=True)
_GEMMA2 = replace(
    _GEMMA,
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
_OLMO2 = replace(
    _LLAMA,
    attention_norm="",
    attention_out_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_out_norm="post_feedforward_layernorm",
)
_GLM = replace(_LLAMA, gate="", up="mlp.gate_up_proj", interleaved=True)
_QWEN_MOE = replace(
    _LLAMA,
    shared_gate_proj="mlp.shared_expert.gate_proj",
    shared_up="mlp.shared_expert.up_proj",
    shared_down="mlp.shared_expert.down_proj",
)
_IN_ROWS = replace(
    _LLAMA,
    experts="rows",
    expert_gate="",
    expert_up="mlp.experts.gate_up_proj",
    expert_down="mlp.experts.down_proj",
)
_GRANITE_MOE = replace(
    _LLAMA, router="block_sparse_moe.router.layer", experts="rows", expert_gate="",
    expert_up="block_sparse_moe.input_linear.weight", expert_down="block_sparse_moe.output_linear.weight",
    shared_gate_proj="", shared_up="shared_mlp.input_linear", shared_down="shared_mlp.output_linear",
)  # fmt: skip
_MIXTRAL = replace(
    _LLAMA,
    router="block_sparse_moe.gate",
    expert_gate="block_sparse_moe.experts.{e}.w1",
    expert_up="block_sparse_moe.experts.{e}.w3",
    expert_down="block_sparse_moe.experts.{e}.w2",
)
_BLOOM = replace(
    _LLAMA, embedding="transformer.word_embeddings", embedding_norm="transformer.word_embeddings_layernorm",
    norm="transformer.ln_f", layer="transformer.h.{n}", q="self_attention.query_key_value", k="", v="", fused="grouped",
    out="self_attention.dense", gate="", up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h",
)  # fmt: skip

_GPT2 = replace(
    _LLAMA,
    embedding="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
    layer="transformer.h.{n}",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    q="attn.c_attn",
    k="",
    v="",
    fused="stacked",
    out="attn.c_proj",
    gate="",
    up="mlp.c_fc",
    down="mlp.c_proj",
    transposed=True,
)

FAMILY_NAMES = {
    **dict.fromkeys(
        ("llama", "mistral", "smollm3", "qwen2", "qwen3", "qwen3_moe", "granite", "olmo", "olmoe", "deepseek_v2",
         "deepseek_v3", "kimi_k2", "glm4_moe", "seed_oss", "dots1", "glm4_moe_lite", "internlm", "internlm3",
         "deepseek", "minicpm", "orion", "iquestcoder", "cwm", "granite_swa", "ministral", "ministral3",
         "solar_open", "mellum", "youtu"), _LLAMA,
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "phi3": replace(
        _LLAMA, q="self_attn.qkv_proj", k="", v="", fused="stacked", gate="", up="mlp.gate_up_proj"
    ),
    "glm": _GLM,
    "glm4": replace(
        _GLM, attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm"
    ),
    "mixtral": _MIXTRAL,
    "qwen2_moe": _QWEN_MOE,
    # Qwen3-VL, whose decoder is Qwen 3's: its released files have columns, transformers 5 writes rows.
    "qwen3_moe-rows": _IN_ROWS,
    "qwen3_moe-columns": replace(_IN_ROWS, experts="columns"),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "granitemoe_swa": replace(
        _GRANITE_MOE, router="block_sparse_moe.router", expert_up="block_sparse_moe.experts.gate_up_proj",
        expert_down="block_sparse_moe.experts.down_proj",
    ),
    "llama4_text": replace(
        _LLAMA, gate="feed_forward.gate_proj", up="feed_forward.up_proj", down="feed_forward.down_proj",
        router="feed_forward.router", experts="columns", expert_gate="", expert_up="feed_forward.experts.gate_up_proj",
        expert_down="feed_forward.experts.down_proj", shared_gate_proj="feed_forward.shared_expert.gate_proj",
        shared_up="feed_forward.shared_expert.up_proj", shared_down="feed_forward.shared_expert.down_proj",
        interleaved=True,
    ),
    "gpt_oss": replace(
        _LLAMA, router="mlp.router", experts="turns", expert_gate="", expert_up="mlp.experts.gate_up_proj",
        expert_down="mlp.experts.down_proj",
    ),
    "internlm2": replace(
        _LLAMA, embedding="model.tok_embeddings", head="output", attention_norm="attention_norm", mlp_norm="ffn_norm",
        q="attention.wqkv", k="", v="", fused="grouped", out="attention.wo", gate="feed_forward.w1",
        up="feed_forward.w3", down="feed_forward.w2",
    ),
    "baichuan": replace(_LLAMA, q="self_attn.W_pack", k="", v="", fused="stacked"),
    "chatglm": replace(
        _LLAMA, embedding="transformer.embedding.word_embeddings", norm="transformer.encoder.final_layernorm",
        head="transformer.output_layer", layer="transformer.encoder.layers.{n}", q="self_attention.query_key_value",
        k="", v="", fused="stacked", out="self_attention.dense", gate="", up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h", interleaved=True,
    ),
    "exaone": replace(
        _LLAMA, embedding="transformer.wte", norm="transformer.ln_f", layer="transformer.h.{n}", attention_norm="ln_1",
        mlp_norm="ln_2", q="attn.attention.q_proj", k="attn.attention.k_proj", v="attn.attention.v_proj",
        out="attn.attention.out_proj", gate="mlp.c_fc_0", up="mlp.c_fc_1", down="mlp.c_proj",
    ),
    "qwen": replace(
        _LLAMA, embedding="transformer.wte", norm="transformer.ln_f", layer="transformer.h.{n}", attention_norm="ln_1",
        mlp_norm="ln_2", q="attn.c_attn", k="", v="", fused="stacked", out="attn.c_proj", gate="mlp.w2", up="mlp.w1",
        down="mlp.c_proj",
    ),
    "granitemoehybrid": replace(_LLAMA, gate="", up="shared_mlp.input_linear", down="shared_mlp.output_linear"),
    "mimo": replace(
        _LLAMA, further=FurtherNames(
            layer="model.mtp_layers.{n}", embedding_norm="token_layernorm", hidden_norm="hidden_layernorm",
            project="input_proj", norm="final_layernorm", copies_tables=False, hidden_first=True,
        ),
    ),
    "gptj": replace(
        _LLAMA, embedding="transformer.wte", norm="transformer.ln_f", layer="transformer.h.{n}", attention_norm="ln_1",
        q="attn.q_proj", k="attn.k_proj", v="attn.v_proj", out="attn.out_proj", gate="", up="mlp.fc_in",
        down="mlp.fc_out", interleaved=True,
    ),
    "phi": replace(_LLAMA, norm="model.final_layernorm", out="self_attn.dense", gate="", up="mlp.fc1", down="mlp.fc2"),
    "stablelm": _LLAMA,
    "cohere": replace(_LLAMA, interleaved=True),
    "cohere2": replace(_LLAMA, interleaved=True),
    "nemotron": replace(_LLAMA, gate="", plus_one=True),
    "arcee": replace(_LLAMA, gate=""),
    "helium": replace(_LLAMA, interleaved=True),
    "ernie4_5": replace(_LLAMA, interleaved=True),
    "ernie4_5_moe": replace(
        _LLAMA, correction_bias="mlp.moe_statics.e_score_correction_bias", correction_bias_is_row=True,
        interleaved=True,
    ),
    "exaone4": _OLMO2,
    "flex_olmo": _OLMO2,
    "exaone_moe": replace(_LLAMA, correction_bias="mlp.e_score_correction_bias"),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN,
    "hy_v3": replace(
        _LLAMA, router="mlp.router.gate", correction_bias="mlp.expert_bias",
        shared_gate_proj="mlp.shared_mlp.gate_proj", shared_up="mlp.shared_mlp.up_proj",
        shared_down="mlp.shared_mlp.down_proj",
    ),
    "hyperclovax": replace(_LLAMA, attention_out_norm="post_norm1", mlp_out_norm="post_norm2"),
    "vaultgemma": replace(_GEMMA, mlp_norm="pre_feedforward_layernorm"),
    "jais2": replace(_LLAMA, gate=""),
    "minimax_m2": replace(_MIXTRAL, correction_bias="block_sparse_moe.e_score_correction_bias"),
    "starcoder2": replace(_LLAMA, gate="", up="mlp.c_fc", down="mlp.c_proj"),
    "gpt2": _GPT2,
    "gpt_bigcode": replace(_GPT2, transposed=False),
    "gpt_neox": replace(
        _LLAMA, embedding="gpt_neox.embed_in", norm="gpt_neox.final_layer_norm", head="embed_out",
        layer="gpt_neox.layers.{n}", fused="grouped", q="attention.query_key_value", k="", v="", out="attention.dense",
        gate="", up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h",
    ),
    "opt": replace(
        _LLAMA, embedding="model.decoder.embed_tokens", positions="model.decoder.embed_positions",
        norm="model.decoder.final_layer_norm", layer="model.decoder.layers.{n}", attention_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm", out="self_attn.out_proj", gate="", up="fc1", down="fc2",
    ),
    "biogpt": replace(
        _LLAMA, embedding="biogpt.embed_tokens", positions="biogpt.embed_positions", norm="biogpt.layer_norm",
        head="output_projection", layer="biogpt.layers.{n}", attention_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm", out="self_attn.out_proj", gate="", up="fc1", down="fc2",
    ),
    "mpt": replace(
        _LLAMA, embedding="transformer.wte", norm="transformer.norm_f", layer="transformer.blocks.{n}",
        attention_norm="norm_1", mlp_norm="norm_2", q="attn.Wqkv", k="", v="", fused="stacked", out="attn.out_proj",
        gate="", up="ffn.up_proj", down="ffn.down_proj",
    ),
    "bloom": _BLOOM,
    "falcon": replace(_BLOOM, embedding_norm=""),
}  # fmt: skip
