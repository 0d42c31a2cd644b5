"""`launch` and `export` in Python say what the commands say, and refuse what can't be started."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import shardwright as sw
from shardwright.api.launched import launch_options
from shardwright.cli.main import cli
from shardwright.report.launch.launch_options import LAUNCHERS

pytestmark = pytest.mark.usefixtures("searched_once")

STATED = ("data.path=python-stdlib", "optimizer.learning_rate=3e-4", "checkpoint.every_s=1800")
NODES = ("cluster.devices_per_node=4", "cluster.nodes=2", "run.device=cpu")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def answered(*words: str) -> dict:
    done = CliRunner().invoke(cli, [*words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def set_words(overrides: tuple[str, ...]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def faults(call) -> list[str]:
    with pytest.raises(sw.PlanError) as refused:
        call()
    return refused.value.faults


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        ("slurm", {"partition": "gpus", "time": "2-00"}),
        ("kubernetes", {"claim": "mine", "image": "me/mine:1"}),
        ("torchrun", {"first_node": "node001", "port": 29501}),
    ],
)
def test_a_launch_is_that_of_the_command(launcher: str, options: dict[str, str | int]) -> None:
    job = sw.load("quickstart", *NODES, *STATED)
    launch = job.launch(launcher, **options)
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items()]
    words = [f"--{launcher}", *(word for pair in pairs for word in pair)]
    answer = answered("launch", "quickstart", *set_words((*NODES, *STATED)), *words)
    assert launch.to_dict() == answer and launch.text == answer["text"]
    assert launch.save("start").split()[-1] == "start" and Path("start").read_text() == launch.script


def test_a_job_of_fields_is_written_to_the_file_that_its_script_starts() -> None:
    fields = {"model": {"name": "tiny-llama"}, "plan": {"dp": 2}}
    job = sw.load(fields, *STATED, "cluster.devices_per_node=1", "cluster.nodes=2", "run.device=cpu")
    assert "say job_file='job.toml'" in faults(job.launch)[0]
    script = job.launch(job_file="mine.toml").script
    assert "shardwright train mine.toml" in script
    assert sw.load("mine.toml").spec.plan == job.spec.plan


def test_nothing_is_written_of_a_launch_that_is_refused() -> None:
    job = sw.load("quickstart", *NODES)
    told = faults(lambda: job.launch(job_file="mine.toml"))
    assert [fault.split()[0] for fault in told] == ["data.path", "checkpoint.every_s"]
    assert not Path("mine.toml").exists()


def test_options_that_are_none_are_all_told() -> None:
    job = sw.load("quickstart", *NODES, *STATED)
    told = faults(lambda: job.launch("slum", tim="1:00:00", port="many", target="megatrn"))
    assert [fault.split()[0] for fault in told] == ["launcher", "tim", "port", "target"]
    assert "--first-node" in faults(lambda: job.launch("slurm", first_node="node001"))[0]
    assert faults(lambda: job.launch("slurm", port=70_000)) == ["--port 70000 is no port; use one of 1 to 65535"]


ANY_VALUE = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.lists(st.text()))
NAMES = ("port", "time", "save_before", "account", "partition", "image", "claim", "first_node", "target", "tim")


@given(
    launcher=st.one_of(st.sampled_from([*LAUNCHERS, "slum"]), ANY_VALUE),
    options=st.dictionaries(st.sampled_from(NAMES), st.one_of(ANY_VALUE, st.sampled_from([8, "megatron", "1:00:00"]))),
)
def test_options_of_any_kind_are_taken_or_told(launcher: object, options: dict[str, object]) -> None:
    """Those that are taken have the kinds that launchers write into files, and the launcher is one that there is."""
    try:
        taken = launch_options("job", launcher, options)
    except sw.PlanError as error:
        told = error.faults
    else:
        told = []
    if told:
        assert len(told) <= 1 + len(options) and all(told)
        return
    assert taken.launchers == (launcher,) and "tim" not in options
    for name, value in options.items():
        assert getattr(taken, name) == value and type(value) is type(getattr(taken, name))
    assert 0 < taken.port <= 65_535 or any("--port" in fault for fault in taken.faults())


def test_a_launch_of_other_software_is_that_of_the_command() -> None:
    fields = (
        "data.path=tokens",
        "data.format=megatron",
        *STATED[1:],
        "plan.zero=0",
        "cluster.device=h100-sxm",
        *NODES[:2],
    )
    launch = sw.load("quickstart", *fields).launch(target="megatron")
    assert launch.to_dict() == answered("launch", "quickstart", *set_words(fields), "--slurm", "--for", "megatron")
    assert "--first-node" not in launch.script and "pretrain_gpt.py" in launch.script
    assert "take megatron or torchtitan" in faults(lambda: sw.load("quickstart", *fields).launch(target="nemo"))[0]


def test_an_export_is_that_of_the_command() -> None:
    fields = ("plan.zero=0", "cluster.device=h100-sxm", *NODES[:2])
    written = sw.load("quickstart", *fields).export("megatron")
    answer = answered("export", "quickstart", *set_words(fields), "--to", "megatron")
    assert written.to_dict() == answer and written.rows() == [
        {"file": name, "text": text} for name, text in answer["files"].items()
    ]
    assert [path.read_text() for path in written.save("scripts")] == list(answer["files"].values())
    assert "stand for yours" in written.notes() and "占位" in written.notes("zh")


def test_an_export_that_is_refused_names_the_nearest_plan() -> None:
    job = sw.load("quickstart", "plan.schedule=zb-h1", "cluster.device=h100-sxm", *NODES[:2])
    with pytest.raises(sw.PlanError) as refused:
        job.export("megatron")
    assert refused.value.way_out
    Path("file").touch()
    assert (
        "name another folder"
        in faults(lambda: sw.load("quickstart", "plan.zero=0").export("megatron").save("file/in"))[0]
    )
    assert "use megatron" in faults(lambda: job.export("megatrn"))[0]
