"""Files that a user may come with: a small model's folder with its tokenizer and chat template, and chats."""

import json
from pathlib import Path

import pytest

from support import released_models

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_NUM_TOKENS, _SPECIAL = 264, ["<|im_start|>", "<|im_end|>"]


def bring_model(folder: Path) -> Path:
    """A tiny random Qwen3, whose tokens are bytes and the marks of a chat."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    family, keys = released_models.RELEASED["qwen3"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(released_models.RELEASED, "brought", (family, keys | {"vocab_size": _NUM_TOKENS}))
        released_models.save_released("brought", folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": _SPECIAL[1]}))
    return folder


def bring_chats(file: Path, count: int = 60) -> Path:
    """Questions of one number and answers of another."""
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n + 1}."}]}
        for n in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
