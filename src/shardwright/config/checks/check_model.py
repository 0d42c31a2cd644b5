"""Check the model by itself: its attention, its blocks, its positions, its biases and its experts."""

from shardwright.config.attention_sections import REPLACED_BY_LATENTS, TemperatureSpec, WindowSpec
from shardwright.config.base import field_text
from shardwright.config.divisors import nearest_divisors
from shardwright.config.model import ModelSpec
from shardwright.config.phrase import say


def model_faults(model: ModelSpec) -> list[str]:
    """Contradictions among the fields of a model."""
    faults: list[str] = [*model.latent.faults(), *(_latent_faults(model) if model.is_latent else _head_faults(model))]
    faults += [*model.moe.faults(model.layers), *_mtp_faults(model), *_block_faults(model), *_bias_faults(model)]
    faults += [*model.window.faults(model.layers), *model.adapter.faults()]
    grows_in_some = model.temperature_tuning != TemperatureSpec() and not model.temperature_tuning.in_all_layers
    if grows_in_some and not model.no_rotary_every:
        faults.append(
            say(
                "model.temperature_tuning is for layers that turn nothing, and model.no_rotary_every 0 says that "
                "none is one of them; set that or in_all_layers, or leave it out"
            )
        )
    return faults + (_rotary_faults(model) if model.positions == "rotary" else _unturned_faults(model))


def _rotary_faults(model: ModelSpec) -> list[str]:
    """Faults of rotary positions on heads that they can't turn."""
    faults = model.rotary_scaling.faults(model.rotary_width // 2)
    if model.rotary_dim % 2 or model.rotary_dim > model.head_size:
        faults.append(
            say(
                "rotary positions turn pairs of the {head_size} elements of a head, and model.rotary_dim is "
                "{rotary_dim}; use an even number of at most {head_size}",
                head_size=model.head_size,
                rotary_dim=model.rotary_dim,
            )
        )
    return faults


def _unturned_faults(model: ModelSpec) -> list[str]:
    """Faults of fields of rotary positions in a model without rotary positions."""
    window_faults: list[str] = [
        say(
            'model.window.{name} is of rotary positions, and model.positions is "{positions}"; leave it out',
            name=name,
            positions=model.positions,
        )
        for name in ("rotary_base", "rotary_scaled")
        if getattr(model.window, name) != WindowSpec.model_fields[name].default
    ]
    return (
        window_faults
        + [
            say(
                'model.{name} is of rotary positions, and model.positions is "{positions}"; leave it out',
                name=name,
                positions=model.positions,
            )
            for name in ("rotary_dim", "rotary_scaling", "no_rotary_every", "temperature_tuning")
            if getattr(model, name) != ModelSpec.model_fields[name].default
        ]
        + (
            [
                say(
                    'model.qk_norm = "l2" is for what was turned by its position, and model.positions is '
                    '"{positions}"; leave it out, or use positions = "rotary"',
                    positions=model.positions,
                )
            ]
            if model.qk_norm == "l2"
            else []
        )
    )


def _block_faults(model: ModelSpec) -> list[str]:
    """Faults of fields of a block that exclude each other."""
    faults = list[str]()
    if model.parallel_block != "none":
        setting = say('model.parallel_block = "{parallel_block}"', parallel_block=model.parallel_block)
        if model.norm_place != "before":
            faults.append(
                say(
                    '{setting} adds what attention and MLP give at once, and model.norm_place = "{norm_place}" '
                    'normalises each; use norm_place = "before", or parallel_block = "none"',
                    setting=setting,
                    norm_place=model.norm_place,
                )
            )
        if model.moe.experts:
            experts = say("model.moe.experts is {experts}", experts=model.moe.experts)
            faults.append(
                say(
                    '{setting} has an MLP beside attention, and {experts}; use "none"',
                    setting=setting,
                    experts=experts,
                )
            )
        if model.is_latent:
            faults.append(
                say('{setting} is not for latent attention, and model.latent is set; use "none"', setting=setting)
            )
    if model.activation == "clamped-silu" and not model.gated_mlp:
        faults.append(
            say('model.activation = "clamped-silu" is of gate and up, and model.gated_mlp is false; set it to true')
        )
    if model.position_offset and model.positions != "learned":
        faults.append(
            say(
                'model.position_offset is {position_offset}, and model.positions = "{positions}" has no table '
                "of learned ones; leave it out",
                position_offset=model.position_offset,
                positions=model.positions,
            )
        )
    return faults


def _bias_faults(model: ModelSpec) -> list[str]:
    """Faults of biases that a model can't have, or has by another field."""
    own, normed = "bias" if model.bias else "attention_bias", model.norm == "layernorm" and model.norm_weight
    has_own = model.has_attention_bias and not model.is_latent
    faults = (
        model.qkv_bias
        and has_own
        and say("qkv_bias is true, and model.{own} has those of query, key and value too", own=own),
        model.attention_bias and model.bias and say("attention_bias is true, and model.bias has these too"),
        model.mlp_bias and model.bias and say("mlp_bias is true, and model.bias has those of the MLP too"),
        model.mlp_bias
        and model.attention_bias
        and say("mlp_bias is true, and with model.attention_bias it is model.bias"),
        model.mlp_bias
        and model.moe.experts > 0
        and say("mlp_bias is true, and experts have biases by model.bias alone"),
        model.head_bias and model.tied_embeddings and say("head_bias is true, and the head is the table of embeddings"),
        model.head_bias and model.mtp_layers > 0 and say("head_bias is true, and model.mtp_layers use the head too"),
        not (model.norm_bias or normed) and say("norm_bias is false, and only LayerNorms with weights have some"),
    )
    return [say("model.{fault}; leave it out", fault=fault) for fault in faults if fault]


def _mtp_faults(model: ModelSpec) -> list[str]:
    """Faults of multi-token prediction: a weight without modules, or more modules than tokens to predict."""
    if not model.mtp_layers and model.mtp_weight != ModelSpec.model_fields["mtp_weight"].default:
        return [
            say(
                "model.mtp_weight is {mtp_weight:g}, and model.mtp_layers is 0, so nothing predicts further "
                "tokens; leave it out, or set model.mtp_layers = 1",
                mtp_weight=model.mtp_weight,
            )
        ]
    if model.mtp_layers >= model.sequence:
        return [
            say(
                "model.mtp_layers {mtp_layers} predicts tokens {distance} further, and of a sequence of "
                "{sequence} none has one ({sequence} + 1 tokens); use at most {most} model.mtp_layers, or a "
                "longer model.sequence",
                mtp_layers=model.mtp_layers,
                distance=model.mtp_layers + 1,
                sequence=model.sequence,
                most=model.sequence - 1,
            )
        ]
    return []


def _latent_faults(model: ModelSpec) -> list[str]:
    """Faults of fields of ordinary attention that latent attention does not have."""
    faults: list[str] = [
        say(
            "model.latent replaces {replaced}, and model.{name} is {value}; leave it out",
            replaced=replaced,
            name=name,
            value=field_text(getattr(model, name)),
        )
        for name, replaced in REPLACED_BY_LATENTS.items()
        if getattr(model, name) not in (ModelSpec.model_fields[name].default, model.heads * (name == "kv_heads"))
    ]
    if model.positions != "rotary":
        faults.append(
            say(
                'model.latent has rotary parts of heads, and model.positions is "{positions}"; use "rotary"',
                positions=model.positions,
            )
        )
    return faults


def _head_faults(model: ModelSpec) -> list[str]:
    faults = list[str]()
    if not model.head_dim and model.hidden % model.heads:
        faults.append(
            say(
                "model.hidden {hidden} does not split into {heads} heads ({hidden} = {size} x {heads} + "
                "{remainder}); use heads = {choices}, or set model.head_dim",
                hidden=model.hidden,
                heads=model.heads,
                size=model.hidden // model.heads,
                remainder=model.hidden % model.heads,
                choices=nearest_divisors(model.hidden, model.heads),
            )
        )
    if model.heads % model.num_kv_heads:
        faults.append(
            say(
                "model.kv_heads {num_kv_heads} does not divide model.heads {heads} (each key/value head serves "
                "heads / kv_heads query heads); use {choices}",
                num_kv_heads=model.num_kv_heads,
                heads=model.heads,
                choices=nearest_divisors(model.heads, model.num_kv_heads),
            )
        )
    if model.positions == "rotary" and model.head_size % 2 and not model.rotary_dim:
        faults.append(
            say(
                "rotary positions turn pairs of elements, and a head has {head_size}; use an even "
                'model.head_dim, or positions = "learned"',
                head_size=model.head_size,
            )
        )
    if model.qk_norm == "full" and model.norm != "rmsnorm":
        faults.append(
            say(
                'model.qk_norm = "full" is an RMSNorm of all heads, and model.norm is "{norm}"; use '
                '"head", or norm = "rmsnorm"',
                norm=model.norm,
            )
        )
    return faults
