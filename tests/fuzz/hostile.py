"""Cases of hostile input, by kind: a valid job, option, file or table, and what was done to it.

A case is data: the arguments of one command and the files of the folder it runs in. That is all that is needed to see
what went wrong with it again.
"""

import base64
import csv
import io
import json
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any

from fuzz import mutations as mutate

TRUTH = Path(__file__).parents[2] / "benchmarks" / "truth"
PREPARE = "prepare-data"  # in the place of a command: what `train` does with data before any rank starts
JOBS = (
    "quickstart",
    "quickstart-moe",
    "quickstart-deepseek",
    "quickstart-gpt",
    "yi-34b",
    "deepseek-v3",
    "gpt-100b-32xa100",
)
TINY = """
name = "tiny"
[model]
layers = 4
hidden = 64
heads = 4
kv_heads = 2
ffn = 96
vocab = 300
sequence = 16
[cluster]
device = "h100-sxm"
devices_per_node = 8
nodes = 1
[plan]
dp = 2
tp = 2
pp = 2
schedule = "1f1b"
zero = 1
microbatch_size = 1
layout = [2, 2]
recompute = "none"
[batch]
global_batch_size = 8
[data]
path = "text.txt"
tokenizer = "bytes"
[optimizer]
steps = 10
warmup_steps = 2
"""
TEXT = "A line of text to train on, with ä and 😀.\n" * 40


@dataclass
class Case:
    """One input. `files` are by name, in base64; `special` files are a "fifo", "sparse" or "-> TARGET" (a link)."""

    kind: str
    arguments: list[str]
    files: dict[str, str] = field(default_factory=dict)
    special: dict[str, str] = field(default_factory=dict)

    def put(self, name: str, contents: bytes | str) -> "Case":
        """The case with a file more."""
        raw = contents.encode("utf-8", "surrogatepass") if isinstance(contents, str) else contents
        self.files[name] = base64.b64encode(raw).decode()
        return self

    def as_json(self) -> str:
        """To be read by `from_json`."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> "Case":
        """What `as_json` wrote."""
        return Case(**json.loads(text))


@lru_cache(maxsize=1)
def field_names() -> tuple[str, ...]:
    """All "section.field" of a job."""
    from shardwright.spec.fields import job_fields

    found = [row[0].split(" ")[0] for rows in job_fields().values() for row in rows]
    sections = {section: rows for section, rows in job_fields().items()}
    return tuple(
        f"{section}.{row[0].split(' ')[0]}" if section else row[0].split(" ")[0]
        for section, rows in sections.items()
        for row in rows
    ) or tuple(found)


@lru_cache(maxsize=64)
def catalog_fields(kind: str, name: str) -> dict[str, Any]:
    """An entry of the catalog as it is written."""
    folder = resources.files("shardwright.spec.catalog")
    return tomllib.loads((folder / kind / f"{name}.toml").read_text(encoding="utf-8"))


def _names() -> list[str]:
    return [name.rpartition(".")[2] for name in field_names()]


def _command(random: Random, job: str) -> list[str]:
    """A command that reads a job, most often the one whose answer is checked."""
    kind = random.randrange(20)
    if kind < 12:
        return ["estimate", job, "--json"]
    return {
        12: ["estimate", job], 13: ["explain", job], 14: ["explain", job, "--json"], 15: ["simulate", job, "--json"],
        16: ["layout", job, "--json"], 17: ["scale", job, "--devices", "8,16", "--json"],
        18: ["plan", job, "--top", "2", "--json"], 19: ["simulate", job, "--no-colour"],
    }[kind]  # fmt: skip


def job_case(random: Random) -> Case:
    """A job file whose fields, or whose bytes, are wrong."""
    given = tomllib.loads(TINY) if random.random() < 0.5 else catalog_fields("jobs", random.choice(JOBS))
    text = mutate.toml(mutate.fields(random, given, _names()))
    raw = text.encode("utf-8", "surrogatepass")
    return Case("job", _command(random, "job.toml")).put(
        "job.toml", mutate.broken(random, raw) if random.random() < 0.15 else raw
    )


def set_case(random: Random) -> Case:
    """Overrides of a catalog job or of a tiny one."""
    job = random.choice([*JOBS, "job.toml", "job.toml", "quickstart"])
    case = Case("set", _command(random, job)).put("job.toml", TINY)
    for _ in range(random.choice([1, 1, 1, 2, 3, 5])):
        name, one = random.choice(field_names()), mutate.value(random, random.choice([1, 4, 64, 0.5, "none"]))
        text = mutate.toml_value(one) if random.random() < 0.8 else str(one)
        if random.random() < 0.08:
            name = random.choice(
                ["", ".", "a." * random.choice([1, 5, 3000]) + "b", name.upper(), "model", "plan.plan.tp", "="]
            )
        argument = f"{name}={text}" if random.random() < 0.97 else random.choice([name, text, f"{name}=={text}"])
        case.arguments += ["--set", argument[:100_000].replace("\0", "")]
    return case


_FLOATS = ("0", "1", "-1", "0.5", "1e308", "1e-308", "nan", "inf", "-inf", "1e9", "x", "", "3")
_WHOLES = (
    "0",
    "1",
    "2",
    "3",
    "4",
    "7",
    "8",
    "16",
    "64",
    "-1",
    "1.5",
    "x",
    "",
    "1000",
    "10000",
    "1000000",
    "9" * 25,
    "0x10",
)
_OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "schedule": {
        "--stages": _WHOLES, "--microbatches": _WHOLES, "--virtual": _WHOLES, "--forward": _FLOATS, "--steps": _WHOLES,
        "--input-grad": _FLOATS, "--weight-grad": _FLOATS, "--alive": _FLOATS, "--gather": _FLOATS,
        "--communication": _FLOATS, "--svg": ("out.svg", "no/out.svg", ".", "fifo", "/dev/full", ""),
        "--html": ("out.html", "fifo"), "--trace": ("out.json", "/dev/full"), "--recompute": (), "--compare": (),
    },
    "simulate": {"--steps": _WHOLES, "--communication": _FLOATS, "--svg": ("out.svg", "fifo", "\u0001")},
    "plan": {
        "--top": _WHOLES, "--tokens": _FLOATS, "--days": _FLOATS, "--simulate": ("0", "1", "-1", "x", "2"),
        "--objective": ("time", "cost", "devices", "memory", "x"), "--float8": ("none", "rowwise", "x"),
        "--keep": ("plan.tp=2", "plan.tp=3", "tp=2", "plan.tp", "plan.schedule=x", "plan.tp=1e9", "", "plan.layout=[1]"),
        "--between": ("plan.tp=1,2", "plan.tp=2,1", "plan.tp=x", "tp=1,2", "batch.global_batch_size=8,16", "plan.tp=1,", ""),
        "--toml": ("out.toml", "fifo", "/dev/full"), "--as-software": (),
    },
    "scale": {
        "--devices": ("8", "8,16", "1-64", "0", "-8", "8-", "x", "", "1-100000000000000000000", "16-8", "3", "8," * 50, "9" * 30),
        "--tokens": _WHOLES, "--svg": ("out.svg", "no/x.svg"), "--keep": ("plan.tp=2", "x"), "--between": ("plan.tp=1,2", "x"),
    },
    "layout": {"--search": (), "--toml": ("out.toml", "fifo", "no/x"), "--keep": ("plan.tp=2",), "--between": ("plan.tp=1,2",)},
    "estimate": {}, "explain": {},
}  # fmt: skip
_SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe",
              "dualpipev", "pipedream", "pipedream-2bw", "auto", "sequential", "x", "", "1F1B")  # fmt: skip


def option_case(random: Random) -> Case:
    """A command's own options."""
    command = random.choice(["schedule"] * 5 + list(_OPTIONS))
    case = Case("option", [command]).put("job.toml", TINY)
    case.special["fifo"] = "fifo"
    case.arguments.append(random.choice(_SCHEDULES) if command == "schedule" else random.choice(["job.toml", "yi-34b"]))
    if command == "scale":
        case.arguments += ["--devices", random.choice(["8", "8,16"])]
    for _ in range(random.choice([1, 2, 2, 3, 4])):
        if not _OPTIONS[command]:
            break
        name = random.choice(list(_OPTIONS[command]))
        values = _OPTIONS[command][name]
        case.arguments += [name, random.choice(values)] if values else [name]
    if random.random() < 0.4:
        case.arguments.append("--json")
    if random.random() < 0.03:
        case.arguments.append(random.choice(["--nope", "-x", "--", "--set"]))
    return case


@lru_cache(maxsize=4)
def _rows(name: str) -> tuple[dict[str, str], ...]:
    with (TRUTH / name).open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def table_case(random: Random) -> Case:
    """Rows of the published runs with cells, columns or bytes that are wrong."""
    rows = [dict(row) for row in random.choices(_rows(random.choice(["runs.csv", "others.csv", "oom.csv"])), k=3)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for _ in range(random.choice([0, 1, 1, 2, 3])):
        row, name = random.choice(rows), random.choice([*columns, "expert_tp", "attention", "software", "grads"])
        columns = columns if name in columns else [*columns, name]
        old = row.get(name) or ""
        number = float(old) if old.replace(".", "", 1).isdigit() else None
        row[name] = random.choice(
            [str(mutate.value(random, number)), random.choice(_WHOLES), random.choice(_FLOATS), "", old * 3, "=1+1"]
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


_ENTRIES = {
    "models": ("llama3-8b", "deepseek-v3", "gpt2", "mixtral-8x7b"), "devices": ("h100-sxm", "a100-sxm-80g", "laptop-cpu"),
    "software": ("megatron-core", "fsdp-2023", "megatron-deepspeed"), "calibrations": ("ampere", "common", "hopper"),
    "clusters": (),
}  # fmt: skip


def entry_case(random: Random) -> Case:
    """Files of one's own in the place of the catalog's: model, cluster, device, software, calibration."""
    from shardwright.spec.catalog import names

    made: dict[str, dict[str, Any]] = {
        kind: dict(catalog_fields(kind, random.choice(some or tuple(names("clusters"))))) for kind, some in _ENTRIES.items()
    }  # fmt: skip
    made["devices"]["generation"] = "calibration.toml"
    if random.random() < 0.5:
        made["software"]["calibration"] = "calibration.toml"
    made["clusters"] |= {"device": "device.toml", "software": "software.toml"}
    made["clusters"].pop("parts", None)
    kind = random.choice(list(made))
    made[kind] = mutate.fields(random, made[kind], _names() + list(made[kind]))
    case = Case("entry", _command(random, "job.toml"))
    for name, of in (("model", "models"), ("cluster", "clusters"), ("device", "devices"), ("software", "software"),
                     ("calibration", "calibrations")):  # fmt: skip
        raw = (mutate.toml(made[of]) if isinstance(made[of], dict) else str(made[of])).encode("utf-8", "surrogatepass")
        case.put(f"{name}.toml", mutate.broken(random, raw) if of == kind and random.random() < 0.15 else raw)
    job = {"model": {"name": "model.toml"}, "cluster": {"name": "cluster.toml"}, "plan": {"tp": 1, "dp": 1},
           "batch": {"global_batch_size": 8}}  # fmt: skip
    each, nodes = (made["clusters"].get(name) for name in ("devices_per_node", "nodes"))
    if isinstance(each, int) and isinstance(nodes, int):
        job["plan"] = {"dp": each * nodes}
        job["batch"] = {"global_batch_size": max(1, each * nodes)}
    return case.put("job.toml", mutate.toml(job))


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
            [{"format": random.choice(["text", "jsonl", "parquet", "tokens"])}, {"text_field": random.choice(["id", "", "x"])},
             {"token_dtype": random.choice(["uint8", "uint32", "int64"])},
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
        ("a.txt", TEXT.encode()), ("a.jsonl", "\n".join(map(json.dumps, records)).encode()), ("a.parquet", parquet.getvalue()),
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
        case.arguments = _command(random, name)
    elif place == "table":
        case.arguments = ["validate", name]
    elif place == "run":
        case.arguments = ["experts", name]
    elif place in ("tokenizer", "data"):
        field_name = "data.tokenizer" if place == "tokenizer" else "data.path"
        case.arguments = [PREPARE, "job.toml", "--set", f"{field_name}={json.dumps(name)}"]
    else:
        case.arguments = [*_command(random, "job.toml"), "--set", f"{place}={json.dumps(name)}"]
    return case


KINDS: dict[str, tuple[Callable[[Random], Case], int]] = {
    "job": (job_case, 25), "set": (set_case, 20), "option": (option_case, 15), "table": (table_case, 12),
    "entry": (entry_case, 10), "data": (data_case, 10), "tokenizer": (tokenizer_case, 5), "path": (path_case, 3),
}  # fmt: skip


def case_of(seed: int, number: int, kinds: list[str] | None = None) -> Case:
    """Case `number` of a seed: a function of both alone."""
    random = Random(f"{seed}:{number}")
    names = kinds or list(KINDS)
    (name,) = random.choices(names, [KINDS[kind][1] for kind in names])
    return KINDS[name][0](random)
