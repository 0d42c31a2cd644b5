"""Beginnings of texts and answers are those of transformers' tokenizer, and they end where the files say."""

import json
from pathlib import Path

import pytest

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.train.data.tokenizer import load_tokenizer
from shardwright.train.prompt import prompt_of
from support.brought_folder import bring_model


def job_of(folder: Path, vocab: int = 264) -> JobSpec:
    return make_job({"model": {"vocab": vocab}, "data": {"tokenizer": str(folder)}})


def test_a_chat_asks_as_the_template_does(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = bring_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reference = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Ünd 1?"}], add_generation_prompt=True, return_dict=False
    )
    prompt = prompt_of(job_of(folder), "", "Ünd 1?", is_chat=True)
    assert list(prompt.ids) == reference
    assert prompt.num_hidden == len(reference)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in prompt.ends


def test_the_end_of_a_turn_is_the_templates_where_no_file_says_it(tmp_path: Path) -> None:
    folder = bring_model(tmp_path)
    printed = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": printed["chat_template"]}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], "bos_token_id": 1}))
    assert prompt_of(job_of(folder), "", "1?", is_chat=True).ends >= {7, 9, 257}
    assert 257 not in prompt_of(job_of(folder), "", "1?", is_chat=False).ends


def test_a_released_model_is_given_what_its_tokenizer_puts_before_a_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors
    from transformers import AutoTokenizer

    folder = bring_model(tmp_path)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 256)]
    )
    library.save(str(folder / "tokenizer.json"))
    released = make_job({"model": {"weights": str(folder), "vocab": 264}, "data": {"tokenizer": str(folder)}})
    prompt = prompt_of(released, str(folder), "ab", is_chat=False)
    assert list(prompt.ids) == AutoTokenizer.from_pretrained(folder)("ab")["input_ids"]
    assert (prompt.ids[0], prompt.num_hidden, len(prompt.ids)) == (256, 1, 3)
    assert prompt_of(job_of(folder), "", "ab", is_chat=False).ids == prompt.ids  # as a run's documents


@pytest.mark.parametrize(
    ("special", "eos_token", "ends"),
    [
        (["<|im_end|>", "<|endoftext|>"], "<|im_end|>", "<|endoftext|>"),  # of a chat and of a text (Qwen)
        (["</s>", "<eos>"], "<eos>", "<eos>"),  # the other is a tag of HTML (Gemma)
        (["<｜end▁of▁sentence｜>"], "", "<｜end▁of▁sentence｜>"),
        (["<|return|>"], "<|return|>", "<|return|>"),
        (["<|im_end|>"], "", ""),
    ],
)
def test_documents_end_with_what_generate_ends_at(
    special: list[str], eos_token: str, ends: str, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    folder = bring_model(tmp_path)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens(special)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token} if eos_token else {}))
    tokenizer = load_tokenizer(job_of(folder).data)
    wanted = {library.token_to_id(ends)} if ends else set()
    assert {*tokenizer.end_of_text} == wanted
    assert wanted <= prompt_of(job_of(folder), "", "ab", is_chat=False).ends


@pytest.mark.parametrize(
    ("name", "text", "is_chat", "vocab", "fault"),
    [
        ("tokenizer_config.json", "{", False, 264, "is not JSON"),
        ("generation_config.json", "[1", True, 264, "is not JSON"),
        ("tokenizer_config.json", "{}", True, 264, "there is no chat template"),
        ("tokenizer_config.json", json.dumps({"chat_template": "{% for %}"}), True, 264, "is broken"),
        ("ignored.json", "", True, 200, "model.vocab is 200"),
    ],
)
def test_what_cannot_be_written(
    tmp_path: Path, name: str, text: str, is_chat: bool, vocab: int, fault: str
) -> None:  # fmt: skip
    folder = bring_model(tmp_path)
    (folder / name).write_text(text)
    with pytest.raises(PlanError, match=fault):
        prompt_of(job_of(folder, vocab), "", "1?", is_chat)


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    folder = bring_model(tmp_path)
    for is_chat in (False, True):
        with pytest.raises(PlanError, match="surrogates not allowed"):
            prompt_of(job_of(folder), "", "\udc80", is_chat)


def test_released_weights_without_their_tokenizer_write_nothing(tmp_path: Path) -> None:
    folder = bring_model(tmp_path)
    (folder / "tokenizer.json").unlink()
    job = make_job({"model": {"weights": str(folder), "vocab": 264}})
    with pytest.raises(PlanError, match=r"has no tokenizer\.json beside its weights; name their tokenizer"):
        prompt_of(job, str(folder), "ab", is_chat=False)
