"""Vocabularies: those that a launch script names only by their tokenizer, and sizes that software pads."""

from shardwright.config.phrase import say
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.reading.shell_marks import UNKNOWN

# Number of tokens, and owner, of vocabularies that a launch script names only by their tokenizer.
VOCABULARIES = {
    "gpt2bpetokenizer": (50257, say("GPT-2's")),
    "llama2tokenizer": (32000, say("Llama 2's")),
    "deepseek-ai/deepseek-v3": (128815, say("DeepSeek-V3's")),
    "deepseek-ai/deepseek-v2": (100015, say("DeepSeek-V2's")),
    "meta-llama/llama-3": (128256, say("Llama 3's")),
    "meta-llama/meta-llama-3": (128256, say("Llama 3's")),
    "meta-llama/llama-2": (32000, say("Llama 2's")),
    "mistralai/mixtral-8x7b": (32000, say("Mixtral's")),
    "mistralai/mixtral-8x22b-v0.1": (32000, say("Mixtral's")),
    "qwen/qwen2.5-": (151665, say("Qwen 2.5's")),
    "qwen/qwen3-": (151669, say("Qwen 3's")),
    "openai-community/gpt2": (50257, say("GPT-2's")),
    "eleutherai/gpt-neox-20b": (50277, say("GPT-NeoX-20B's")),
}
_NAMES_OF_GPT2 = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # of the Hub; a longer name may be another's

# Vocabularies that only the kind of the tokenizer names -> files of other ones, and words in the names of its own.
_FILES_OF_KIND = {
    "gpt2bpetokenizer": (("vocab-file", "merge-file"), ("gpt2", "gpt-2", "gpt3", "gpt")),
    "llama2tokenizer": (("tokenizer-model",), ("llama", "mistral", "mixtral", "vicuna", "alpaca", "yi-")),
}
_OF_OTHERS = ("neox", "gpt4", "gpt-4", "llama3", "llama-3")  # words of other vocabularies that have such a word
_PLAIN_NAMES = ("tokenizer.model", "merges.txt", "vocab.json")


def other_vocabulary(vocabulary: str, settings: Settings) -> str:
    """The setting of a tokenizer's file whose folders name another vocabulary than that of its kind; "" if none."""
    options, words = _FILES_OF_KIND.get(vocabulary, ((), ()))
    for option in options:
        path = " ".join(settings.words(option)).lower()
        folders = UNKNOWN.sub("", path).strip("/. ").split("/")
        names = [name for name in folders if name not in _PLAIN_NAMES and any(char.isalpha() for char in name)]
        is_own = any(
            any(word in part for word in words) and not any(word in part for word in _OF_OTHERS)
            for part in (folders[-1], path)
        )
        if names and not is_own and (len(names) > 1 or "-" in names[0]):
            return settings.setting_text(option)
    return ""


def vocabulary_of(settings: Settings, kind: str, name: str) -> str:
    """The vocabulary that the kind or the name of a tokenizer says, in small letters; "" if neither says one."""
    known = next((key for key in VOCABULARIES if key in (kind, name) or name.startswith(key)), "")
    is_gpt2 = name in _NAMES_OF_GPT2 or (settings.has("merge-file") and not kind)
    return known or ("gpt2bpetokenizer" if is_gpt2 else "")


def padded_vocabulary(settings: Settings, fields: Flat, tokens: int, unit: int = 1) -> int:
    """So many tokens, padded to a multiple of `unit` and the ranks of tp, with a note if these are more."""
    multiple = max(1, unit * fields["plan.tp"])
    padded = -(-tokens // multiple) * multiple
    if padded != tokens:
        settings.note(
            say(
                "{tokens:,} tokens are padded to {padded:,}, a multiple of {unit}",
                tokens=tokens,
                padded=padded,
                unit=f"{unit} x {fields['plan.tp']}",
            )
        )
    return padded
