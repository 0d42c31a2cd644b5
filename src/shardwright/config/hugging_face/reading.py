"""Read one config.json key by key, and find the keys that nothing has read.

A present key that the family's function never reads is a fault, unless it does not affect the model's arithmetic. So a
configuration is never understood only in part.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardwright.config.base import shortened

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
    "pretraining_tp", "problem_type", "pruned_heads", "quantization_config", "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "router_aux_loss_coef", "router_jitter_noise",
    "sep_token_id", "slow_but_exact", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
    "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript",
    "transformers.js_config", "transformers_version", "typical_p", "unk_token_id", "unsloth_fixed",
    "unsloth_version", "use_bfloat16", "use_cache", "use_flash_attn", "use_return_dict", "vision_config",
})  # fmt: skip

_TOO_MANY = 2**63  # counts are less
_LARGEST = sys.float_info.max  # because an integer of 400 digits can't become a float
_LEAST_DIVISOR = 1e-30  # because a quotient with a smaller divisor is practically infinite


@dataclass
class Reading:
    """The keys of a configuration, its family's defaults for missing keys, the faults so far, and the names of the keys
    that were read (`names_read`).

    Each method returns the value of a key, or the family's default. A value of the wrong kind adds a fault, and the
    default is returned.
    """

    keys: dict[str, Any]
    defaults: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    names_read: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        """True if a key is present and not null."""
        self.names_read.add(name)
        return self.keys.get(name) is not None

    def named(self, *names: str) -> str:
        """The first of several names of a key that is present, else the first with a default, else the first."""
        present = [name for name in names if self.has(name)] or [name for name in names if name in self.defaults]
        return (present or list(names))[0]

    def count(self, name: str, default: int = 0) -> int:
        """An integer, not negative. A number like 4096.0 counts as one."""
        value = self._value(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _TOO_MANY:
            self._wrong(name, value, "a whole number, not negative, below 2^63")
            return int(self._default(name, default))
        return value

    def number(self, name: str, default: float = 0.0) -> float:
        """A finite number."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
            self._wrong(name, value, "a number")
            return float(self._default(name, default))
        return float(value)

    def divisor(self, name: str, default: float) -> float:
        """A number that is used as a divisor."""
        value = self.number(name, default)
        if value < _LEAST_DIVISOR:
            self.faults.append(f"{name} is {value:g}, and is divided by; it should be more than 0")
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
        if not isinstance(value, bool):
            self._wrong(name, value, "true or false")
            return bool(self._default(name, default))
        return value

    def truth(self, name: str, default: bool = False) -> bool:
        """A boolean, or an integer, which is true unless it is 0."""
        value = self._value(name, default)
        if not isinstance(value, (bool, int)):
            self._wrong(name, value, "true, false or a whole number")
            return bool(self._default(name, default))
        return bool(value)

    def text(self, name: str, default: str = "") -> str:
        """A word."""
        value = self._value(name, default)
        if not isinstance(value, str):
            self._wrong(name, value, "a word")
            return str(self._default(name, default))
        return value

    def section(self, name: str) -> dict[str, Any]:
        """The keys within a key; empty if it is missing."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            self._wrong(name, value, "an object of keys and values")
            return {}
        return value

    def words(self, name: str) -> list[str] | None:
        """A list of words, or None if it is missing."""
        return self._items(name, lambda item: isinstance(item, str), "words")

    def counts(self, name: str) -> list[int] | None:
        """A list of integers, or None if it is missing."""
        return self._items(name, lambda item: type(item) is int, "whole numbers")

    def numbers(self, name: str) -> list[float] | None:
        """A list of finite numbers, or None if it is missing."""
        items = self._items(name, lambda item: type(item) in (int, float) and abs(item) <= _LARGEST, "numbers")
        return None if items is None else [float(item) for item in items]

    def _items(self, name: str, fits: Callable[[Any], bool], expected: str) -> list[Any] | None:
        value = self._value(name, None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(map(fits, value)):
            self._wrong(name, value, f"a list of {expected}")
            return None
        return value

    def must_be(self, name: str, allowed: tuple[Any, ...], reason: str, default: Any = None) -> None:
        """Add a fault if a key has a value that can't be expressed, so is not in `allowed`."""
        value = self._value(name, self.defaults.get(name, default))
        if value not in allowed:
            choices = " or ".join(map(_shown, allowed))
            self.faults.append(f"{name} is {_shown(value)}: {reason}; use {choices}, which alone can be expressed")

    def word_of(self, name: str, known: dict[str, str], default: str = "") -> str:
        """Our word for the word of a key."""
        value = self.text(name, default)
        if value not in known:
            choices = ", ".join(sorted(known))
            self.faults.append(f"{name} is {_shown(value)}, which can't be expressed; use one of {choices}")
        return known.get(value, next(iter(known.values())))

    def ignore(self, *names: str) -> None:
        """Mark keys as read that change nothing for this family."""
        self.names_read.update(names)

    def fault(self, text: str) -> None:
        """Add a fault."""
        self.faults.append(text)

    def all_faults(self) -> list[str]:
        """All faults, including one for each key with a value that nothing has read."""
        unread = sorted(
            name for name in self.keys if name not in self.names_read | _NO_ARITHMETIC and self._has_meaning(name)
        )
        return self.faults + [
            f"{shortened(name)} is {_shown(self.keys[name])}, and it is not known what that does; remove it if it "
            "changes nothing of what the layers compute"
            for name in unread
        ]

    def _has_meaning(self, name: str) -> bool:
        """True if a key has a value that may mean something: null, false and empty values count as absent."""
        value = self.keys[name]
        return not (value is None or value is False or value in ({}, [], ""))

    def _is_null(self, name: str) -> bool:
        self.names_read.add(name)
        return name in self.keys and self.keys[name] is None

    def _value(self, name: str, default: Any) -> Any:
        self.names_read.add(name)
        value = self.keys.get(name)
        return self._default(name, default) if value is None else value

    def _default(self, name: str, default: Any) -> Any:
        return self.defaults.get(name, default)

    def _wrong(self, name: str, value: Any, expected: str) -> None:
        self.faults.append(f"{name} is {_shown(value)}, and should be {expected}")


def _shown(value: Any) -> str:
    """The text of a value: true, false and null as in JSON, others as in Python, shortened."""
    return shortened(
        {True: "true", False: "false", None: "null"}.get(value, repr(value)) if _is_plain(value) else repr(value)
    )


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool)
