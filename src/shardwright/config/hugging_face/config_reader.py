"""Read one config.json key by key, and find the keys that nothing has read.

A present key that the family's function never reads is a fault, unless it does not affect the model's arithmetic. So a
configuration is never understood only in part.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.fault_gathering_reader import FaultGatheringReader, is_finite, is_whole
from shardwright.config.phrase import any_of, say

# Keys about running, saving or reading a model, which do not change what its layers compute.
_NO_ARITHMETIC = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_from_model_config", "_name_or_path",
    "add_cross_attention", "architectures", "attention_dropout", "attn_implementation", "attn_pdrop", "auto_map",
    "bad_words_ids", "begin_suppress_tokens", "boi_token_index", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "classifier_dropout", "cross_attention_hidden_size", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "dtype", "early_stopping", "embd_pdrop_classifier",
    "encoder_no_repeat_ngram_size", "eoi_token_index", "eos_token_id", "exponential_decay_length_penalty",
    "finetuning_task", "for_llm_compressor", "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing",
    "hybrid_cache", "id2label", "image_token_index", "initial_context_length", "is_decoder", "is_encoder_decoder",
    "keys_to_ignore_at_inference", "label2id", "length_penalty", "max_length", "max_new_tokens", "min_length",
    "model_type", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "offset_alibi",
    "output_attentions", "output_hidden_states", "output_router_logits", "output_scores", "pad_token_id", "prefix",
    "pretraining_tp", "problem_type", "pruned_heads", "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "router_aux_loss_coef", "router_jitter_noise",
    "sep_token_id", "slow_but_exact", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
    "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript",
    "transformers.js_config", "transformers_version", "typical_p", "unk_token_id", "unsloth_fixed",
    "unsloth_version", "use_bfloat16", "use_cache", "use_flash_attn", "use_flash_attention", "use_return_dict",
})  # fmt: skip
# Keys of official files that transformers reads nowhere, or of one family and inert in others.
_INERT = frozenset(
    {
        "activation",
        "activation_function",
        "attention_probs_dropout_prob",
        "attention_softmax_in_fp32",
        "ep_size",
        "full_attn_mod",
        "fused_attn",
        "hidden_dropout_prob",
        "interpolate_factor",
        "is_llama_config",
        "move_model_to_device",
        "mtp_transformer_layers",
        "num_mtp_modules",
        "use_mtp",
        "max_sequence_length",
        "model_max_length",
        "n_special",
        "neftune_noise_alpha",
        "num_labels",
        "predict_special_tokens",
        "rope_interleaved",
        "scale_attention_softmax_in_fp32",
        "seq_length",
        "training_dtype",
        "resid_pdrop",
        "embd_pdrop",
        "sample_rate",
        "seq_aux",
        "aux_loss_alpha",
        "bias_dropout_fusion",
        "layer_norm_epsilon",
        "masked_softmax_fusion",
        "output_past",
        "scale_attn_weights",
        "sliding_window_size",
        "router_z_loss_coef",
        "use_cache_quantization",
        "use_cache_kernel",
        "use_fp8",
        "initializer_cutoff_factor",
        "pretrained_config",
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
        "vision_token_id",
        "audio_token_id",
        "boi_token_id",
        "eoi_token_id",
        "mm_tokens_per_image",
        "projector_hidden_act",
        "vision_feature_layer",
        "vision_feature_select_strategy",
        "multimodal_projector_bias",
        "spatial_merge_size",
        "image_seq_length",
    }
)
# Endings of keys whose text says which file it is, and nothing of what layers compute.
_REMARKS = ("version", "license", "description", "author", "comment", "model_name", "_date")
# Sections about other kinds of input -> what they are.
_OTHER_INPUTS = ("vision_config", "audio_config", "speech_config", "perceiver_config", "video_config")

_TOO_MANY = 2**63  # counts are less
_LEAST_DIVISOR = 1e-30  # because a quotient with a smaller divisor is practically infinite


@dataclass
class ConfigReader(FaultGatheringReader):
    """A reader of the keys of a configuration, with its family's defaults for missing keys.

    Each method returns the value of a key, or the family's default, or else the default of the call.
    """

    defaults: dict[str, Any] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def has(self, name: str) -> bool:
        """True if a key is present and not null."""
        return self.raw(name) is not None

    def named(self, *names: str) -> str:
        """The first of several names of a key that is present, else the first with a default, else the first."""
        present = [name for name in names if self.has(name)] or [name for name in names if name in self.defaults]
        return (present or list(names))[0]

    def count(self, name: str, default: int = 0) -> int:
        """An integer, not negative. A number like 4096.0 counts as one."""
        value = self._value(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        is_valid = is_whole(value) and 0 <= value < _TOO_MANY
        return int(self._checked(name, value, is_valid, say("a whole number, not negative, below 2^63"), default))

    def number(self, name: str, default: float = 0.0) -> float:
        """A finite number."""
        value = self._value(name, default)
        return float(self._checked(name, value, is_finite(value), say("a number"), default))

    def divisor(self, name: str, default: float) -> float:
        """A number that is used as a divisor."""
        value = self.number(name, default)
        if value < _LEAST_DIVISOR:
            self.fault(say("{name} is {value:g}, and is divided by; it should be more than 0", name=name, value=value))
            return default
        return value

    def optional_count(self, name: str) -> int:
        """An integer that may be null, which means 0 whatever the family's default is."""
        return 0 if self._is_null(name) else self.count(name)

    def optional_number(self, name: str) -> float:
        """A finite number that may be null, which means 0 whatever the family's default is."""
        return 0.0 if self._is_null(name) else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean."""
        value = self._value(name, default)
        return bool(self._checked(name, value, isinstance(value, bool), say("true or false"), default))

    def truth(self, name: str, default: bool = False) -> bool:
        """A boolean, or an integer, which is true unless it is 0."""
        value = self._value(name, default)
        return bool(self._checked(name, value, isinstance(value, int), say("true, false or a whole number"), default))

    def text(self, name: str, default: str = "") -> str:
        """A word."""
        value = self._value(name, default)
        return str(self._checked(name, value, isinstance(value, str), say("a word"), default))

    def section(self, name: str) -> dict[str, Any]:
        """The keys within a key; empty if it is missing."""
        value = self._value(name, {})
        return dict(self.checked(name, value, isinstance(value, dict), say("an object of keys and values"), {}))

    def words(self, name: str) -> list[str] | None:
        """A list of words, or None if it is missing."""
        return self._items(name, lambda item: isinstance(item, str), say("a list of words"))

    def counts(self, name: str) -> list[int] | None:
        """A list of integers, or None if it is missing."""
        return self._items(name, is_whole, say("a list of whole numbers"))

    def numbers(self, name: str) -> list[float] | None:
        """A list of finite numbers, or None if it is missing."""
        items = self._items(name, is_finite, say("a list of numbers"))
        return None if items is None else [float(item) for item in items]

    def _items(self, name: str, is_item: Callable[[Any], bool], expected: str) -> list[Any] | None:
        value = self._value(name, None)
        is_valid = value is None or (isinstance(value, list) and all(map(is_item, value)))
        items: list[Any] | None = self.checked(name, value, is_valid, expected, None)
        return items

    def must_be(self, name: str, allowed: tuple[Any, ...], reason: str, default: Any = None) -> None:
        """Add a fault if a key has a value that can't be expressed, so is not in `allowed`."""
        value = self._value(name, self.defaults.get(name, default))
        if value not in allowed:
            self.fault(
                say(
                    "{name} is {value}: {reason}; use {choices}, which alone can be expressed",
                    name=name,
                    value=_shown(value),
                    reason=reason,
                    choices=any_of(list(map(_shown, allowed))),
                )
            )

    def word_of(self, name: str, known: dict[str, str], default: str = "") -> str:
        """Our word for the word of a key."""
        value = self.text(name, default)
        if value not in known:
            self.fault(
                say(
                    "{name} is {value}, which can't be expressed; use one of {choices}",
                    name=name,
                    value=_shown(value),
                    choices=tuple(sorted(known)),
                )
            )
        return known.get(value, next(iter(known.values())))

    def leave(self, *names: str) -> None:
        """Mark keys of parts that are not taken, such as modules of further tokens. Those present are noted."""
        self.left += [name for name in names if self.raw(name)]

    def fault(self, text: str) -> None:
        """Add a fault."""
        self.faults.append(text)

    def fault_text(self, name: str, value: Any, expected: str) -> str:
        """The fault of a key, with its value."""
        return say("{name} is {value}, and should be {expected}", name=name, value=_shown(value), expected=expected)

    def all_faults(self) -> list[str]:
        """All faults, including one for each key with a value that nothing has read."""
        return self.faults + [
            say(
                "{name} is {value}, and it is not known what that does; remove it if it changes nothing of what the "
                "layers compute",
                name=shortened(name),
                value=_shown(self.given[name]),
            )
            for name in self._unknown()
            if not self._is_inert(name)
        ]

    def notes(self) -> list[str]:
        """Notes on keys that are not taken: inert keys, quantised weights, other kinds of input."""
        inert = [name for name in self._unknown() if self._is_inert(name)]
        ignored = self.left + [name for name in inert if name not in ("quantization_config", *_OTHER_INPUTS)]
        notes: list[str] = []
        if ignored:
            notes.append(say("config.json has {names}, which nothing reads here", names=tuple(ignored)))
        if "quantization_config" in inert:
            notes.append(
                say("quantization_config is ignored: weights are counted in the number type of compute, not quantised")
            )
        if others := [name for name in inert if name in _OTHER_INPUTS]:
            notes.append(
                say("the decoder of text is taken, and {names} of the model is not counted", names=tuple(others))
            )
        return notes

    def _unknown(self) -> list[str]:
        return sorted(set(self.unread()) - _NO_ARITHMETIC)

    def _is_inert(self, name: str) -> bool:
        """True for a key that changes nothing: a count or a dropout of 0, and text of a private name, or of one that
        says whose or which file it is."""
        known = _INERT | {"quantization_config", *_OTHER_INPUTS}
        value = self.given[name]
        is_remark = isinstance(value, str) and (name.startswith("_") or name.endswith(_REMARKS))
        is_nothing = value == 0 and (is_whole(value) or ("drop" in name and isinstance(value, float)))
        return name in known or is_remark or is_nothing

    def _is_null(self, name: str) -> bool:
        self.ignore(name)
        return name in self.given and self.given[name] is None

    def _value(self, name: str, default: Any) -> Any:
        value = self.raw(name)
        return self.defaults.get(name, default) if value is None else value

    def _checked(self, name: str, value: Any, is_valid: bool, expected: str, default: Any) -> Any:
        return self.checked(name, value, is_valid, expected, self.defaults.get(name, default))


def _shown(value: Any) -> str:
    """The text of a value: true, false and null as in JSON, others as in Python, shortened."""
    is_word = value is None or isinstance(value, bool)
    return {True: "true", False: "false", None: "null"}[value] if is_word else shortened(repr(value))
