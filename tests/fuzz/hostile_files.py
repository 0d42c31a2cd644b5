"""Cases of hostile files: tables of runs, data, tokenizers, and what is no file at all in the place of one."""

import csv
import io
import json
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from fuzz import mutations as mutate
from fuzz.hostile import FLOATS, PREPARE, TEXT, TINY, WHOLES, Case, command_on

TRUTH = Path(__file__).parents[2] / "benchmarks" / "truth"


@lru_cache(maxsize=4)
def _rows(name: str) -> tuple[dict[str, str], ...]:
    with (TRUTH / name).open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


# Columns that few tables have.
_FURTHER = (
    *("expert_tp", "attention", "software", "grads", "moments", "masters", "offload", "host", "overlap", "compiled"),
    *("dispatcher", "grouped", "graphs", "cp_method", "optimizer", "routing", "window", "shard_group", "memory_kind"),
    *("dropout", "fused_loss", "compiled_loss", "loss_by_parts", "fused_gate", "split_inputs"),
    *("no_sync", "autocast", "whole_experts", "float8_gather", "adapter_rank", "adapter_maps", "adapter_base"),
)


def table_case(random: Random) -> Case:
    """Rows of the published runs with cells, columns or bytes that are wrong."""
    rows = [dict(row) for row in random.sample(_rows(random.choice(["runs.csv", "others.csv", "oom.csv"])), k=3)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for _ in range(random.choice([0, 1, 1, 2, 3])):
        row, name = random.choice(rows), random.choice([*columns, *_FURTHER])
        columns = columns if name in columns else [*columns, name]
        old = row.get(name) or ""
        number = float(old) if old.replace(".", "", 1).isdigit() else None
        row[name] = random.choice(
            [str(mutate.value(random, number)), random.choice(WHOLES), random.choice(FLOATS), "", old * 3, "=1+1"]
        )[:200_000]
    if random.random() < 0.1:
        random.shuffle(columns)
    if random.random() < 0.15:
        columns.remove(random.choice(columns))
    if random.random() < 0.05:
        columns.append(random.choice(columns))
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows([row.get(name, "") for name in columns] for row in rows)
    raw = text.getvalue().encode("utf-8", "surrogatepass")
    case = Case("table", ["validate", "runs.csv", "--json", *(["--out", "out.csv"] if random.random() < 0.3 else [])])
    return case.put("runs.csv", mutate.broken(random, raw) if random.random() < 0.3 else raw)


_WEIRD = (
    "fifo",
    "sparse",
    "-> /dev/zero",
    "-> /proc",
    "-> .",
    "-> loop",
    "-> /dev/null",
    "-> /proc/self/mem",
    "-> gone",
)


def data_case(random: Random) -> Case:
    """Text, JSONL, parquet, token files and arrays that are broken, or named in odd ways."""
    name, contents = random.choice(_data_files(random))
    if random.random() < 0.7:
        contents = mutate.broken(random, contents)
    case = Case("data", [PREPARE, "job.toml"]).put("job.toml", TINY).put(f"data/{name}", contents)
    path = random.choice(["data", f"data/{name}", f"data/{name}", "data/*", "data/**", "**/data/*"])
    if random.random() < 0.15:
        path = random.choice(
            [
                "/proc",
                "/dev/zero",
                "/sys/kernel",
                "",
                ".",
                "/dev/fd",
                "x\0y",
                "~nobody/x",
                "data/[",
                "*",
                "/proc/*/fd/*",
            ]
        )
    if random.random() < 0.15:
        case.special["data/odd" + random.choice(["", ".txt", ".bin", ".jsonl", ".parquet", ".npy"])] = random.choice(
            _WEIRD
        )
    options = {"path": path, "validation_share": random.choice([0.0, 0.05, 0.5])}
    if random.random() < 0.4:
        options |= random.choice(
            [{"format": random.choice(["text", "jsonl", "parquet", "tokens"])},
             {"text_field": random.choice(["id", "", "x"])},
             {"token_dtype": random.choice(["auto", "uint8", "uint16", "uint32", "int32", "int64"])},
             {"separate_documents": True, "end_of_document": random.choice([0, 255, 10**6])}]
        )  # fmt: skip
    for key, one in options.items():
        case.arguments += ["--set", f"data.{key}={mutate.toml_value(one)}"]
    return case


def _data_files(random: Random) -> list[tuple[str, bytes]]:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [{"text": TEXT, "id": n} for n in range(4)] + [{"text": "", "id": None}]
    parquet, array = io.BytesIO(), io.BytesIO()
    pq.write_table(
        pa.table({"text": [TEXT] * 8, "id": list(range(8))}),
        parquet,
        compression=random.choice(["snappy", "zstd", "none"]),
    )
    ids = np.arange(4000) % 290
    np.save(array, ids.astype(random.choice(["<u2", ">i4", "<i8", "<f4"])))
    return [
        ("a.txt", TEXT.encode()), ("a.jsonl", "\n".join(map(json.dumps, records)).encode()),
        ("a.parquet", parquet.getvalue()),
        ("a.bin", ids.astype("<u2").tobytes()), ("a.npy", array.getvalue()),
    ]  # fmt: skip


@lru_cache(maxsize=1)
def _tokenizers() -> tuple[dict[str, Any], ...]:
    """Valid contents of tokenizer.json: over bytes, words and letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = {name: n for n, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    of_bytes = Tokenizer(models.BPE(alphabet, []))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "line": 1, "text": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("line", -2.0)], 0, False))
    letters = Tokenizer(models.BPE({name: n for n, name in enumerate("abcdefghij")}, []))
    return tuple(json.loads(one.to_str()) for one in (of_bytes, words, unigram, letters))


def tokenizer_case(random: Random) -> Case:
    """A tokenizer.json that is wrong."""
    raw = json.dumps(
        mutate.fields(random, random.choice(_tokenizers()), ["type", "vocab", "merges", "unk_token"])
    ).encode()
    case = Case("tokenizer", [PREPARE, "job.toml", "--set", 'data.tokenizer="t.json"']).put("job.toml", TINY)
    case.put("t.json", mutate.broken(random, raw) if random.random() < 0.3 else raw).put("text.txt", TEXT)
    if random.random() < 0.1:
        del case.files["t.json"]
        case.special["t.json"] = random.choice(_WEIRD)
    return case


def path_case(random: Random) -> Case:
    """Files that are none, in every place where a command takes one."""
    case = Case("path", []).put("job.toml", TINY).put("text.txt", TEXT)
    odd = "odd.toml"
    case.special[odd] = random.choice(_WEIRD)
    name = random.choice(
        [odd, odd, odd, ".", "/dev/zero", "/dev/stdin", "/proc/self/maps", "x" * 5000, "", "a\nb.toml", "job.toml/x"]
    )
    place = random.choice(
        ["job", "model.name", "cluster.name", "cluster.device", "cluster.software", "table", "tokenizer", "data", "run"]
    )
    if place == "job":
        case.arguments = command_on(random, name)
    elif place == "table":
        case.arguments = ["validate", name]
    elif place == "run":
        case.arguments = ["experts", name]
    elif place in ("tokenizer", "data"):
        field_name = "data.tokenizer" if place == "tokenizer" else "data.path"
        case.arguments = [PREPARE, "job.toml", "--set", f"{field_name}={json.dumps(name)}"]
    else:
        case.arguments = [*command_on(random, "job.toml"), "--set", f"{place}={json.dumps(name)}"]
    return case
