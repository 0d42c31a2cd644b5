"""Cases of hostile data as others keep them: Arrow, packed lines, folders of the hub, Megatron's, chats, mixtures."""

import bz2
import gzip
import io
import json
import struct
from functools import lru_cache
from random import Random
from typing import Any

from fuzz import mutations as mutate
from fuzz.hostile import PREPARE, TEXT, TINY, Case

_TEMPLATES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% endif %}",
    "{% for m in messages %}{{ m.role }}{% generation %}{{ m['content'] | trim }}{% endgeneration %}{% endfor %}",
    "{{ messages | tojson }}", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10**12 }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ raise_exception('no') }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ cycler.__init__.__globals__ }}", "{% include 'job.toml' %}",
    "{{ messages.clear() }}", "{{ messages[0].content.format_map(messages[0]) }}", "{% generation %}", "",
    "{{ '%1000000000d' | format(1) }}", "{% set x = namespace(a=1) %}{{ x.a }}{{ _mark_answer('x') }}",
    "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}",
    "{{ strftime_now('%1000000000d' * 10**6) }}", "{{ strftime_now.__self__ }}", "{{ strftime_now(messages) }}",
)  # fmt: skip
_CHATS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A line of text."}]},
    {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "You, I think."}], "system": "Be."},
    {"prompt": "What follows is", "completion": " this."},
    {"prompt": [{"role": "user", "content": "1?"}], "completion": [{"role": "assistant", "content": "2."}]},
)
_NAMES = ("messages", "conversations", "role", "content", "from", "value", "prompt", "completion", "system", "tools")
_STATE_NAMES = ("_data_files", "filename", "_split", "_indices_data_files")


def format_case(random: Random) -> Case:
    """Files of one of these formats, whole or broken."""
    files, options = random.choice([_arrow, _saved, _packed, _megatron, _chats, _chats, _hub])(random)
    if random.random() < 0.6:
        name = random.choice(sorted(files))
        files[name] = mutate.broken(random, files[name])
    if random.random() < 0.05:
        del files[random.choice(sorted(files))]
    case = Case("format", [PREPARE, "job.toml"])
    for name, contents in files.items():
        case.put(name, contents)
    options = {"path": "data", "validation_share": random.choice([0.0, 0.05, 0.5])} | options
    if random.random() < 0.2:
        options |= random.choice(
            [{"split": random.choice(["all", "test", "", "x"])},
             {"format": random.choice(["arrow", "megatron", "jsonl"])}, {"separate_documents": True},
             {"workers": random.choice([1, 2, 10**3])}, {"cache": random.choice(["c", "/dev/null"])},
             {"begin_token": random.choice(["auto", "none", "always", "x"])}, {"begin_new": True},
             {"validation": [{"name": random.choice(["a", "held-out", ""]), "path": random.choice(["data", "gone"])}]},
             {"answers_only": False}, {"today": random.choice(["2026-07-26", "", "2026-7-1"])},
             {"chats": True, "separate_documents": True}]
        )  # fmt: skip
    case.put("job.toml", _mixed(random, case, options) if random.random() < 0.25 else _job(options))
    return case


def _job(options: dict[str, Any]) -> str:
    before, _, after = TINY.partition("[data]\n")
    lines = "\n".join(f"{key} = {mutate.toml_value(one)}" for key, one in options.items())
    return f"{before}[data]\n{lines}\n[optimizer]{after.partition('[optimizer]')[2]}"


def _mixed(random: Random, case: Case, options: dict[str, Any]) -> str:
    """The same as one source of several."""
    case.put("text.txt", TEXT)
    own = {key: one for key, one in options.items() if key in ("path", "format", "split", "chats")}
    common = {key: one for key, one in options.items() if key not in own}
    weights = [random.choice([1.0, 0.3, 7.0, 1e-9, 1e9, 0.0, -1.0, 0.123456789]) for _ in range(3)]
    result = [own | {"weight": weights[0]}, {"path": "text.txt", "weight": weights[1]}, {"path": "text.txt"}]
    if random.random() < 0.3:
        result = mutate.fields(random, result, ["path", "weight", "format", "text_field", "chats", "split"])
    return _job(common | {"sources": result})


def _table(rows: list[dict[str, Any]]) -> Any:
    import pyarrow as pa

    return pa.Table.from_pylist(rows)


def _stream(rows: list[dict[str, Any]], is_file: bool = False) -> bytes:
    import pyarrow as pa

    sink, table = io.BytesIO(), _table(rows)
    with (pa.ipc.new_file if is_file else pa.ipc.new_stream)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return sink.getvalue()


@lru_cache(maxsize=1)
def _rows() -> tuple[dict[str, Any], ...]:
    return tuple({"text": TEXT[: 100 * n], "id": n} for n in range(1, 9))


def _arrow(random: Random) -> tuple[dict[str, bytes], dict[str, Any]]:
    return {"data/a.arrow": _stream(list(_rows()), random.random() < 0.5)}, {}


def _saved(random: Random) -> tuple[dict[str, bytes], dict[str, Any]]:
    state: Any = {"_data_files": [{"filename": f"data-{n:05d}-of-00002.arrow"} for n in range(2)], "_split": "train"}
    if random.random() < 0.4:
        state = mutate.fields(random, state, _STATE_NAMES)
    folder = random.choice(["data", "data/train"])
    files = {f"{folder}/data-{n:05d}-of-00002.arrow": _stream(list(_rows())) for n in range(2)}
    return files | {f"{folder}/state.json": json.dumps(state).encode(), f"{folder}/dataset_info.json": b"{}"}, {}


def _packed(random: Random) -> tuple[dict[str, bytes], dict[str, Any]]:
    import pyarrow as pa

    raw = "\n".join(map(json.dumps, _rows())).encode()
    if random.random() < 0.4:
        raw = json.dumps(_rows(), indent=random.choice([None, 1])).encode()
        return {f"data/a.json{random.choice(['', '.gz'])}": raw}, {}
    if random.random() < 0.1:
        raw = random.choice([b"\n", b" \n", b"[" + b" " * 99]) * 99_999 + raw
    zst = io.BytesIO()
    with pa.CompressedOutputStream(pa.PythonFile(zst, "w"), "zstd") as stream:
        stream.write(raw)
        packed = {".gz": gzip.compress(raw, mtime=0), ".bz2": bz2.compress(raw)}
        stream.flush()
        packed[".zst"] = zst.getvalue()
    ending = random.choice(sorted(packed))
    return {f"data/a.jsonl{ending}": packed[ending]}, {}


def _hub(random: Random) -> tuple[dict[str, bytes], dict[str, Any]]:
    import pyarrow.parquet as pq

    files = {"data/README.md": b"# Data", "data/dataset_infos.json": b"{}"}
    for split in random.choice([("train",), ("train", "test"), ("train_sft", "test_sft")]):
        sink = io.BytesIO()
        pq.write_table(_table(list(_rows())), sink)
        files[f"data/data/{split}-00000-of-00001.parquet"] = sink.getvalue()
    return files, {}


def _megatron(random: Random) -> tuple[dict[str, bytes], dict[str, Any]]:
    import numpy as np

    dtype, code = random.choice([("<u2", 8), ("<i4", 4), ("<i8", 5), ("<u1", 1)])
    sizes = [random.choice([0, 1, 30, 400]) for _ in range(8)] + [300]
    pointers = np.concatenate([[0], np.cumsum(sizes)[:-1]]) * np.dtype(dtype).itemsize
    numbers = {"version": 1, "code": code, "sequences": 9, "bounds": 4}
    if random.random() < 0.4:
        name = random.choice(sorted(numbers))
        most = 2**8 if name == "code" else 2**64
        numbers[name] = abs(random.choice([0, 1, 3, 9, 2**31, 2**40, 2**63, 2**64 - 1])) % most
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", *numbers.values())
    parts = np.array(sizes, "<i4").tobytes(), pointers.astype("<i8").tobytes(), np.array([0, 2, 3, 9], "<i8").tobytes()
    ids = (np.arange(sum(sizes)) % random.choice([250, 250, 301])).astype(dtype)
    return {"data/a.bin": ids.tobytes(), "data/a.idx": header + b"".join(parts)}, {
        "path": random.choice(["data", "data/a", "data/a.bin", "data/a.idx"]),
        "separate_documents": random.random() < 0.5,
    }


def _chats(random: Random) -> tuple[dict[str, bytes], dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[Any] = [random.choice(_CHATS) for _ in range(random.choice([1, 3, 12]))]
    if random.random() < 0.5:
        made = mutate.fields(random, rows, _NAMES)
        rows = made if isinstance(made, list) else [made]
    contents, ending = "\n".join(json.dumps(row) for row in rows).encode("utf-8", "replace"), "jsonl"
    if random.random() < 0.2:
        contents, ending = json.dumps(rows).encode("utf-8", "replace"), "json"
    elif random.random() < 0.3:
        sink = io.BytesIO()
        try:
            pq.write_table(_table(rows), sink)
            contents, ending = sink.getvalue(), "parquet"
        except (pa.ArrowException, TypeError, ValueError, AttributeError, OverflowError):
            pass  # rows that no table holds
    template = random.choice(_TEMPLATES[:2] if random.random() < 0.6 else _TEMPLATES)
    options = {"chats": True, "separate_documents": True, "workers": 1}
    options |= {"chat_template": "t.jinja", "today": random.choice(["", "", "2026-07-26"])}
    return {f"data/a.{ending}": contents, "t.jinja": template.encode()}, options
