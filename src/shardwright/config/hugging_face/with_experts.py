"""Families with experts. Each function takes the keys of one family and gives fields of [model] and [model.moe]."""

from shardwright.config import largest
from shardwright.config.hugging_face.config_reader import ConfigReader
from shardwright.config.hugging_face.decoder_fields import Fields, decoder, experts, only_some_layers
from shardwright.config.hugging_face.layer_kinds import CHUNKED, window, window_in_all, without_positions
from shardwright.config.hugging_face.like_llama import (
    exaone4_windows,
    granite_scales,
    head_width,
    qwen_windows,
    with_granite_windows,
    with_local_rotary,
)
from shardwright.config.hugging_face.rotary_fields import rotary
from shardwright.config.hugging_face.with_latents import latent_attention
from shardwright.config.phrase import say


def mixtral(r: ConfigReader) -> Fields:
    """Mixtral (Jiang et al. 2024, arXiv 2401.04088)."""
    fields = decoder(r)
    if r.given.get("moe_frequency") == 1:  # of NeuronX Distributed: each layer has experts
        r.ignore("moe_frequency")
    moe = experts(r, "num_local_experts", width="intermediate_size") | {"softmax_over": "chosen"}
    return (
        fields
        | rotary(r, head_width(fields))
        | window_in_all(r, r.optional_count("sliding_window"), fields["layers"])
        | {"moe": moe}
    )


def qwen2_moe(r: ConfigReader) -> Fields:
    """Qwen 1.5 and 2 with experts: one shared expert, whose output is weighed by a gate."""
    fields = decoder(r) | {"qkv_bias": r.flag("qkv_bias", True)}
    moe = experts(r, "num_experts") | only_some_layers(r, fields["layers"])
    moe |= {"normalise": r.flag("norm_topk_prob"), "shared_experts": 1, "shared_gate": True}
    moe |= {"shared_ffn": r.count("shared_expert_intermediate_size")}
    # As in transformers, layers with even numbers below max_window_layers have windows.
    windows = qwen_windows(r, fields["layers"], lambda layer, first: layer % 2 == 1 or layer >= first)
    return fields | rotary(r, head_width(fields)) | windows | {"moe": moe}


def qwen3_moe(r: ConfigReader) -> Fields:
    """Qwen 3 with experts. Later releases of transformers have Mixtral's key for their number."""
    r.must_be("attention_bias", (False,), say("the MLP has no biases"))
    r.must_be("use_qk_norm", (True, None), say("queries and keys of Qwen 3 have norms"))
    fields = decoder(r) | {"qk_norm": "head"}
    moe = (
        experts(r, r.named("num_experts", "num_local_experts"))
        | only_some_layers(r, fields["layers"])
        | {"normalise": r.flag("norm_topk_prob")}
    )
    # In all layers; max_window_layers is not used.
    r.ignore("max_window_layers", "sliding_window")
    size = r.optional_count("sliding_window") if r.flag("use_sliding_window") else 0
    windows = window_in_all(r, size, fields["layers"])
    return fields | rotary(r, head_width(fields)) | windows | {"moe": moe}


def olmoe(r: ConfigReader) -> Fields:
    """OLMoE (Muennighoff et al. 2024, arXiv 2409.02060)."""
    r.must_be("attention_bias", (False,), say("the MLP has no biases"))
    fields = decoder(r) | {"qk_norm": "full"}
    fields["clip_qkv"] = r.optional_number("clip_qkv")
    moe = experts(r, "num_experts", width="intermediate_size") | {"normalise": r.flag("norm_topk_prob")}
    return fields | rotary(r, head_width(fields)) | {"moe": moe}


def granite_moe(r: ConfigReader) -> Fields:
    """Granite with experts."""
    r.must_be("attention_bias", (False,), say("the experts have no biases"))
    fields = decoder(r) | granite_scales(r)
    moe = experts(r, "num_local_experts", width="intermediate_size") | {"softmax_over": "chosen"}
    return fields | rotary(r, head_width(fields)) | {"moe": moe}


def granite_moe_shared(r: ConfigReader) -> Fields:
    """Granite with experts, of which one may be shared."""
    fields, width = granite_moe(r), r.count("shared_intermediate_size")
    return fields | {"moe": fields["moe"] | ({"shared_experts": 1, "shared_ffn": width} if width else {})}


def granite_moe_swa(r: ConfigReader) -> Fields:
    """Granite with experts, windows and sinks."""
    return with_granite_windows(r, granite_moe_shared(r))


def glm4_moe(r: ConfigReader) -> Fields:
    """GLM-4.5 and later (arXiv 2508.06471): DeepSeek-V3's gate, grouped queries, half of each head rotary."""
    fields = decoder(r) | {"qkv_bias": r.flag("attention_bias")}
    fields["qk_norm"] = "head" if r.flag("use_qk_norm") else "none"
    return fields | rotary(r, head_width(fields), in_part=True) | _further_tokens(r) | {"moe": _sigmoid_experts(r)}


# Parts whose residual connections MiniMax-Text-01 scales; the files of M2 have the keys, and its layers do not.
_OF_MINIMAX_1 = ("full_attention", "linear_attention", "mlp")


def minimax_m2(r: ConfigReader) -> Fields:
    """MiniMax-M2 (2025): a norm of all heads' queries and of their keys, half of each head rotary, experts by sigmoid
    scores and biases."""
    r.must_be("use_qk_norm", (True, None), say("queries and keys have norms"))
    r.must_be("qk_norm_type", ("per_layer", None), say("a norm is of all heads together"))
    r.must_be("scoring_func", ("sigmoid", None), say("experts are chosen by sigmoid scores"))
    r.must_be("use_routing_bias", (True, None), say("experts are chosen by scores and biases"))
    r.must_be("shared_intermediate_size", (0, None), say("there is no shared expert"))
    r.must_be("attn_window_size", (None,), say("all layers see all tokens"))
    r.ignore("mlp_intermediate_size", "shared_moe_mode")  # of dense layers and shared experts, and there are none
    for part in _OF_MINIMAX_1:
        r.must_be(f"layernorm_{part}_beta", (1, None), say("residual connections are not scaled"))
    kinds = set(r.counts("attn_type_list") or [1])
    if kinds != {1}:
        r.fault(
            say(
                "attn_type_list has {kinds}; only 1, attention by a softmax, can be expressed", kinds=str(sorted(kinds))
            )
        )
    fields = decoder(r) | {"qk_norm": "full"}
    head = head_width(fields)
    share = {"partial_rotary_factor": r.count("rotary_dim") / head} if r.has("rotary_dim") and head else {}
    r.defaults = r.defaults | share
    moe = experts(r, "num_local_experts", width="intermediate_size") | {"gate": "sigmoid"}
    return fields | rotary(r, head, in_part=True) | {"moe": moe}


def solar_open(r: ConfigReader) -> Fields:
    """Solar Open (Upstage 2026): GLM-4.5 with experts in all layers, whole heads rotary, and no norms of heads."""
    r.must_be("attention_bias", (False,), say("linear layers have no biases"))
    r.must_be("use_qk_norm", (False, None), say("queries and keys have no norms"))
    r.must_be("first_k_dense_replace", (0, None), say("all layers have experts"))
    fields = decoder(r)
    return fields | rotary(r, head_width(fields)) | {"moe": _sigmoid_experts(r)}


def exaone_moe(r: ConfigReader) -> Fields:
    """K-EXAONE (LG AI 2026): EXAONE 4 with norms before attention and MLP, and DeepSeek-V3's gate."""
    _take_dense_layers(r, r.count("first_k_dense_replace"))
    fields = exaone4_windows(r) | {"qk_norm": "head"}
    return fields | {"moe": _sigmoid_experts(r, "num_experts", "num_shared_experts")}


def hy_v3(r: ConfigReader) -> Fields:
    """Hunyuan 3 (Tencent 2026): a norm of each head's query and key, and DeepSeek-V3's gate."""
    r.must_be("attention_bias", (False,), say("linear layers have no biases"))
    r.must_be("mlp_bias", (False,), say("the experts have no biases"))
    r.ignore("enable_moe_fp32_combine")  # of the number type in which a sum is taken
    _take_dense_layers(r)
    fields = decoder(r) | {"qk_norm": "head"}
    shared = r.optional_count("num_shared_experts")
    moe = experts(r, "num_experts") | {"gate": "sigmoid", "first_dense": r.count("first_k_dense_replace")}
    moe |= {"routed_scaling": r.number("router_scaling_factor", 1.0), "shared_experts": max(1, shared)}
    if not shared:  # in transformers a width of 0 is that of dense layers
        moe["shared_ffn"] = fields["ffn"]
    return fields | rotary(r, head_width(fields)) | {"moe": moe}


def ernie_moe(r: ConfigReader) -> Fields:
    """ERNIE 4.5 with experts (Baidu 2025): a softmax, and a bias that counts for the choice alone."""
    r.must_be("use_bias", (False, None), say("the experts have no biases"))
    r.must_be("moe_gate", ("topk", None), say("each token gets its best experts"))
    r.must_be("moe_use_aux_free", (True, None), say("experts are chosen by scores and biases"))
    r.must_be("moe_norm_min", (1e-12, None), say("weights are divided by their sum"))
    r.leave("num_nextn_predict_layers")
    r.ignore("moe_capacity")
    fields = decoder(r)
    first, every = r.count("moe_layer_start_index"), max(1, r.count("moe_layer_interval", 1))
    last = fields["layers"] - 1
    r.must_be("moe_layer_end_index", (-1, last, None), say("all layers after the first dense ones may have experts"))
    moe = experts(r, "moe_num_experts", chosen="moe_k") | {"gate": "biased-softmax"}
    moe |= {"shared_experts": r.count("moe_num_shared_experts"), "first_dense": first // every * every, "every": every}
    return fields | rotary(r, head_width(fields)) | {"moe": moe}


def flex_olmo(r: ConfigReader) -> Fields:
    """FlexOlmo (Shi et al. 2025, arXiv 2507.07024): OLMo 2 with experts."""
    r.must_be("attention_bias", (False,), say("the MLP has no biases"))
    fields = decoder(r) | {"norm_place": "after", "qk_norm": "full"}
    moe = experts(r, "num_experts", width="intermediate_size") | {"normalise": r.flag("norm_topk_prob")}
    return fields | rotary(r, head_width(fields)) | {"moe": moe}


def mellum(r: ConfigReader) -> Fields:
    """Mellum 2 (JetBrains 2026): Qwen 3 with experts, some layers with windows and rotary positions of their own."""
    r.must_be("attention_bias", (False,), say("the MLP has no biases"))
    r.leave("num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types")
    _take_dense_layers(r, usual=0)
    fields = decoder(r) | {"qk_norm": "head"}
    fields |= rotary(r, head_width(fields)) | window(
        r, r.optional_count("sliding_window"), fields["layers"], lambda _: True
    )
    fields = with_local_rotary(r, fields, fields["rotary_base"])
    moe = experts(r, r.named("num_local_experts", "num_experts")) | {"normalise": r.flag("norm_topk_prob")}
    return fields | {"moe": moe | {"first_dense": r.count("first_k_dense_replace")}}


def dots1(r: ConfigReader) -> Fields:
    """dots.llm1 (rednote-hilab 2025, arXiv 2506.05767): DeepSeek-V3's gate, a norm of each head's query and key."""
    r.must_be("attention_bias", (False,), say("the MLP has no biases"))
    for name in ("scoring_func", "topk_method"):
        r.must_be(name, ("noaux_tc", "sigmoid", None), say("experts are chosen by sigmoid scores"))
    fields = decoder(r) | {"qk_norm": "head"}
    first = r.count("max_window_layers")
    windows = window(r, r.optional_count("sliding_window"), fields["layers"], lambda layer: layer < first)
    return fields | rotary(r, head_width(fields)) | windows | {"moe": _sigmoid_experts(r)}


def glm4_moe_lite(r: ConfigReader) -> Fields:
    """GLM-4.7-Flash (2026): DeepSeek-V3 with one dense layer."""
    _take_dense_layers(r)
    return deepseek_v3(r)


def _take_dense_layers(r: ConfigReader, usual: int = 1) -> None:
    """Take the number of dense layers from mlp_layer_types, as the default of first_k_dense_replace; `usual` without
    that key."""
    kinds = r.words("mlp_layer_types")
    layers = min(r.count("num_hidden_layers"), largest.LAYERS)
    dense = usual if kinds is None else kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if kinds is not None and kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        r.fault(say("mlp_layer_types has other layers than dense ones before those with experts; set it so"))
    r.must_be("first_k_dense_replace", (dense, None), say("mlp_layer_types says which layers are dense"))
    r.defaults = {"first_k_dense_replace": dense} | r.defaults


def deepseek_v2(r: ConfigReader) -> Fields:
    """DeepSeek-V2 (arXiv 2405.04434)."""
    r.must_be("mlp_bias", (False,), say("the experts have no biases"))
    moe = routed_experts(r) | {"normalise": r.flag("norm_topk_prob")}
    method = r.text("topk_method", "greedy")
    if method == "group_limited_greedy":
        moe |= _groups(r) | {"group_score": "max"}
    else:
        r.must_be("topk_method", ("greedy", "group_limited_greedy"), say("it says how experts are chosen"), "greedy")
        r.ignore("n_group", "topk_group")
    r.must_be("scoring_func", ("softmax", None), say("DeepSeek-V2 chooses by a softmax"))
    return latent_attention(r) | {"moe": moe}


def deepseek_v3(r: ConfigReader) -> Fields:
    """DeepSeek-V3 and R1 (arXiv 2412.19437), Kimi K2, Moonlight."""
    r.must_be("topk_method", ("noaux_tc", None), say("DeepSeek-V3 chooses by scores and biases"))
    r.must_be("scoring_func", ("sigmoid", None), say("DeepSeek-V3 chooses by sigmoid scores"))
    return latent_attention(r) | _further_tokens(r) | {"moe": _sigmoid_experts(r)}


def _sigmoid_experts(r: ConfigReader, num: str = "n_routed_experts", shared: str = "n_shared_experts") -> Fields:
    """The gate of DeepSeek-V3 (section 2.1.2). `num` and `shared` are the keys of the numbers of experts."""
    return (
        routed_experts(r, num, shared) | _groups(r) | {"gate": "sigmoid", "normalise": r.flag("norm_topk_prob", True)}
    )


def routed_experts(r: ConfigReader, num: str = "n_routed_experts", shared: str = "n_shared_experts") -> Fields:
    """Routed and shared experts by DeepSeek's keys."""
    fields = experts(r, num)
    every = r.count("moe_layer_freq", 1)
    if every > 1:
        r.fault(
            say(
                "moe_layer_freq is {every}, and only 1 can be expressed, all after the first dense ones; set it to 1",
                every=every,
            )
        )
    r.ignore("ep_size", "aux_loss_alpha", "seq_aux")
    return fields | {
        "shared_experts": r.optional_count(shared),
        "first_dense": r.count("first_k_dense_replace"),
        "routed_scaling": r.number("routed_scaling_factor", 1.0),
    }


def _groups(r: ConfigReader) -> Fields:
    """The groups of experts in which a token's experts may lie; empty for a single group."""
    groups, kept = r.count("n_group", 1), r.count("topk_group", 1)
    if not (groups and kept):
        r.fault(
            say(
                "n_group is {groups} and topk_group is {kept}, and experts of no group can't be chosen; use 1 or more",
                groups=groups,
                kept=kept,
            )
        )
    return {"num_groups": groups, "groups_kept": kept} if groups > 1 else {}


def _further_tokens(r: ConfigReader) -> Fields:
    """Modules of multi-token prediction, if the configuration has a key for them; many releases leave them out."""
    name = "num_mtp_layers" if r.has("num_mtp_layers") else "num_nextn_predict_layers"
    r.ignore("num_mtp_layers", "num_nextn_predict_layers")
    return {"mtp_layers": r.count(name)} if r.has(name) else {}


def llama4(r: ConfigReader) -> Fields:
    """Llama 4's text model: attention in chunks; every fourth layer attends to all tokens, without positions; experts
    whose input is weighed."""
    r.must_be("attention_bias", (False,), say("the experts have no biases"))
    fields = decoder(r)
    layers = fields["layers"]
    fields["ffn"] = r.count("intermediate_size_mlp")
    fields["qk_norm"] = "l2" if r.flag("use_qk_norm", True) else "none"
    fields |= rotary(r, head_width(fields)) | without_positions(r, layers)
    every = fields.get("no_rotary_every", 0)
    fields |= window(
        r, r.count("attention_chunk_size"), layers, lambda layer: every > 0 and (layer + 1) % every == 0, CHUNKED
    )
    if r.truth("attn_temperature_tuning", True):  # released as 4, which transformers treats as true
        fields["temperature_tuning"] = {"scale": r.number("attn_scale", 0.1), "floor": r.count("floor_scale", 8192)}
    moe = experts(r, "num_local_experts", width="intermediate_size")
    moe |= {"weigh": "input", "gate": "sigmoid", "normalise": False, "shared_experts": 1}
    step = max(1, r.count("interleave_moe_layer_step", 1))
    moe_layers = r.counts("moe_layers")
    if moe_layers is not None and moe_layers != list(range(step - 1, min(layers, largest.LAYERS), step)):
        r.fault(say("moe_layers and interleave_moe_layer_step name different layers; leave moe_layers out"))
    return fields | {"moe": moe | {"every": step}}


def gpt_oss(r: ConfigReader) -> Fields:
    """gpt-oss (OpenAI 2025, arXiv 2508.10925): sinks, windows in every other layer, biases everywhere."""
    r.must_be("attention_bias", (True,), say("attention of gpt-oss has biases"))
    r.must_be("swiglu_alpha", (1.702, None), say("the clamped activation has this factor"))
    r.must_be("swiglu_limit", (7.0, None), say("the clamped activation has this limit"))
    r.ignore("experts_per_token", "initial_context_length", "max_window_layers")
    fields = decoder(r) | {"bias": True, "sinks": True, "activation": "clamped-silu"}
    moe = experts(r, "num_local_experts", width="intermediate_size")
    moe |= {"softmax_over": "chosen", "router_bias": True}
    layers = fields["layers"]
    windows = window(r, r.count("sliding_window"), layers, lambda layer: (layer + 1) % 2 == 0)
    fields |= rotary(r, head_width(fields)) | windows
    return fields | {"moe": moe}
