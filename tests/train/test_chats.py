"""Chats: the template's text, the tokens of it, and which of them are learned, against transformers' own rendering."""

import json
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shardwright.config.base import PlanError, RunError
from shardwright.config.data import DataSpec
from shardwright.config.load import make_job
from shardwright.config.model import ModelSpec
from shardwright.sharding.token_marks import UNCOUNTED
from shardwright.train.data import encoding_process
from shardwright.train.data.chat_rows import Chat, chat_of
from shardwright.train.data.chat_template import ChatTemplate, LateError
from shardwright.train.data.encoding import HereEncoder
from shardwright.train.data.place import PlaceInData
from shardwright.train.data.prepare import prepare_tokens
from shardwright.train.data.prepared_tokens import TokenFiles
from shardwright.train.data.row_faults import FaultError
from shardwright.train.data.template_files import TemplateFiles, find_template, template_path
from shardwright.train.data.tokenizer import load_tokenizer

# As Qwen writes them, and as templates that mark what is learned do.
CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
OF_DOCS = template_path("chatml").read_text("utf-8")
MARKED = (
    "{{ bos_token }}{% for message in messages %}\n  {% if message.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ message.content | trim }}<|im_end|>{% endgeneration %}\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start|>' + message['role'] + '<|end|>\\n\\n' + "
    "message['content'] | trim + '<|eot|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}"
    "{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + "
    "message['content'] + ' [/INST]' }}{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
# Thoughts of turns that are over are left out, as in reasoning models.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>", "<s>", "</s>"]
TALK = [
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four, as ever."},
    {"role": "user", "content": "And größer ✓?"},
    {"role": "assistant", "content": "Five — größer ✓."},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer over bytes with special tokens and some merges."""
    result = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["what is two and two", "assistant user system four five as ever"] * 20, trainer)
    tokenizer.save(str(result / "tokenizer.json"))
    return result


def with_template(folder: Path, tmp_path: Path, template: str) -> Path:
    """A folder with the tokenizer and a template in its tokenizer_config.json."""
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def of_transformers(folder: Path, messages: list[dict[str, Any]], template: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", chat_template=template
    )
    return reference.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask="{% generation" in template
    ), reference.apply_chat_template(messages, tokenize=False)


def encoded(folder: Path, chat: Chat) -> tuple[list[int], list[int], Any]:
    """Ids, which of them are learned, and all that was said."""
    data = DataSpec(tokenizer=str(folder))
    template = find_template(data)
    assert template is not None
    result = HereEncoder(load_tokenizer(data), ChatTemplate(template)).encode([chat])
    mask = np.zeros(len(result.ids), np.int64)
    for first, last in result.answers.reshape(-1, 2):
        mask[first:last] = 1
    return result.ids.tolist(), mask.tolist(), result


@pytest.mark.parametrize("template", [CHATML, OF_DOCS, MARKED, LLAMA3, MISTRAL, THINKING])
def test_text_and_tokens_are_those_of_transformers(folder: Path, tmp_path: Path, template: str) -> None:
    own = with_template(folder, tmp_path, template)
    reference, text = of_transformers(own, TALK, template)
    ids, mask, _ = encoded(own, Chat("a", tuple(TALK)))
    assert ids == reference["input_ids"]
    assert load_tokenizer(DataSpec(tokenizer=str(own))).decode(ids) == text
    if "{% generation" in template:
        assert mask == reference["assistant_masks"]
    assert 0 < sum(mask) < len(mask)


def learned_text(folder: Path, chat: Chat) -> list[str]:
    tokenizer = load_tokenizer(DataSpec(tokenizer=str(folder)))
    ids, mask, _ = encoded(folder, chat)
    turns = np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2).tolist()
    return [tokenizer.decode(ids[first:last]) for first, last in turns]


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (CHATML, ["Four, as ever.<|im_end|>\n", "Five — größer ✓.<|im_end|>\n"]),
        (MARKED, ["Four, as ever.<|im_end|>", "Five — größer ✓.<|im_end|>"]),
        (LLAMA3, ["Four, as ever.<|eot|>", "Five — größer ✓.<|eot|>"]),
        (MISTRAL, ["Four, as ever.</s>", "Five — größer ✓.</s>"]),
    ],
)
def test_what_the_assistant_says_is_learned(folder: Path, tmp_path: Path, template: str, answers: list[str]) -> None:
    own = with_template(folder, tmp_path, template)
    assert learned_text(own, Chat("a", tuple(TALK))) == answers
    # Of prompts that are chats themselves, what was asked before is not learned.
    assert learned_text(own, Chat("a", tuple(TALK), first_learned=3)) == answers[1:]


def test_turns_that_are_shown_otherwise_later(folder: Path, tmp_path: Path) -> None:
    own = with_template(folder, tmp_path, THINKING)
    talk = [dict(one) for one in TALK]
    for turn in (1, 3):
        talk[turn]["content"] = f"<think>well</think>{talk[turn]['content']}"
    chat = Chat("a", tuple(talk))
    assert learned_text(own, chat) == ["well</think>Five — größer ✓.<|im_end|>\n"]
    _, _, result = encoded(own, chat)
    assert (result.num_answers, result.num_lost) == (2, 1)


def test_prompt_and_completion_are_plain_text(folder: Path) -> None:
    data = DataSpec(tokenizer=str(folder))
    tokenizer = load_tokenizer(data)
    chat = chat_of({"prompt": "What is two", "completion": " and two?"}, "a")
    result = HereEncoder(tokenizer, None).encode([chat])
    assert tokenizer.decode(result.ids) == "What is two and two?</s>"
    ((first, last),) = result.answers.reshape(-1, 2).tolist()
    assert tokenizer.decode(result.ids[first:last]) == " and two?</s>"


ROWS = {
    "messages": {"messages": TALK},
    "sharegpt": {"conversations": [
        {"from": "human" if one["role"] == "user" else "gpt", "value": one["content"]} for one in TALK
    ]},
    "conversations": {"conversations": TALK, "messages": None},
    "prompt of messages": {"prompt": TALK[:3], "completion": TALK[3:]},
}  # fmt: skip


def test_rows_as_people_keep_them() -> None:
    for name, row in ROWS.items():
        chat = chat_of(row, "a")
        assert list(chat.messages) == TALK, name
        assert chat.first_learned == (3 if name.startswith("prompt") else 0)
    chat = chat_of({"conversations": ROWS["sharegpt"]["conversations"], "system": "Be short."}, "a")
    assert chat.messages[0] == {"role": "system", "content": "Be short."}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "of type list; each line must be an object"),
        ({"text": "a"}, "has neither 'messages' nor 'conversations' nor 'prompt' and 'completion', but 'text'"),
        ({"messages": []}, "is an empty list of messages"),
        ({"messages": "hello"}, "is no list of messages"),
        ({"messages": ["hello"]}, "message 1 is of type str"),
        ({"messages": [{"content": "a"}]}, "message 1 has no role"),
        ({"messages": [{"role": "user", "content": "a"}]}, 'no message of the role "assistant" to learn, but of user'),
        ({"conversations": [{"from": "martian", "value": "a"}]}, "message 1 is from 'martian', and known are human"),
        ({"messages": [{"role": "assistant", "content": "\ud800"}]}, "half a surrogate pair"),
        ({"prompt": "a", "completion": ""}, "field 'completion' is empty"),
    ],
)
def test_rows_that_are_no_chats(row: object, message: str) -> None:
    with pytest.raises(FaultError) as caught:
        chat_of(row, "a.jsonl, line 3")
    assert message in str(caught.value)


def prepared(path: Path, tmp_path: Path, sequence: int = 64, **fields: Any) -> TokenFiles:
    data = DataSpec(
        path=str(path), separate_documents=True, **({"chats": True, "validation_share": 0.0, "workers": 1} | fields)
    )
    files = prepare_tokens(data, ModelSpec(sequence=sequence, vocab=320), 1, tmp_path / "cache")
    assert isinstance(files, TokenFiles)
    return files


@pytest.mark.long
def test_chats_from_files_to_samples(folder: Path, tmp_path: Path) -> None:
    """The same from lines and from columns; each whole in a sample, one that is longer cut, and both said."""
    own = with_template(folder, tmp_path, CHATML)
    long = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "two and two, " * 40}]
    rows = [{"messages": TALK}, {"messages": long}, *({"messages": TALK[:2]} for _ in range(5))]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    results = []
    for name in ("a.jsonl", "a.parquet"):
        files = prepared(tmp_path / name, tmp_path, tokenizer=str(own), sequence=96)
        samples = files.train_samples()
        results.append(samples.batch(0, len(samples)))
        assert len(files.train[0].document_starts()) == files.num_documents == 7
        packed, cut = files.described(10)
        assert packed.startswith(f"7 chats to train on are packed into {len(samples)} sequences, which they fill to ")
        assert cut.startswith("1 of these are longer than model.sequence 96 + 1 and cut at their ends, by ")
        *_, often = files.described(30 * len(samples))
        assert often.startswith("note: the run goes over these data 30 times, and may learn them by heart")
    assert np.array_equal(*results)
    everything = prepared(tmp_path / "a.jsonl", tmp_path, tokenizer=str(own), sequence=96, answers_only=False)
    whole = everything.train_samples().batch(0, len(samples))
    learned = [np.count_nonzero((rows >= 0) & (rows < UNCOUNTED)) for rows in (results[0], whole)]
    assert 0 < learned[0] < learned[1]
    held = prepared(tmp_path / "a.jsonl", tmp_path, tokenizer=str(own), sequence=96, validation_share=0.001)
    assert held.split == "tail"
    assert len(held.train[0].document_starts()) == 7
    validation = held.validation_samples()
    assert validation is not None and len(validation) == 1


def faults_of(template: str, tmp_path: Path, chats: list[Any], folder: Path, **fields: Any) -> list[str]:
    (tmp_path / "t.jinja").write_text(template)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    with pytest.raises(PlanError) as caught:
        prepared(tmp_path / "a.jsonl", tmp_path, tokenizer=str(folder), chat_template=str(tmp_path / "t.jinja"))
    return caught.value.faults


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}", "is broken: Unexpected end of template"),
        (
            "{{ messages[0].content.__class__.__mro__ }}",
            "refuses it: access to attribute '__class__'",
        ),
        ("{{ raise_exception('no such role') }}", "the chat template refuses it: no such role; mend that chat"),
        ("{{ open('/etc/passwd') }}", "the chat template refuses it: 'open' is undefined"),
        ("{{ messages.append(1) }}", "the chat template refuses it"),
        (
            "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
            "mark within another",
        ),
        ("{{ 'x' * 10**11 }}", "it takes more memory than there is for a chat"),
        ("no answer in it", "none of 1 answers can be told from what stands before it"),
    ],
)
def test_templates_of_strangers(folder: Path, tmp_path: Path, template: str, message: str) -> None:
    (fault,) = faults_of(template, tmp_path, [TALK[:2]], folder)
    assert message in fault


def test_where_no_answer_can_be_told_all_can_be_learned(folder: Path, tmp_path: Path) -> None:
    template = "no answer in it, but text that is long enough"
    assert len(faults_of(template, tmp_path, [TALK], folder)) == 1
    result = prepared(
        tmp_path / "a.jsonl",
        tmp_path,
        tokenizer=str(folder),
        chat_template=str(tmp_path / "t.jinja"),
        answers_only=False,
    )
    row = result.train_samples().batch(0, 1)[0]
    assert ((row >= 0) & (row < UNCOUNTED)).sum() == result.num_train_tokens - 1


def test_a_template_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_process, "CHAT_S", 0.2)
    # A process of its own may be ended by the kernel, and this one may not.
    monkeypatch.setattr(encoding_process.resource, "setrlimit", lambda *_: None)
    nested = "".join(f"{{% for i{n} in range(9999) %}}" for n in range(4)) + "{% endfor %}" * 4
    template = encoding_process.BoundedTemplate(TemplateFiles(nested, Path("t.jinja"), {}))
    with pytest.raises(LateError, match=r"takes more than 0.2 s; drop that chat"):
        template.write(Chat("line 5", tuple(TALK)))


def test_a_process_that_is_ended(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.train.data import encoding_pool

    ending = "import sys; sys.path[:] = {path!r}\nimport os; sys.stdin.buffer.read(8); os.abort()"
    monkeypatch.setattr(encoding_pool, "_MAIN", ending)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK}))
    with pytest.raises(RunError, match=r"has ended \(signal 6\)"):
        prepared(tmp_path / "a.jsonl", tmp_path, tokenizer=str(with_template(folder, tmp_path, CHATML)))


def test_where_a_template_is_found(folder: Path, tmp_path: Path) -> None:
    """Of several in a list the default; a file beside the tokenizer goes before it; else beside the weights."""
    own = with_template(folder, tmp_path, CHATML)
    data = DataSpec(tokenizer=str(own / "tokenizer.json"))
    config = json.loads((own / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "tools", "template": "x"}, {"name": "default", "template": "y"}]
    (own / "tokenizer_config.json").write_text(json.dumps(config))
    result = find_template(data)
    assert result is not None
    assert (result.text, result.special) == ("y", {"bos_token": "<s>", "eos_token": "</s>"})
    (own / "chat_template.jinja").write_text("z")
    other = find_template(DataSpec(), str(own))
    assert other is not None
    assert other.text == "z"
    assert find_template(DataSpec()) is None
    (own / "tokenizer_config.json").write_text("{")
    with pytest.raises(PlanError, match=r"tokenizer_config.json is not JSON"):
        find_template(data)


def test_messages_without_a_template(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK}))
    with pytest.raises(PlanError, match=r"line 1 has messages, .* no chat template .* data.chat_template = \"chatml\""):
        prepared(tmp_path / "a.jsonl", tmp_path)
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    with pytest.raises(PlanError, match=r"with data.separate_documents = true, and data.chat_template = .chatml."):
        prepared(tmp_path / "c.jsonl", tmp_path, chats=False)
    (tmp_path / "b.txt").write_text("a")
    with pytest.raises(PlanError, match=r"data.chats is true, and .*b.txt is no file of rows of messages but of text"):
        prepared(tmp_path / "b.txt", tmp_path)


def test_sections_of_the_docs_are_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of a job in docs/data.md, with such files as it speaks of."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen3-0.6B").mkdir()
    with_template(folder, tmp_path / "Qwen3-0.6B", CHATML)
    for name, field in (("corpus", "text"), ("web", "text"), ("code", "content")):
        (tmp_path / name).mkdir()
        lines = (json.dumps({field: f"{name} {n}, two and two"}) for n in range(60))
        (tmp_path / name / "train-00000-of-00001.jsonl").write_text("\n".join(lines))
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": TALK}) for _ in range(40)))
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, re.MULTILINE)
    read = [tomllib.loads(textwrap.dedent(block)) for block in blocks if "[data]" in block]
    assert len(read) == 4
    for fields in read:
        job = make_job(fields | {"model": {"sequence": 64, "vocab": 320}})
        tokens = prepare_tokens(job.data, job.model, 1, tmp_path / "cache")
        assert tokens.train_samples().batch(0, 4).shape == (4, 65)
        assert PlaceInData.at_beginning(tokens, job).described(100) or not (job.data.chats or job.data.sources)


def test_chats_of_which_no_answer_is_left_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "p" * 40, "completion": "c"} for _ in range(4)]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataSpec(path=str(tmp_path / "c.jsonl"), chats=True, separate_documents=True, validation_share=0)
    with pytest.raises(PlanError, match=r"of none of 4 chats .* the first answer begins behind 40; use a longer"):
        prepare_tokens(data, ModelSpec(sequence=16), 0, tmp_path / "tokens")
    assert prepare_tokens(data, ModelSpec(sequence=40), 0, tmp_path / "tokens").num_documents == 4
    everything = data.model_copy(update={"answers_only": False})
    assert prepare_tokens(everything, ModelSpec(sequence=16), 0, tmp_path / "tokens").num_documents == 4
