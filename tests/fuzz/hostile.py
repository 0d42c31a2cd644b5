"""Cases of hostile input, by kind: a valid job, option, file or table, and what was done to it.

A case is data: the arguments of one command and the files of the folder it runs in. That is all that is needed to see
what went wrong with it again.
"""

import base64
import json
import math
import tomllib
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib import resources
from random import Random
from typing import Any, get_args

from fuzz import mutations as mutate
from shardwright.config.measured_table import Carried, MeasuredTable, Work, sizes_of

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
[cluster.network]
kind = "tcp"
interface = "eth0"
adapters = ["mlx5_0"]
[plan]
dp = 2
tp = 2
pp = 2
schedule = "1f1b"
zero = 1
microbatch_size = 1
layout = [2, 2]
recompute = "none"
[[plan.fallback]]
tp = 2
pp = 2
[batch]
global_batch_size = 8
[run]
max_restarts = 2
restart_window_s = 60.0
[data]
path = "text.txt"
tokenizer = "bytes"
token_dtype = "auto"
begin_token = "auto"
begin_new = false
[optimizer]
steps = 10
warmup_steps = 2
[checkpoint]
every_steps = 2
every_s = 30.0
auto = false
keep_last = 2
keep_every = 4
keep_best = "held-out"
path = "kept"
[health]
not_finite = "stop"
spike = "tell"
spike_window = 100
spike_deviations = 6.0
most_skips = 20
compare_replicas_every = 2
repeat_every = 0
slow_share = 0.25
"""
SOURCES = (
    {"path": "text.txt", "weight": 0.7, "split": "train", "end_of_document": 3, "token_dtype": "uint16"},
    {"path": "chats.jsonl", "weight": 0.3, "chats": True, "format": "jsonl"},
)
VALIDATION = (
    {"name": "code", "path": "code.txt", "format": "text"},
    {"name": "chats", "path": "chats.jsonl", "chats": True, "text_field": "body", "split": "all"},
)
ADAPTER: dict[str, Any] = {"rank": 2, "alpha": 4.0, "targets": ["query", "value", "down"], "weights": ""}
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
        """The case that `as_json` wrote."""
        return Case(**json.loads(text))


@lru_cache(maxsize=1)
def field_names() -> tuple[str, ...]:
    """All "section.field" of a job."""
    from shardwright.config.field_texts import job_fields

    return tuple(
        f"{section}.{row[0].split(' ')[0]}" if section else row[0].split(" ")[0]
        for section, rows in job_fields().items()
        for row in rows
    )


@lru_cache(maxsize=64)
def catalog_fields(kind: str, name: str) -> dict[str, Any]:
    """An entry of the catalog as it is written."""
    folder = resources.files("shardwright.config.catalog")
    return tomllib.loads((folder / kind / f"{name}.toml").read_text(encoding="utf-8"))


def _names() -> list[str]:
    return [name.rpartition(".")[2] for name in field_names()]


def command_on(random: Random, job: str, can_search: bool = True) -> list[str]:
    """A command that reads a job, most often the one whose answer is checked; and not a search for a large model,
    which takes its time on valid input."""
    kind = random.randrange(20 if can_search else 17)
    if random.random() < 0.1:
        how = (["--slurm"], ["--slurm", "--json"], ["--torchrun"], ["--kubernetes", "--image", "us"])
        return ["launch", job, *random.choice(how)]
    if kind < 12:
        return ["estimate", job, "--json"]
    return {
        12: ["estimate", job], 13: ["explain", job], 14: ["explain", job, "--json"], 15: ["simulate", job, "--json"],
        16: ["simulate", job, "--no-colour"], 17: ["scale", job, "--devices", "8,16", "--json"],
        18: ["plan", job, "--top", "2", "--json"], 19: ["layout", job, "--json"],
    }[kind]  # fmt: skip


def job_case(random: Random) -> Case:
    """A job file whose fields, or whose bytes, are wrong."""
    is_tiny = random.random() < 0.5
    given = dict(tomllib.loads(TINY) if is_tiny else catalog_fields("jobs", random.choice(JOBS)))
    if random.random() < 0.1:
        given["data"] = {"sources": [dict(source) for source in SOURCES], "separate_documents": True}
    if random.random() < 0.1:
        given["data"] = given.get("data", {}) | {"validation": [dict(one) for one in VALIDATION]}
    if random.random() < 0.15:
        given["model"] = given.get("model", {}) | {"adapter": dict(ADAPTER)}
    text = mutate.toml(mutate.fields(random, given, _names()))
    raw = text.encode("utf-8", "surrogatepass")
    return Case("job", command_on(random, "job.toml", can_search=is_tiny)).put(
        "job.toml", mutate.broken(random, raw) if random.random() < 0.15 else raw
    )


def set_case(random: Random) -> Case:
    """Overrides of a catalog job or of a tiny one."""
    job = random.choice([*JOBS, "job.toml", "job.toml", "quickstart"])
    case = Case("set", command_on(random, job, can_search=job in ("job.toml", "quickstart"))).put("job.toml", TINY)
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


FLOATS = ("0", "1", "-1", "0.5", "1e308", "1e-308", "nan", "inf", "-inf", "1e9", "x", "", "3")
WHOLES = (
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
_RANGES = ("plan.tp=1,2", "plan.tp=2,1", "plan.tp=x", "tp=1,2", "batch.global_batch_size=8,16", "plan.tp=1,", "")
# By command and option the values to draw from; a value of several words is a tuple of them, and a flag has none.
_OPTIONS: dict[str, dict[str, tuple[str | tuple[str, str], ...]]] = {
    "schedule": {
        "--slow": (("1", "1.5"), ("0", "1000"), ("-1", "2"), ("9" * 30, "2"), ("0", "nan"), ("0", "0.5"), ("x", "2")),
        "--stages": WHOLES, "--microbatches": WHOLES, "--virtual": WHOLES, "--forward": FLOATS, "--steps": WHOLES,
        "--input-grad": FLOATS, "--weight-grad": FLOATS, "--alive": FLOATS, "--gather": FLOATS,
        "--communication": FLOATS, "--svg": ("out.svg", "no/out.svg", ".", "fifo", "/dev/full", ""),
        "--html": ("out.html", "fifo"), "--trace": ("out.json", "/dev/full"), "--recompute": (), "--compare": (),
    },
    "simulate": {"--steps": WHOLES, "--communication": FLOATS, "--svg": ("out.svg", "fifo", "\u0001")},
    "plan": {
        "--top": WHOLES, "--tokens": FLOATS, "--days": FLOATS,
        "--objective": ("time", "goodput", "cost", "energy", "devices", "memory", "x"),
        "--float8": ("none", "rowwise", "x"),
        "--keep": ("plan.tp=2", "plan.tp=3", "tp=2", "plan.tp", "plan.schedule=x", "plan.tp=1e9",
                   "", "plan.layout=[1]"),
        "--between": _RANGES,
        "--toml": ("out.toml", "fifo", "/dev/full"), "--as-software": (),
    },
    "scale": {
        "--devices": (
            "8", "8,16", "1-64", "0", "-8", "8-", "x", "", "1-100000000000000000000", "16-8", "3", "8," * 50, "9" * 30
        ),
        "--tokens": WHOLES, "--svg": ("out.svg", "no/x.svg"), "--keep": ("plan.tp=2", "x"), "--between": _RANGES,
    },
    "compare": {
        "--on": ("h100-sxm:8", "a100-sxm-80g:16@1.5", "x:8", "h100-sxm@94gib:8", "h100-sxm@0gib:8", "h100-sxm:0",
                 "h100-sxm:3@", ":", "h100-sxm:8@1.2.3", ""),
        "--tokens": FLOATS, "--keep": ("plan.tp=2", "x"), "--between": _RANGES, "--as-software": (),
    },
    "layout": {"--search": (), "--toml": ("out.toml", "fifo", "no/x"), "--keep": ("plan.tp=2",), "--between": _RANGES},
    "launch": {
        "--slurm": (), "--kubernetes": (), "--torchrun": (), "--save-before": WHOLES, "--port": WHOLES,
        "--time": ("60", "4:00:00", "1-00:00:00", "0", "-5", "1:99:99", "soon", "", "9" * 30, "99999-00:00:00"),
        "--account": ("us", "a b", "$(id)", "-x", ""), "--partition": ("gpu", "a\nb", "é"),
        "--image": ("us/it:1", "a#b:1", "-x", "a b", "$(id)", ""), "--claim": ("runs", "RUNS", "../x", ""),
        "--first-node": ("node1", "a b", "-x", "x" * 300, ""), "--out": ("out.sh", "fifo", "/dev/full", "job.toml"),
    },
    "estimate": {"--memory-gib": FLOATS, "--tokens": FLOATS}, "explain": {},
}  # fmt: skip
_SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min",
              "dualpipe", "dualpipev", "pipedream", "pipedream-2bw", "auto", "sequential", "x", "", "1F1B")  # fmt: skip


def option_case(random: Random) -> Case:
    """A command's own options."""
    command = random.choice(["schedule"] * 5 + list(_OPTIONS))
    case = Case("option", [command]).put("job.toml", TINY)
    case.special["fifo"] = "fifo"
    case.arguments.append(random.choice(_SCHEDULES) if command == "schedule" else random.choice(["job.toml", "yi-34b"]))
    if command == "scale":
        case.arguments += ["--devices", random.choice(["8", "8,16"])]
    if command == "compare":
        case.arguments += ["--on", "h100-sxm:8"]
    for _ in range(random.choice([1, 2, 2, 3, 4])):
        if not _OPTIONS[command]:
            break
        name = random.choice(list(_OPTIONS[command]))
        values = _OPTIONS[command][name]
        value = random.choice(values) if values else ()
        case.arguments += [name, *([value] if isinstance(value, str) else value)]
    if random.random() < 0.4:
        case.arguments.append("--json")
    if random.random() < 0.03:
        case.arguments.append(random.choice(["--nope", "-x", "--", "--set"]))
    return case


_ENTRIES = {
    "models": ("llama3-8b", "deepseek-v3", "gpt2", "mixtral-8x7b"),
    "devices": ("h100-sxm", "a100-sxm-80g", "laptop-cpu"),
    "software": ("shardwright", "megatron-core", "fsdp-2023", "megatron-deepspeed", "deepspeed-2024"),
    "calibrations": ("ampere", "common", "hopper"),
    "clusters": (),
}  # fmt: skip


def _calibrated(random: Random) -> dict[str, Any]:
    """A calibration's part of a device: constants, and tables of some work, one of which may be wrong."""
    constants = {"gap_s": 1e-6, "step_s": 1e-3, "leak": random.choice([0.0, 0.5]), "jitter": 0.0}
    works = [*get_args(Work)]
    tables = []
    for work in random.sample(works, random.randint(1, len(works))):
        sides = [sorted(random.sample([1.0, 32.0, 1024.0, 2.0**20], random.randint(1, 3))) for _ in sizes_of(work)]
        seconds = [random.choice([1e-6, 1e-3]) for _ in range(math.prod(map(len, sides)))]
        table = {"work": work, "busy": random.choice([1, 2]), "sizes": sides, "seconds": seconds}
        table["number"] = random.choice(["float32", "bf16"])
        columns = ("backward", "weight_grad")[: 2 if work == "product" else work not in (*get_args(Carried), "update")]
        tables.append(table | dict.fromkeys(columns, seconds))
    if random.random() < 0.3:
        place = random.randrange(len(tables))
        tables[place] = mutate.fields(random, tables[place], [*MeasuredTable.model_fields])
    return {"constants": constants, "measured": tables}


def _fields_of(kind: str) -> list[str]:
    """Fields that an entry of a kind may have, those among them that few entries have."""
    from shardwright.config.calibration_file import CalibrationSpec
    from shardwright.config.software import SoftwareSpec
    from shardwright.config.zero_facts import ZeroFactsSpec

    specs = {"software": (SoftwareSpec, ZeroFactsSpec), "calibrations": (CalibrationSpec,)}
    return [name for spec in specs.get(kind, ()) for name in spec.model_fields]


def entry_case(random: Random) -> Case:
    """Files of one's own in the place of the catalog's: model, cluster, device, software, calibration."""
    from shardwright.config.catalog import names

    made: dict[str, dict[str, Any]] = {
        kind: dict(catalog_fields(kind, random.choice(some or tuple(names("clusters")))))
        for kind, some in _ENTRIES.items()
    }
    made["devices"]["generation"] = "calibration.toml"
    if random.random() < 0.5:
        made["devices"] |= _calibrated(random)
    if random.random() < 0.5:
        made["software"]["calibration"] = "calibration.toml"
    made["clusters"] |= {"device": "device.toml", "software": "software.toml"}
    made["clusters"].pop("parts", None)
    kind = random.choice(list(made))
    made[kind] = mutate.fields(random, made[kind], _names() + list(made[kind]) + _fields_of(kind))
    case = Case("entry", command_on(random, "job.toml", can_search=False))
    for name, of in (("model", "models"), ("cluster", "clusters"), ("device", "devices"), ("software", "software"),
                     ("calibration", "calibrations")):  # fmt: skip
        raw = (mutate.toml(made[of]) if isinstance(made[of], dict) else str(made[of])).encode("utf-8", "surrogatepass")
        case.put(f"{name}.toml", mutate.broken(random, raw) if of == kind and random.random() < 0.15 else raw)
    job = {"model": {"name": "model.toml"}, "cluster": {"name": "cluster.toml"}, "plan": {"tp": 1, "dp": 1},
           "batch": {"global_batch_size": 8}}  # fmt: skip
    cluster = made["clusters"] if isinstance(made["clusters"], dict) else {}
    each, nodes = (cluster.get(name) for name in ("devices_per_node", "nodes"))
    if isinstance(each, int) and isinstance(nodes, int):
        job["plan"] = {"dp": each * nodes}
        job["batch"] = {"global_batch_size": max(1, each * nodes)}
    return case.put("job.toml", mutate.toml(job))
