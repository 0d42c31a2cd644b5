"""Broken jobs: exit status 2, one message that names every fault and a way out, and no rank is started.

The commands run in this process, so that a case takes milliseconds; a few at the end are processes of their own.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import shardwright.cli.main
import shardwright.train.launch.launch
from shardwright.config import catalog
from shardwright.config.load import load_job
from shardwright.config.run_file_names import METRICS
from shardwright.config.text_columns import num_columns
from shardwright.train.launch.rank_environment import SPEAKING_S
from shardwright.train.launch.run_folder import holding
from support.forked_commands import SHARDWRIGHT, run_forked

JOB = """
[model]
layers = 4
hidden = 64
heads = 8
kv_heads = 4
ffn = 96
sequence = 16

[plan]
dp = 2
tp = 2
pp = 2
microbatch_size = 2
sequence_parallel = true

[batch]
global_batch_size = 8

[data]
path = "text.txt"

[optimizer]
steps = 10
warmup_steps = 2

[run]
folder = "run"
device = "cpu"
"""


@dataclass(frozen=True)
class Refusal:
    """The message of a command that refused its input."""

    subject: str
    faults: list[str]


Refused = Callable[..., Refusal]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a job and its text; the job can be trained as it is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "text.txt").write_text("A line of text to train on.\n" * 200)
    return tmp_path


@pytest.fixture
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(shardwright.train.launch.launch, "run_ranks", started)


@pytest.fixture
def command(
    here: Path, no_rank: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """Run a command line here: its exit status, and what it wrote to standard output and standard error."""

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["shardwright", *arguments])
        with pytest.raises(SystemExit) as ended:
            shardwright.cli.main.main()
        return ended.value.code, *capfd.readouterr()

    return run


@pytest.fixture
def refused(command: Callable[..., tuple[object, str, str]]) -> Refused:
    """Train a job that must be refused."""

    def run(*overrides: str, job: str = "job.toml", options: tuple[str, ...] = ()) -> Refusal:
        sets = [argument for override in overrides for argument in ("--set", override)]
        status, out, err = command("train", job, *sets, *options)
        assert (status, out) == (2, ""), err
        return parsed(err)

    return run


def parsed(message: str) -> Refusal:
    """The faults of one message; AssertionError if it is not of the form "subject: N faults", each with a number."""
    assert "Traceback" not in message
    first, *lines = re.sub(r"\n +(?! |\d+\. )", " ", message.removesuffix("\n")).split("\n")  # a fault may have lines
    subject, _, count = first.rpartition(": ")
    assert count == ("1 fault" if len(lines) == 1 else f"{len(lines)} faults")
    faults = []
    for number, line in enumerate(lines, 1):
        assert line.startswith(f"  {number}. ")
        faults.append(line.removeprefix(f"  {number}. "))
    return Refusal(subject, faults)


def test_the_job_itself_is_not_refused(here: Path, no_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all the tests here would prove nothing."""
    monkeypatch.setattr(sys, "argv", ["shardwright", "train", "job.toml"])
    with pytest.raises(AssertionError, match="ranks were started"):
        shardwright.cli.main.main()


def test_a_fault_is_as_wide_as_output_and_beside_json_a_line(
    here: Path, command: Callable[..., tuple[object, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on under its text; programs that read JSON read faults, too."""
    monkeypatch.delenv("COLUMNS", raising=False)
    words = ("plan", "llama3-8b", "--devices", "16")
    _, _, err = command(*words)
    header, first, second = err.removesuffix("\n").split("\n")
    assert max(map(num_columns, err.split("\n"))) <= 100
    _, _, whole = command(*words, "--json")
    assert whole.removesuffix("\n").split("\n") == [header, f"{first} {second.removeprefix('     ')}"]
    monkeypatch.setenv("COLUMNS", "300")
    assert command(*words)[2] == whole


# --- fields ---


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("modle.layers=4", "modle is not a known section; did you mean model?"),
        ("tp=4", "tp is not a known section; did you mean plan.tp?"),
        (
            "xyz=1",
            "xyz is not a known section; there are: batch, checkpoint, cluster, data, health, model, name, optimizer, "
            "plan, precision, run",
        ),
        ("plan.schedul=gpipe", "plan.schedul is not a known field; did you mean schedule?"),
        ("optimizer.lr=1e-3", "optimizer.lr is not a known field; did you mean learning_rate?"),
        ("plan.tpp=4", "plan.tpp is not a known field; did you mean tp or pp?"),
        ("plan.tensor=4", "plan.tensor is not a known field; there are: bucket_mib, compress, "),
        ("cluster.intra_node.latency=1", "cluster.intra_node.latency is not a known field; did you mean latency_us?"),
        ('plan.tp="4"', 'plan.tp = "4": it should be a valid integer (Tensor-parallel degree: ranks that share'),
        ("plan.tp=four", 'plan.tp = "four": it should be a valid integer'),
        ("plan.tp=2.0", "plan.tp = 2.0: it should be a valid integer"),
        ("plan.tp=true", "plan.tp = true: it should be a valid integer"),
        ("plan.tp=[2]", "plan.tp = [2]: it should be a valid integer"),
        ("plan.tp=2026-01-01", 'plan.tp = "2026-01-01": it should be a valid integer'),
        ("model.bias=1", "model.bias = 1: it should be a valid boolean"),
        ("data.path=3", "data.path = 3: it should be a valid string"),
        ("plan.layout=4", "plan.layout = 4: it should be a valid array (Layers of each stage"),
        ("plan.layout=[3, -1]", "plan.layout.1 = -1: it should be greater than or equal to 0"),
        ("plan=3", "plan = 3: it should be a section; set fields in it, such as plan.dp"),
        ("model=gpt2", 'model = "gpt2": it should be a section; set fields in it, such as model.name = "gpt2"'),
        ("plan.tp=0", "plan.tp = 0: it should be greater than 0 (Tensor-parallel degree"),
        ("plan.dp=-1", "plan.dp = -1: it should be greater than 0 (Data-parallel degree"),
        ("plan.pp=0", "plan.pp = 0: it should be greater than 0 (Pipeline-parallel degree"),
        ("plan.microbatch_size=0", "plan.microbatch_size = 0: it should be greater than 0"),
        ("model.layers=0", "model.layers = 0: it should be greater than 0"),
        ("plan.schedule=zigzag", "plan.schedule = \"zigzag\": it should be 'sequential', 'gpipe', '1f1b'"),
        ("plan.schedule=流水线", "plan.schedule = \"流水线\": it should be 'sequential'"),
        ("run.device=tpu", "run.device = \"tpu\": it should be 'auto', 'cpu' or 'cuda'"),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate = nan: it should be a finite number"),
        ("optimizer.learning_rate=inf", "optimizer.learning_rate = inf: it should be a finite number"),
        ("optimizer.learning_rate=0", "optimizer.learning_rate = 0: it should be greater than 0"),
        ("optimizer.beta2=1", "optimizer.beta2 = 1: it should be less than 1"),
        ("data.validation_share=1.5", "data.validation_share = 1.5: it should be less than 1 (Share of the documents"),
        ("run.port=70000", "run.port = 70000: it should be less than or equal to 65535"),
        ("run.seed=-1", "run.seed = -1: it should be greater than or equal to 0"),
        ("plan.tp", "--set 'plan.tp' is not of the form section.field=value, such as plan.tp=4"),
        ("", "--set '' is not of the form section.field=value"),
        ("=4", "--set '=4' is not of the form section.field=value"),
        ("plan..tp=4", "--set 'plan..tp=4' is not of the form section.field=value"),
        ("plan.tp.degree=4", "--set 'plan.tp.degree=4': tp is a value, not a section"),
        ("plan.tp=2\nplan.pp=3", 'plan.tp = "2\\nplan.pp=3": it should be a valid integer'),
        pytest.param("plan.tp=" + "[" * 5000, 'plan.tp = "[[[[[[[[', id="nested too deep"),
        pytest.param("plan.tp=" + "9" * 5000, 'plan.tp = "99999999', id="a number too long"),
    ],
)
def test_a_wrong_field(refused: Refused, override: str, fault: str) -> None:
    refusal = refused(override)
    assert refusal.subject == "job job.toml"
    assert len(refusal.faults) == 1
    assert refusal.faults[0].startswith(fault)


def test_a_long_value_is_shortened(refused: Refused) -> None:
    (fault,) = refused("plan.tp=" + "x" * 500).faults
    assert fault.startswith('plan.tp = "xxxx')
    assert "...: it should be a valid integer" in fault
    assert len(fault) < 200


@pytest.mark.parametrize(
    ("overrides", "fault", "mended_by"),
    [
        (
            ["model.heads=6", "model.kv_heads=6", "model.positions=learned"],
            "model.hidden 64 does not split into 6 heads (64 = 10 x 6 + 4); use heads = 4 or 8, or set model.head_dim",
            ["model.heads=4", "model.kv_heads=4"],
        ),
        (
            ["model.kv_heads=6"],
            "model.kv_heads 6 does not divide model.heads 8 (each key/value head serves heads / kv_heads query heads); "
            "use 4 or 8",
            ["model.kv_heads=8"],
        ),
        (
            ["model.hidden=72"],
            "rotary positions turn pairs of elements, and a head has 9; use an even model.head_dim, or positions = ",
            ["model.positions=learned"],
        ),
        (
            ["plan.tp=8"],
            "plan.tp 8 does not divide 4 kv heads (4 / 8 = 0.50); use 1, 2 or 4",
            ["plan.tp=4"],
        ),
        (
            ["model.ffn=99"],
            "plan.tp 2 does not divide 99 ffn (99 / 2 = 49.50); use 1 or 3",
            ["plan.tp=1"],
        ),
        (
            ["model.sequence=15"],
            "sequence parallel shards 15 tokens over tp 2 (15 / 2 = 7.50); use a sequence that is a multiple of 2, "
            "such as 14, or plan.sequence_parallel = false",
            ["model.sequence=14"],
        ),
        (
            ["plan.tp=4", "model.vocab=3"],
            "plan.tp 4 leaves ranks without a row of a vocabulary of 3; use at most 3",
            ["plan.tp=2"],
        ),
        (
            ["plan.pp=6"],
            "pp 6 x virtual_stages 1 = 6 stages for 4 layers leaves stages without a layer; use at most 4, or say so "
            "in plan.layout",
            ["plan.layout=[0, 1, 1, 1, 1, 0]"],
        ),
        (
            ["plan.pp=7"],
            "pp 7 x virtual_stages 1 = 7 stages for 4 layers leaves stages without a layer; use at most 4",
            ["plan.pp=4"],
        ),
        (
            ["plan.layout=[4]"],
            "plan.layout names 1 stage, and pp 2 x virtual_stages 1 = 2; give 2 numbers",
            ["plan.layout=[4, 0]"],
        ),
        (
            ["plan.layout=[1, 4]"],
            "plan.layout places 1 + 4 = 5 layers, and the model has 4; for example [2, 2]",
            ["plan.layout=[2, 2]"],
        ),
        (
            ["plan.pp=4", "plan.layout=[2, 0, 1, 1]"],
            "plan.layout leaves stage 1 with nothing to do; only the first stage (embedding) and the last",
            ["plan.layout=[0, 2, 2, 0]"],
        ),
        (
            ["plan.virtual_stages=2"],
            "schedule '1f1b' runs one stage on each rank, and plan.virtual_stages is 2; use 1",
            ["plan.virtual_stages=1"],
        ),
        (
            ["batch.global_batch_size=6"],
            "batch.global_batch_size 6 does not split into dp 2 x microbatch_size 2 = 4 (6 / 4 = 1.50); "
            "use a batch of 4 or 8, or plan.microbatch_size 1 or 3",
            ["plan.microbatch_size=3"],
        ),
        (
            ["batch.global_batch_size=3"],
            "batch.global_batch_size 3 does not split into dp 2 x microbatch_size 2 = 4 (3 / 4 = 0.75); "
            "use a batch of 4, or another plan.dp",
            ["batch.global_batch_size=4"],
        ),
        (
            ["cluster.devices_per_node=8", "cluster.nodes=2"],
            "dp 2 x tp 2 x pp 2 = 8 ranks, and cluster 'this-machine' has 2 nodes x 8 devices = 16; use dp 4",
            ["plan.dp=4"],
        ),
        (
            ["cluster.devices_per_node=3", "cluster.nodes=2"],
            "dp 2 x tp 2 x pp 2 = 8 ranks, and cluster 'this-machine' has 2 nodes x 3 devices = 6; "
            "use degrees whose product is 6",
            ["plan.dp=1", "plan.pp=3"],
        ),
        (
            ["cluster.device=h100-xsm"],
            "cluster.device 'h100-xsm' is not in the catalog of devices; did you mean h100-sxm or h800-sxm?",
            ["cluster.device=h100-sxm"],
        ),
        (
            ["optimizer.warmup_steps=11"],
            "optimizer.warmup_steps 11 is more than optimizer.steps 10, so the peak learning rate is never reached; "
            "use at most 10",
            ["optimizer.warmup_steps=10"],
        ),
        (
            ['model={name = "llama3-9b"}'],
            "model.name 'llama3-9b' is not in the catalog, and no other field describes the model; "
            "did you mean llama3-8b or llama3-70b?",
            ["model.name=llama3-8b"],
        ),
        (
            ['model={name = "none-like-it"}'],
            "model.name 'none-like-it' is not in the catalog, and no other field describes the model; "
            f"there are {len(catalog.known_models())}, which `shardwright models` lists",
            ["model.name=llama3-8b"],
        ),
        (
            ["cluster.name=dgx"],
            "cluster.name 'dgx' is not in the catalog, and no other field describes the cluster; "
            f"there are {len(catalog.names('clusters'))}, which `shardwright clusters` lists",
            ["cluster.devices_per_node=8"],
        ),
    ],
)
def test_fields_that_do_not_go_together(
    refused: Refused, overrides: list[str], fault: str, mended_by: list[str]
) -> None:
    refusal = refused(*overrides)
    assert len(refusal.faults) == 1
    assert refusal.faults[0].startswith(fault)
    load_job("job.toml", overrides + mended_by)  # the way out is one


def test_heads_that_tensor_parallelism_does_not_divide(refused: Refused) -> None:
    """Key/value heads divide heads, so what does not divide the heads does not divide them either."""
    refusal = refused("plan.tp=3", "model.sequence=15")
    assert refusal.faults == [
        "plan.tp 3 does not divide 8 heads (8 / 3 = 2.67); use 1, 2, 4 or 8",
        "plan.tp 3 does not divide 4 kv heads (4 / 3 = 1.33); use 1, 2 or 4",
    ]


def test_all_faults_of_fields_are_listed(refused: Refused) -> None:
    refusal = refused("model.layers=0", "plan.tp=x", "plan.foo=1", "optimizer.learning_rate=nan", "plan.tp.x", "a=b")
    places = ["--set 'plan.tp.x'", "model.layers", "plan.tp", "plan.foo", "optimizer.learning_rate", "a is not"]
    assert len(refusal.faults) == 6
    assert all(fault.startswith(place) for fault, place in zip(refusal.faults, places, strict=True))


def test_all_faults_of_a_plan_are_listed(refused: Refused) -> None:
    refusal = refused(
        "model.kv_heads=3", "plan.tp=5", "plan.layout=[9]", "batch.global_batch_size=7", "optimizer.warmup_steps=99",
        "cluster.device=abacus", "cluster.devices_per_node=4",
    )  # fmt: skip
    places = [
        "model.kv_heads 3", "plan.tp 5 does not divide 8 heads", "plan.tp 5 does not divide 3 kv heads",
        "plan.tp 5 does not divide 96 ffn", "sequence parallel", "plan.layout", "batch.global_batch_size 7",
        "cluster.device 'abacus'", "optimizer.warmup_steps 99", "dp 2 x tp 5 x pp 2 = 20 ranks",
    ]  # fmt: skip
    assert len(refusal.faults) == len(places)
    assert all(fault.startswith(place) for fault, place in zip(refusal.faults, places, strict=True))


def test_a_refusal_prints_no_json(refused: Refused) -> None:
    refused("plan.tp=3", options=("--json",))
    refused("data.path=nothing", options=("--json",))


# --- job files ---


@pytest.mark.parametrize(
    ("job", "fault"),
    [
        (
            "quickstrat",
            "'quickstrat' is neither a job nor a model of the catalog, nor a file; did you mean quickstart (a job)",
        ),
        ("zzz", "'zzz' is neither a job nor a model of the catalog, nor a file; there are the jobs bloom-176b-384"),
        ("", "'' is neither a job nor a model of the catalog, nor a file; there are the jobs bloom-176b-384"),
        ("missing.toml", "there is no file missing.toml (looked from {here}); check the path"),
        ("jobs/mine", "there is no file jobs/mine (looked from {here}); check the path"),
        ("job.toml/inside.toml", "there is no file job.toml/inside.toml (looked from {here}); check the path"),
        (".", ". is a folder; name the TOML file of a job in it, or a folder that has a config.json"),
        ("n" * 300, "n" * 300 + " can't be read: File name too long; check the path"),
    ],
)
def test_a_job_that_is_no_file(here: Path, refused: Refused, job: str, fault: str) -> None:
    refusal = refused(job=job)
    assert refusal.subject == f"job {job or repr('')}"
    assert len(refusal.faults) == 1
    assert refusal.faults[0].startswith(fault.replace("{here}", str(here)))


def test_the_folder_of_a_run_is_told_with_the_commands_that_read_it(here: Path, refused: Refused) -> None:
    (here / "run").mkdir()
    (here / "run" / METRICS).write_text("{}\n")
    (fault,) = refused(job="run").faults
    assert fault.startswith("run is the folder of a run, which `shardwright runs`, `top`, `report` and `generate` read")


def test_the_folder_of_a_run_with_its_card_is_its_job(
    here: Path, command: Callable[..., tuple[object, str, str]]
) -> None:
    job = load_job("quickstart", ("plan.tp=1", "plan.dp=4"))
    (here / "run").mkdir()
    (here / "run" / METRICS).write_text("{}\n")
    (here / "run" / "report.json").write_text(json.dumps({"job": job.model_dump(mode="json")}))
    told = command("estimate", "run", "--json")
    assert told[:2] == command("estimate", "quickstart", "--set", "plan.tp=1", "--set", "plan.dp=4", "--json")[:2]
    for card in ("", "[]", '{"job": 1}', "[" * 10_000):
        (here / "run" / "report.json").write_text(card)
        status, out, err = command("estimate", "run")
        assert (status, out) == (2, "") and "report.json is no card of a run" in err
    status, out, err = command("validate", "run")
    assert (status, out) == (2, "") and "it is a folder; name a CSV file" in err


@pytest.mark.parametrize("job", ["docs/pretrain.sh", "run.sh"])
def test_the_file_of_another_system_is_told_with_the_commands_that_read_it(
    here: Path, refused: Refused, job: str
) -> None:
    path = str(Path(__file__).parents[2] / job)
    if job == "run.sh":
        path = job
        (here / job).write_text("torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2\n")
    (fault,) = refused(job=path).faults
    reader = f"`shardwright import megatron {path}` prints it as a job"
    assert fault.startswith(f"{path} is no job, and looks like a file of Megatron-LM: {reader}")


@pytest.mark.parametrize(
    ("name", "text", "fault", "way_out"),
    [
        ("net.py", "from torch import nn\nclass Net(nn.Module): ...\n", "is a program in Python", "shardwright.shard"),
        (
            "sft.py",
            "from unsloth import FastLanguageModel\n",
            "is no job: it is not read here, being a program of Unsloth",
            "as a job",
        ),
        ("train.log", "[rank0] iteration 10/ 100\n", "is no job; ", "`shardwright validate` compares a table"),
        ("runs.csv", "id,layers\n1,2\n", "is no job; ", "`shardwright validate` compares a table"),
        ("mine.yaml", "size: 8\n", "is no job, which is a TOML file", "say it as a job"),
    ],
)
def test_a_file_that_is_no_job_is_not_taken_for_a_faulty_one(
    here: Path, refused: Refused, name: str, text: str, fault: str, way_out: str
) -> None:
    (here / name).write_text(text)
    (told,) = refused(job=name).faults
    assert told.startswith(f"{name} {fault}") and way_out in told and "TOML:" not in told


def test_a_name_like_none_is_answered_with_the_commands_that_list_names(refused: Refused) -> None:
    (fault,) = refused(job="zzz").faults
    assert "`shardwright models` lists" in fault and "llama3-8b" not in fault


def test_faults_beside_a_job_that_is_not_there_are_of_the_same_list(
    command: Callable[..., tuple[object, str, str]],
) -> None:
    words = ["--devices", "12", "--device", "h100-xsm", "--set", "plan.tp=two", "--set", "plan.pp"]
    status, out, err = command("estimate", "none.toml", *words)
    job, form, device, field = parsed(err).faults
    assert (status, out) == (2, "") and "there is no file none.toml" in job and "section.field=value" in form
    assert "--device 'h100-xsm' is not in the catalog of devices" in device and 'plan.tp = "two"' in field


def test_weights_that_are_not_there_say_no_model(here: Path, refused: Refused) -> None:
    (here / "empty").mkdir()
    for folder, shown, lacks in (
        ("nothere", "nothere", f"is not there (looked from {here})"),
        ("empty", str(here / "empty"), "has no config.json"),
    ):
        Path("job.toml").write_text(f'[model]\nweights = "{folder}"\nsequence = 64\n')
        result = f"model.weights '{shown}' {lacks}, and no other field says what the model is; name a folder of"
        assert refused().faults[0].startswith(result)


@pytest.mark.parametrize(
    ("contents", "fault"),
    [
        (b"# caf\xe9\n[plan]\n", "b.toml is not UTF-8 text (byte 5); a job is a TOML file"),
        (b"[plan\ntp = 4\n", "b.toml is not valid TOML: Expected ']' at the end of a table declaration (at line 1, "),
        (b"[plan]\ntp = 4\ntp = 2\n", "b.toml is not valid TOML: Cannot overwrite a value (at line 3, "),
        (b"\x7fELF\0\0", "b.toml is not valid TOML: Invalid statement (at line 1, column 1); mend that line"),
        (b"a = " + b"[" * 5000, "b.toml is not valid TOML: maximum recursion depth exceeded"),
        (b"a = " + b"9" * 5000, "b.toml has a number of thousands of digits"),
        (b"[[plan]]\ntp = 2\n", 'plan = [{"tp": 2}]: it should be a section; set fields in it, such as plan.dp'),
        (b"[plans]\n", "plans is not a known section; did you mean plan?"),
        (b"[run]\nseed = 2026-01-01\n", 'run.seed = "2026-01-01": it should be a valid integer'),
    ],
)
def test_a_broken_job_file(here: Path, refused: Refused, contents: bytes, fault: str) -> None:
    (here / "b.toml").write_bytes(contents)
    refusal = refused(job="b.toml")
    assert len(refusal.faults) == 1
    assert refusal.faults[0].startswith(fault)


def test_a_byte_order_mark_is_no_fault(here: Path) -> None:
    (here / "job.toml").write_text(JOB, encoding="utf-8-sig")
    assert load_job("job.toml").plan.world == 8


def test_an_unreadable_job_file(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, mode: str) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    (fault,) = refused().faults
    assert fault == "job.toml can't be read: Permission denied; check the path and its permissions"


# --- data ---


@pytest.mark.parametrize(
    ("name", "contents", "fault"),
    [
        ("a.txt", None, "there is no file or folder a.txt (looked from {here}); check the path, or use data.path = "),
        ("", None, "data.path '' can't be read: it is empty"),
        ("*.md", None, "glob *.md matches nothing (looked from {here}); check it, or name a folder"),
        ("a.txt", b"", "a.txt is empty (0 bytes); name files with text in them, or data.path = 'python-stdlib'"),
        ("a.txt", b"text\0", "{here}/a.txt is not text: byte 4 is NUL; save it as UTF-8, set data.format to"),
        ("a.txt", b"caf\xe9", "{here}/a.txt is not UTF-8 text: unexpected end of data at byte 3 (0xe9); save it as"),
        (
            "a.txt.gz",
            b"\x1f\x8b\x08\x08",
            "{here}/a.txt.gz is not UTF-8 text: invalid start byte at byte 1 (0x8b); unpack it",
        ),
        ("a.jsonl", b'{"text": "a"}\n{"text"\n', "{here}/a.jsonl, line 2 is not JSON: Expecting ':' delimiter at char"),
        ("a.jsonl", b'{"body": "a"}\n', "{here}/a.jsonl, line 1 has no field 'text'; it has 'body': set data.text_fie"),
        ("a.jsonl", b"[1]\n", "{here}/a.jsonl, line 1 is of type list; each line must be an object"),
        ("a.parquet", b"PAR1 not really", "{here}/a.parquet is a broken parquet file: "),
        (
            "a.bin",
            b"12345",
            "{here}/a.bin has 5 bytes, which is no whole number of uint16 ids (5 = 2 x 2 + 1); set dat",
        ),
        (
            "a.bin",
            np.array([1, 2, 700], "<u2").tobytes(),
            "{here}/a.bin: token 2 is id 700, and model.vocab = 256 means ids 0 to 255; use model.vocab = 701 or",
        ),
        ("a.npy", b"not numpy", "{here}/a.npy is a broken .npy file: "),
        (
            "a.txt",
            b"too short",
            "data.path a.txt holds 10 tokens, and train and validation each need model.sequence 16 + 1 = 17 tokens, "
            "together 34; use more text or model.sequence = 4 or less",
        ),
    ],
)
def test_broken_data(here: Path, refused: Refused, name: str, contents: bytes | None, fault: str) -> None:
    if contents is not None:
        (here / name).write_bytes(contents)
    refusal = refused(f"data.path={name}")
    assert refusal.subject == "data"
    assert len(refusal.faults) == 1
    assert refusal.faults[0].startswith(fault.replace("{here}", str(here)))


def test_a_folder_without_files(here: Path, refused: Refused) -> None:
    (here / "docs" / "empty").mkdir(parents=True)
    (fault,) = refused("data.path=docs").faults
    assert fault == "folder docs holds no files (hidden ones are skipped); name one with text in it"
    (fault,) = refused("data.path=docs/*").faults
    assert fault.startswith("glob docs/* matches folders and no file")


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["data.tokenizer=t.json"], "there is no tokenizer file t.json (looked from {here}); name a tokenizer.json of"),
        (["data.tokenizer=."], "data.tokenizer . is a folder; name the tokenizer.json in it"),
        (["data.tokenizer=text.txt"], "text.txt is not a tokenizer: "),
        (
            ["model.vocab=100"],
            "tokenizer bytes gives ids 0 to 255, and model.vocab is 100 (256 > 100); use model.vocab = 256 or another",
        ),
    ],
)
def test_a_tokenizer_that_will_not_do(here: Path, refused: Refused, overrides: list[str], fault: str) -> None:
    refusal = refused(*overrides)
    assert refusal.subject == "data"
    assert len(refusal.faults) == 1
    assert refusal.faults[0].startswith(fault.replace("{here}", str(here)))


def test_all_faults_of_data_are_listed(refused: Refused) -> None:
    faults = refused("data.path=nothing", "data.tokenizer=nowhere").faults
    assert ["nothing" in faults[0], "nowhere" in faults[1]] == [True, True]


# --- this machine ---


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_that_is_taken(refused: Refused, taken_port: int) -> None:
    refusal = refused(f"run.port={taken_port}")
    assert refusal.subject == "this machine"
    assert refusal.faults == [f"run.port {taken_port} is taken by another program; use another, or 0 for any free one"]


def test_more_ranks_than_a_machine_hosts(here: Path, refused: Refused, taken_port: int) -> None:
    overrides = ["plan.dp=4096", "plan.microbatch_size=1", "batch.global_batch_size=4096"]
    fault, _ = refused(*overrides, f"run.port={taken_port}").faults  # both are told
    cores = os.cpu_count()
    assert fault.startswith("the plan needs 16384 ranks, and this machine hosts at most ")
    assert f"{cores} cores x 16 = {cores * 16}, " in fault
    assert "use less dp, tp or pp, or torchrun over several machines; `shardwright dryrun` runs any one" in fault
    assert not (here / "run").exists()  # known before any text is read


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_cuda_where_there_is_none(refused: Refused) -> None:
    refusal = refused("run.device=cuda")
    assert refusal.subject == "run.device"
    assert refusal.faults == ["cuda is asked for and torch sees no CUDA device here; use auto or cpu"]


@pytest.mark.parametrize("folder", ["text.txt", "text.txt/inside/it"])
def test_a_run_folder_that_is_a_file(refused: Refused, folder: str) -> None:
    refusal = refused(f"run.folder={folder}")
    assert refusal.subject == "this machine"
    assert refusal.faults == [
        f"run.folder {folder} can't be made: text.txt is a file; name another folder in run.folder"
    ]


def test_the_folder_of_a_job_without_one(here: Path, refused: Refused) -> None:
    (here / "runs").write_text("")
    (fault,) = refused("run.folder=").faults
    assert fault == "run.folder runs/job can't be made: runs is a file; name another folder in run.folder"


def test_a_run_folder_that_nobody_can_write_to(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dir: Path) -> None:  # noqa: A002 (its name in tempfile)
        raise PermissionError(13, "Permission denied", str(dir))

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", refuse)
        (fault,) = refused().faults
    assert fault == "run.folder run can't be written to: Permission denied; name another folder in run.folder"
    (fault,) = refused("run.folder=" + "r" * 300).faults
    assert "can't be written to: File name too long" in fault
    (fault,) = refused('run.folder="a\\u0000b"').faults
    assert "can't be written to: embedded null byte" in fault


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_run_folder_in_one_of_somebody_else(here: Path, refused: Refused) -> None:
    (here / "theirs").mkdir(mode=0o500)
    for folder in ("theirs", "theirs/mine"):
        (fault,) = refused(f"run.folder={folder}").faults
        assert fault == f"run.folder {folder} can't be written to: Permission denied; name another folder in run.folder"


def test_a_run_folder_that_another_run_has(here: Path, refused: Refused, taken_port: int) -> None:
    (here / "run").mkdir()
    with holding(Path("run"), []):
        port, folder = refused(f"run.port={taken_port}").faults  # both are told
    assert "is taken by another program" in port
    assert folder.startswith(f"run.folder run is in use by another run, process {os.getpid()} on ")


@pytest.mark.parametrize(
    "name", ["../../x", "..", ".", "", " ", "a/b", "a\\\\b", "a\\u0000", "a\\n", "n" * 201, "é" * 101]
)
def test_a_name_that_is_no_folder(here: Path, refused: Refused, name: str) -> None:
    (fault,) = refused(f'name="{name}"').faults
    assert fault.startswith("name '")
    assert "folder" in fault and fault.endswith("and run.folder for another place")
    assert sorted(path.name for path in here.iterdir()) == ["job.toml", "text.txt"]


# --- the command line itself ---


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["train"], "Missing argument 'JOB'"),
        (["train", "job.toml", "job.toml"], "Got unexpected extra argument (job.toml)"),
        (["train", "job.toml", "--set"], "Option '--set' requires an argument"),
        (["train", "job.toml", "--steps", "5"], "No such option"),
        (["verify", "job.toml", "--steps", "0"], "Invalid value for '--steps'"),
        (["compare", "job.toml", "--devices", "64"], "No such option '--devices': compare takes its clusters by --on"),
        (["trian", "job.toml"], "No such command 'trian'"),
    ],
)
def test_a_wrong_command_line(
    command: Callable[..., tuple[object, str, str]], arguments: list[str], error: str
) -> None:
    status, out, err = command(*arguments)
    assert (status, out) == (2, "")
    assert f"Error: {error}" in err
    assert "Traceback" not in err


def test_every_unknown_option_and_every_wrong_value_is_told(command: Callable[..., tuple[object, str, str]]) -> None:
    words = ["--foo", "3", "--bar=4", "--devics", "8", "--slurm", "--devices", "x", "-q"]
    status, out, err = command("estimate", "job.toml", *words)
    assert (status, out) == (2, "")
    assert err.partition("Error: ")[2].splitlines() == [
        "No such option '--foo'.",
        "No such option '--bar'.",
        "No such option '--devics'. (Did you mean one of: '--device', '--devices', '--devices-per-node'?)",
        "No such option '--slurm'; it is an option of launch.",
        "No such option '-q'.",
        "Invalid value for '--devices' / '--gpus': 'x' is no whole number.",
    ]


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        ("plan llama3-70b --tp 8", "it is a field of the job: write --keep plan.tp=8."),
        ("estimate quickstart --tp=8", "it is a field of the job: write --set plan.tp=8."),
        ("estimate quickstart --tp --json", "it is a field of the job: write --set plan.tp=VALUE."),
        ("train quickstart --steps 5", "write --set optimizer.steps=5."),
        ("plan llama3-70b --nodes 8", "write --set cluster.nodes=8."),
        ("plan llama3-70b --lr 1e-3", "write --set optimizer.learning_rate=1e-3."),  # its first letters
        ("plan llama3-70b --sequense 3", "write --set model.sequence=3."),  # a slip
        ("plan llama3-70b --seq-length 4096", "write --set model.sequence=4096."),  # as Megatron-LM calls it
        ("plan llama3-70b --tensor-model-parallel-size 8", "write --keep plan.tp=8."),
        ("plan llama3-70b --batch 512", "which --set overrides and shardwright fields batch lists."),
        ("train quickstart --resume", "the same command goes on from the newest checkpoint, and --fresh begins anew."),
        ("train quickstart --epochs 3", "a run is as long as --set optimizer.steps=N."),
        ("generate runs/mine Tell me", "did you mean --prompt 'Tell me'?"),
        ("plan llama3-70b 64 h100", "(64 h100); did you mean --devices 64 --device h100?"),
        ("plan Llama 70B --devices 64", "(70B); a name is one word; did you mean llama3-70b or llama2-70b?"),
        ("plan llama3-70b plan.tp=8", "(plan.tp=8); did you mean --keep plan.tp=8?"),
        ("compare llama3-8b h100-sxm:16 b200-sxm:8", "did you mean --on h100-sxm:16 --on b200-sxm:8?"),
        ("plan --devices 64", "Missing argument 'JOB'. For example: shardwright plan llama3-8b --devices 64"),
        ("compare llama3-8b --on h100-sxm:16,b200-sxm:8", "write --on h100-sxm:16 --on b200-sxm:8"),
        ("import megatron", "it is a system, and none of its files is named; write import megatron FILE"),
        ("import megatrom run.sh", "it is neither a system nor a file; did you mean megatron or"),
    ],
)
def test_words_that_are_meant_otherwise_are_told_how_to_say_it(
    words: str, way_out: str, command: Callable[..., tuple[object, str, str]]
) -> None:
    status, out, err = command(*words.split())
    assert (status, out) == (2, "")
    assert way_out in " ".join(err.split())


def test_a_file_of_data_is_no_job(command: Callable[..., tuple[object, str, str]]) -> None:
    for name, content in (("chats.jsonl", b'{"messages": []}\n'), ("rows.parquet", b"PAR1\0\xff\0PAR1")):
        Path(name).write_bytes(content)
        status, _, err = command("train", name)
        assert status == 2 and f"--set data.path={name}" in " ".join(err.split())


def test_a_run_whose_name_is_nearly_there_is_proposed(command: Callable[..., tuple[object, str, str]]) -> None:
    for folder in ("runs/finetune", "runs/finetuned-no-run", "elsewhere/pretrain"):
        Path(folder).mkdir(parents=True)
    for folder in ("runs/finetune", "elsewhere/pretrain"):
        (Path(folder) / "metrics.jsonl").write_text("")
    for typed, meant in (("runs/finetun", "runs/finetune"), ("finetune", "runs/finetune"), ("elsewhere/x/", "")):
        status, _, err = command("checkpoint", "ls", typed)
        assert status == 2 and (f"did you mean {meant}?" in err if meant else "name a run's folder" in err)


@pytest.mark.parametrize(
    "words",
    [
        ["verify", "quickstart", "--tolerance", "nan"],
        ["verify", "quickstart", "--tolerance", "inf"],  # which everything would pass
        ["top", "nowhere", "--every", "nan"],
        ["generate", "nowhere", "--temperature", "nan"],
        ["checkpoint", "export", "nowhere", "--to", "there", "--file-gib", "nan"],
        ["plan", "llama3-8b", "--memory-gib", "nan"],
        ["collective", "all-reduce", "--bytes", "1e400GB"],
    ],
)
def test_a_number_that_is_none_is_refused_before_any_work(
    words: list[str], command: Callable[..., tuple[object, str, str]]
) -> None:
    """click's own ranges let "nan" pass."""
    status, output, errors = command(*words)
    assert (status, output) == (2, "") and f"Invalid value for '{words[-2]}'" in errors


@pytest.mark.parametrize("name", ["nowhere/x", "text.txt/x"])
@pytest.mark.parametrize(
    ("words", "work"),
    [
        (("plan", "tiny-llama", "--devices", "2", "--device", "h100-sxm", "--toml"), "api.found_plans.found_plans"),
        (("scale", "tiny-llama", "--devices", "2", "--device", "h100-sxm", "--svg"), "api.scaled.scaled"),
        (("simulate", "job.toml", "--html"), "report.timeline.job_study.study_job"),
        (("estimate", "job.toml", "--html"), "api.estimated.estimated"),
    ],
)
def test_a_file_without_a_folder_is_refused_before_the_work(
    words: tuple[str, ...],
    work: str,
    name: str,
    command: Callable[..., tuple[object, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def done(*_: object, **__: object) -> None:
        raise AssertionError("the work was done")

    monkeypatch.setattr(f"shardwright.{work}", done)
    status, output, errors = command(*words, name)
    assert (status, output) == (2, "")
    assert f"{words[-1]} {name} can't be written: No" in errors and f"name another with {words[-1]}" in errors


def test_names_that_are_no_utf8_are_refused(here: Path, command: Callable[..., tuple[object, str, str]]) -> None:
    """The system gives the bytes of such a name as surrogates, which no field of a job can hold."""
    name = os.fsdecode(b"j\xf6b.toml")
    (here / name).write_text(JOB)
    status, output, errors = command("train", name, "--set", "run.folder=" + os.fsdecode(b"l\xe4uft"))
    assert (status, output) == (2, "") and "2 faults" in errors
    assert "run.folder 'l\\udce4uft' is no UTF-8 text" in errors and "name 'j\\udcf6b' is no UTF-8 text" in errors


def test_all_faults_of_what_a_search_may_choose_are_listed(command: Callable[..., tuple[object, str, str]]) -> None:
    keep = ("--keep", "tp", "--keep", "plan.tpp=3", "--keep", "plan.pp=x")
    between = ("--between", "plan.tp=1", "--between", "plan.zz=1,2")
    cluster = ("--devices", "8", "--device", "h100-sxm")
    status, _, errors = command("plan", "llama3-8b", *cluster, *keep, *between)
    assert status == 2 and "5 faults" in errors
    assert all(f"{number}. " in errors for number in range(1, 6))
    assert all(text in errors for text in ("--keep 'tp'", "plan.tpp", "plan.pp", "'plan.tp=1'", "plan.zz has no range"))


def test_verify_refuses_what_train_refuses(command: Callable[..., tuple[object, str, str]]) -> None:
    for override in ("plan.tp=3", "data.path=nothing"):
        status, out, err = command("verify", "job.toml", "--set", override)
        assert (status, out) == (2, "")
        parsed(err)


# --- as processes ---


def run_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_forked(SHARDWRIGHT, *arguments, environment=os.environ | environment)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("override", "subject", "fault"),
    [
        ("plan.tp=3", "job job.toml", "plan.tp 3 does not divide 8 heads (8 / 3 = 2.67); use 1, 2, 4 or 8"),
        ("data.path=nothing", "data", "there is no file or folder nothing"),
        ("run.folder=text.txt", "this machine", "run.folder text.txt can't be made: text.txt is a file"),
    ],
)
def test_a_refusal_of_a_process(here: Path, override: str, subject: str, fault: str) -> None:
    done = run_process("train", "job.toml", "--json", "--set", override)
    assert (done.returncode, done.stdout) == (2, "")
    refusal = parsed(done.stderr)
    assert refusal.subject == subject
    assert refusal.faults[0].startswith(fault)


def test_ranks_of_another_launcher_that_do_not_fit_the_plan(here: Path) -> None:
    """All of them refuse the same; the first one says so."""
    seat = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = run_process("train", "job.toml", RANK="0", **seat)
    assert (done.returncode, done.stdout) == (2, "")
    refusal = parsed(done.stderr)
    assert refusal.subject == "launch"
    assert refusal.faults == [
        "3 ranks were started, and the plan needs dp 2 x tp 2 x pp 2 = 8; start 8, or change the plan, or write in "
        "[plan]: fallback = [{ dp = 1, tp = 1, pp = 3, microbatch_size = 2, sequence_parallel = true }]"
    ]
    done = as_another_rank(seat, "train", "job.toml")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def as_another_rank(seat: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command as rank 1, which waits not as long as rank 0 may take to speak."""
    soon = (
        "from shardwright.cli import main; from shardwright.train.launch import rank_environment\n"
        "rank_environment.SPEAKING_S = 0.1; main.main()"
    )
    return run_forked(soon, *arguments, environment=os.environ | seat | {"RANK": "1"})


SEAT_OF_8 = {"WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "8"}


def test_rank_0_alone_tells_notes_and_refuses_what_all_ranks_refuse(here: Path) -> None:
    done = as_another_rank(SEAT_OF_8, "train", "quickstart", "--set", "optimizer.steps=3", "--fresh")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.parametrize("options", [("--set", "plan.tp=3"), ("--from", "nowhere")])
def test_other_ranks_refuse_after_rank_0_for_a_file_may_be_missing_on_their_machine(
    options: tuple[str, ...], command: Callable[..., tuple[object, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_s = list[float]()
    monkeypatch.setattr("time.sleep", waited_s.append)
    for name, value in (SEAT_OF_8 | {"RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    status, output, errors = command("train", "job.toml", *options)
    assert (status, output, waited_s) == (2, "", [SPEAKING_S])
    assert options[1].removeprefix("plan.tp=") in errors


def test_each_fault_is_a_line_of_its_own(command: Callable[..., tuple[object, str, str]]) -> None:
    """Two of a shape are two; one that many sizes of a cluster have in common is one."""
    status, _, err = command("schedule", "dualpipe", "--stages", "3", "--microbatches", "1")
    assert status == 2
    assert "schedule dualpipe: 2 faults\n  1. dualpipe pairs rank" in err
    assert "\n  2. dualpipe needs m >= 2p microbatches" in err
    status, _, err = command("scale", "quickstart", "--devices", "1-1024")
    assert status == 2
    assert ": 1 fault\n  1. cluster.device or cluster.devices_per_node is not said" in err


@pytest.mark.parametrize("field", ["cluster.name", "cluster.device"])
def test_a_file_that_is_no_toml(field: str, refused: Refused, here: Path) -> None:
    (here / "mine.txt").write_text("layers = 2\n")
    (fault,) = refused(f"{field}={here}/mine.txt").faults
    assert "if the file is meant, give it a name that ends in .toml" in fault
