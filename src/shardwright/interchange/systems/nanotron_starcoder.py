"""StarCoder 2 as nanotron had it in 2024 (`Starcoder2Config`): its keys under those of transformers' configuration."""

from typing import Any

from shardwright.config import largest
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.hugging_face.config_json import fields_of
from shardwright.config.phrase import say
from shardwright.interchange.reading.settings import Flat, Settings

KIND = "is_starcoder2_config"
# Keys of nanotron's -> keys of transformers' with the same values, and nanotron's defaults.
_SAME: tuple[tuple[str, str, Any], ...] = (
    ("activation_function", "hidden_act", "gelu_pytorch_tanh"),
    ("hidden_size", "hidden_size", 2048),
    ("max_position_embeddings", "max_position_embeddings", 4096),
    ("num_attention_heads", "num_attention_heads", 16),
    ("num_hidden_layers", "num_hidden_layers", 24),
    ("vocab_size", "vocab_size", 49280),
)
_NUMBERS = (
    ("attn_pdrop", "attention_dropout", 0.1),
    ("embd_pdrop", "embedding_dropout", 0.1),
    ("resid_pdrop", "residual_dropout", 0.1),
    ("layer_norm_epsilon", "norm_epsilon", 1e-5),
    ("rope_theta", "rope_theta", 10000.0),
)
_INERT = (
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "use_position_embeddings"),
    *("bos_token_id", "eos_token_id", "initializer_range"),
)


def read_starcoder2(settings: Settings, fields: Flat, section: str) -> None:
    """Set the fields of the model from the keys below a section: one head of keys unless grouped_query says more."""
    keys: dict[str, Any] = {"model_type": "starcoder2", "use_bias": True, "tie_word_embeddings": True}
    for name, key, default in _SAME:
        value = settings.raw(section + name)
        keys[key] = default if value is None else value
    keys |= {key: settings.number(section + name, default) for name, key, default in _NUMBERS}
    width = settings.raw(section + "intermediate_size")
    if width is None and isinstance(hidden := keys["hidden_size"], int):
        width = 4 * hidden
    is_grouped = settings.flag(section + "grouped_query")
    keys |= {"intermediate_size": width, "num_key_value_heads": 1}
    if is_grouped:
        keys["num_key_value_heads"] = settings.count(section + "num_kv_heads", 1, largest.HEADS, 1)
    settings.ignore(section + "multi_query", section + "num_kv_heads", *(section + name for name in (KIND, *_INERT)))
    keys["sliding_window"] = settings.raw(section + "sliding_window_size")
    _refuse(settings, section, bool(keys["sliding_window"]))
    model, faults = fields_of(keys)
    settings.faults += [say("{subject}: {fault}", subject="model.model_config", fault=fault) for fault in faults]
    fields |= flat_keys(model, "model.")
    fields["model.init_std"] = settings.number("model.init_method.std", 0.02)


def _refuse(settings: Settings, section: str, has_window: bool) -> None:
    """Add faults for attention over all tokens in some layers, without rotary positions, or without its scale."""
    layers = settings.raw(section + "global_attn_layers")
    wrong = [section + "global_attn_layers"] if layers and has_window else []
    wrong += [
        section + name
        for name in ("use_rotary_embeddings", "scale_attn_weights")
        if not settings.flag(section + name, True)
    ]
    settings.faults += [
        say("{setting}: this model can't be said here", setting=settings.setting_text(name)) for name in wrong
    ]
