"""Cases of files of a few kilobytes that would take minutes or gigabytes where a reader believes them.

Each has the limits of `CPU_S` and `MEMORY_BYTES` beside what the interpreter takes, whatever its size is drawn to be,
and whatever byte of it is changed.
"""

import gzip
import io
import json
import lzma
from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import Any

from fuzz import mutations as mutate
from fuzz.hostile import PREPARE, TEXT, TINY, Case
from fuzz.hostile_models import _families

# Of the processor, with what starting another process takes; and beside what this one has.
CPU_S, MEMORY_BYTES = 7, 500 << 20
WRITE_RUN = "write-run"  # in the place of a command: what a run writes into its folder before any rank starts
VICTIM = "what somebody else wrote\n"


def growth_case(random: Random) -> Case:
    """A bomb of some kind; of every third one some bytes are changed."""
    name = random.choice(list(BOMBS))
    case, files = BOMBS[name](random)
    case.kind = "growth"
    for file, contents in files.items():
        raw = contents if isinstance(contents, bytes) else contents.encode("utf-8", "surrogatepass")
        case.put(file, mutate.broken(random, raw) if random.random() < 0.3 else raw)
    return case


Bomb = tuple[Case, dict[str, bytes | str]]


def _merge_keys(random: Random) -> Bomb:
    wide, deep = random.choice([2, 5, 10, 50]), random.choice([2, 8, 30])
    pairs = ", ".join(f"q{n}: 1" for n in range(random.choice([1, 10, 1000])))
    lines = [f"a0: &a0 {{{pairs}}}"]
    for n in range(1, deep):
        merged = ", ".join([f"*a{random.choice([n - 1, n - 1, n])}"] * wide)
        lines.append(f"a{n}: &a{n}\n  <<: [{merged}]")
    name = random.choice(["merge.yaml", "merge.yml"])
    system = random.choice(["nemo", "deepspeed", "accelerate"])
    return Case("", ["import", system, name]), {name: "\n".join(lines)}


def _aliases(random: Random) -> Bomb:
    wide, deep = random.choice([2, 10]), random.choice([3, 10, 40])
    lines = ["a0: &a0 [1]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * wide)}]" for n in range(1, deep)]
    return Case("", ["import", random.choice(["nemo", "accelerate"]), "a.yaml"]), {"a.yaml": "\n".join(lines)}


def _dotted(random: Random) -> Bomb:
    part = random.choice(["a", '"a"', "'a'", "a ", "ab-c"])
    key = ".".join([part] * random.choice([12, 17, 1000, 20_000, 100_000]))
    line = random.choice([f"{key} = 1", f"[{key}]", f"[[{key}]]", f"x = {{ {key} = 1 }}", f'y = """\n"""\n{key} = 1'])
    text = TINY.replace("[model]", f"{line}\n[model]" if random.random() < 0.5 else "[model]") + "\n" + line
    if random.random() < 0.4:
        return Case("", ["import", "torchtitan", "a.toml"]), {"a.toml": text}
    if random.random() < 0.2:
        return Case("", ["estimate", "quickstart", "--set", f"x={{ {key[:100_000]} = 1 }}"]), {}
    return Case("", ["estimate", "job.toml"]), {"job.toml": text}


def _nested_json(random: Random) -> Bomb:
    mark = random.choice(["[", '{"a":', "[[],"])
    text = mark * random.choice([100, 5000, 200_000]) + "9" * random.choice([1, 5000])
    file = random.choice(["deepspeed.json", "config.json", "run/metrics.jsonl", "model.safetensors.index.json"])
    if file == "deepspeed.json":
        return Case("", ["import", "deepspeed", file]), {file: text}
    if file == "run/metrics.jsonl":
        return Case("", random.choice([["experts", "run"], [WRITE_RUN, "run", "3"]])), {file: text + '\n{"step": 1}\n'}
    files: dict[str, bytes | str] = {"model/config.json": json.dumps(_families()["llama"]), f"model/{file}": text}
    return Case("", ["convert", "model", "--to", "out"]), files


@lru_cache(maxsize=16)
def _parquet(rows: int, messages: int, characters: int, is_dictionary: bool) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink, text = io.BytesIO(), "x" * characters
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.large_string())]))
    one = pa.array([[{"role": "user", "content": text}] * messages], kind)
    table = pa.table({"messages": pa.chunked_array([one] * rows), "text": pa.chunked_array([pa.array([text])] * rows)})
    with pq.ParquetWriter(sink, table.schema, compression="zstd", use_dictionary=is_dictionary) as writer:
        writer.write_table(table, row_group_size=rows)
    return sink.getvalue()


def _tables(random: Random) -> Bomb:
    sizes = random.choice([(64, 16, 100_000), (2, 1, 20_000_000), (256, 4, 10_000), (1, 30, 1_000_000)])
    is_chats = random.random() < 0.6
    return _of_data(random, "data/a.parquet", _parquet(*sizes, random.random() < 0.7), is_chats)


def _of_data(random: Random, file: str, contents: bytes, is_chats: bool) -> Bomb:
    files: dict[str, bytes | str] = {file: contents, "job.toml": TINY}
    options = ['data.path="data"', *(("data.chats=true", "data.separate_documents=true") if is_chats else ())]
    if is_chats:
        files["t.jinja"] = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
        options += ['data.chat_template="t.jinja"', "data.answers_only=false"]
    return Case("", [PREPARE, "job.toml", *(word for one in options for word in ("--set", one))]), files


@lru_cache(maxsize=8)
def _buffer(num_bytes: int, codec: str, is_file: bool) -> bytes:
    import pyarrow as pa

    sink, table = io.BytesIO(), pa.table({"text": pa.array(["x" * num_bytes], pa.large_string())})
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with (pa.ipc.new_file if is_file else pa.ipc.new_stream)(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _buffers(random: Random) -> Bomb:
    size = random.choice([20_000_000, 100_000_000])
    made = _buffer(size, random.choice(["zstd", "lz4"]), random.random() < 0.5)
    if random.random() < 0.4:  # the length that a packed buffer says is in front of it
        made = made.replace(size.to_bytes(8, "little"), random.choice([2**31, 2**40, 2**62, 1]).to_bytes(8, "little"))
    return _of_data(random, "data/a.arrow", made, is_chats=False)


@lru_cache(maxsize=8)
def _packed_lines(ending: str, num_lines: int) -> bytes:
    line = json.dumps({"text": "x" * 10_000}).encode() + b"\n"
    return (gzip.compress if ending == "gz" else lzma.compress)(line * num_lines)


def _lines(random: Random) -> Bomb:
    ending = random.choice(["gz", "xz"])
    return _of_data(random, f"data/a.jsonl.{ending}", _packed_lines(ending, random.choice([10, 7000])), is_chats=False)


def _replace(content: str, kind: str = "String", pattern: str = "a") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def _tokenizers(random: Random) -> Bomb:
    from fuzz.hostile_files import _tokenizers as valid

    made = json.loads(json.dumps(random.choice(valid())))
    step: dict[str, Any] = random.choice(
        [_replace("a" * random.choice([2, 8, 64])), _replace("aa", "Regex", random.choice(["", "a*", "."])),
         {"type": "Prepend", "prepend": "a" * 99}, {"type": "NFKD"}]
    )  # fmt: skip
    times, place = random.choice([1, 3, 6, 12, 40]), random.randrange(5)
    if place < 2:
        made["normalizer"] = {"type": "Sequence", "normalizers": [step] * times}
    elif place == 2:
        made["decoder"] = {"type": "Sequence", "decoders": [_replace("a" * 64)] * times}
    elif place == 3:
        pattern = random.choice(["(a+)+b", "(x+x+)+y", "(?:a|aa)+$", "((a{1,100}){1,100}){1,100}", "a{0,99999}b"])
        split = {"type": "Split", "behavior": "Isolated", "invert": False}
        made["pre_tokenizer"] = split | {"pattern": {"Regex": pattern}}
    else:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
        content = "a" * random.choice([1, 1000, 100_000])
        made["added_tokens"] = [{"id": 299, "content": content, "normalized": True, **flags}]
        made["normalizer"] = {"type": "Sequence", "normalizers": [_replace("a" * 8)] * random.choice([1, 4, 9])}
    text = random.choice(["a" * 3000, "ax" * 2000, TEXT])
    # A file that has lost its text would have that of the standard library, which takes longer than what grows.
    case = Case("", [PREPARE, "job.toml", "--set", 'data.tokenizer="t.json"', "--set", 'data.path="text.txt"'])
    return case, {"job.toml": TINY, "t.json": json.dumps(made), "text.txt": text}


_TEMPLATES = (
    "{{ 9**(9**9) }}", "{{ 2**(2**(2**9)) }}", "{{ 9999999999 * 9**60000 * 9**60000 }}", "{{ 'a' * 10**9 }}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}",
    "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x > 1 }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ 'x' | center(10**9) }}",
    "{{ '%999999999d' | format(1) }}", "{{ ('a' * 10**7) | wordcount }}", "{{ ('a ' * 10**7) | wordwrap(1) }}",
    "{{ [1] * 10**8 }}", "{{ ('<' * 10**7) | escape | escape | escape }}", "{{ range(99999) | list | tojson * 999 }}",
    "{{ ('{0.__globals__}' | attr('format'))(raise_exception) }}", "{{ ('a' * 10**6) | urlize }}",
    "{{ (range(9999) | list * 999) | sort | first }}", "{{ ('www.' * 10**5) | urlize }}",
)  # fmt: skip


def _templates(random: Random) -> Bomb:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    case, files = _of_data(random, "data/a.jsonl", json.dumps({"messages": chat}).encode() * 1, is_chats=True)
    files["t.jinja"] = random.choice(_TEMPLATES) + random.choice(["", TEXT])
    return case, files


def _safetensors(random: Random) -> Bomb:
    shape, starts = random.choice(
        [(["9" * 4300] * 700, [0]), (["2"] * 65, [0, 16]), ([str(2**62)] * 3, [0, 16]), (["0"] * 1000, [0]),
         (["4"], [0] * 2000), (["4"], [0, 8]), (["4"], [0, 16])]
    )  # fmt: skip
    header = ", ".join(
        f'"x{n}": {{"dtype": "F32", "shape": [{", ".join(shape)}], "data_offsets": [{start}, {start + 16}]}}'
        for n, start in enumerate(starts)
    )
    raw = f"{{{header}}}".encode()
    files: dict[str, bytes | str] = {"model/config.json": json.dumps(_families()["llama"])}
    files["model/model.safetensors"] = len(raw).to_bytes(8, "little") + raw + bytes(32)
    return Case("", ["convert", "model", "--to", "out"]), files


@lru_cache(maxsize=1)
def _odd_pickles() -> tuple[bytes, ...]:
    import torch

    base, made = torch.zeros(4), []
    for held in (
        {"x": torch.zeros(1).expand(2**28)}, {f"x{n}": torch.zeros(1000) for n in range(3)},
        {"x": base.as_strided((2**20,), (0,))}, {"x": torch.zeros(2**40, device="meta")},
        {"x": torch.eye(3).to_sparse()}, {"x": torch._neg_view(torch.ones(3))},
        dict.fromkeys(map(str, range(500)), base),
    ):  # fmt: skip
        sink = io.BytesIO()
        torch.save(held, sink)
        made.append(sink.getvalue())
    return tuple(made)


def _pickles(random: Random) -> Bomb:
    import zipfile

    raw = random.choice(_odd_pickles())
    if random.random() < 0.3:
        sink = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as new:
            for name in old.namelist():
                new.writestr(name, b"\x80\x02X" + (10**8).to_bytes(4, "little") + bytes(10**7)
                             if name.endswith("data.pkl") else old.read(name))  # fmt: skip
        raw = sink.getvalue()
    files: dict[str, bytes | str] = {"model/config.json": json.dumps(_families()["llama"])}
    return Case("", ["convert", "model", "--to", "out"]), files | {"model/pytorch_model.bin": raw}


def _links(random: Random) -> Bomb:
    """A run's folder or a model's with links; the file they lead to must stay as it is, and be told to nobody."""
    names = ("metrics.jsonl", "metrics.new", "tensorboard", "data", "checkpoints", "profile", ".lock", "experts.svg")
    if random.random() < 0.3:
        case = Case("", ["convert", "model", "--to", "out"])
        companion = random.choice(["chat_template.jinja", "tokenizer.json", "config.json", "pytorch_model.bin"])
        case.special[f"model/{companion}"] = "-> ../victim"
        files: dict[str, bytes | str] = {"model/config.json": json.dumps(_families()["llama"])}
        return case.put("victim", VICTIM), {name: text for name, text in files.items() if name not in case.special}
    case = Case("", [WRITE_RUN, "run", random.choice(["0", "3"])])
    for name in random.sample(names, random.choice([1, 1, 2])):
        case.special[f"run/{name}"] = random.choice(["-> ../victim", "=> victim", "fifo", "-> gone", "-> ."])
    return case.put("victim", VICTIM), {}


def _csv(random: Random) -> Bomb:
    row = random.choice(['"' * 100_000, "," * 100_000, "9" * 100_000, "x,\n" * 100_000, "a" * 200_000, '"a\n' * 50_000])
    return Case("", ["validate", "runs.csv", "--json"]), {"runs.csv": "id,layers,hidden,gpu\n" + row}


BOMBS: dict[str, Callable[[Random], Bomb]] = {
    "merge keys": _merge_keys, "aliases": _aliases, "dotted keys": _dotted, "nested JSON": _nested_json,
    "tables": _tables, "buffers": _buffers, "packed lines": _lines, "tokenizers": _tokenizers,
    "templates": _templates, "safetensors": _safetensors, "pickles": _pickles, "links": _links, "CSV": _csv,
}  # fmt: skip


def write_run(arguments: list[str]) -> None:
    """Have a run's folder and write metrics to it, as a run does before any step. Exits with 2 where it is refused."""
    import sys
    from pathlib import Path

    from shardwright.config.base import PlanError
    from shardwright.config.user_file import FileFault
    from shardwright.train.launch.run_folder import holding, make_folder
    from shardwright.train.metrics import _keep_until
    from shardwright.train.run_files import open_to_append

    folder = Path(arguments[1])
    try:
        with holding(folder, make_folder(folder)):
            _keep_until(folder / "metrics.jsonl", int(arguments[2]))
            with open_to_append(folder / "metrics.jsonl") as file:
                file.write("{}\n")
    except (PlanError, FileFault) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
