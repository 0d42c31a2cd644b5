"""Files of `launch --for`, run by stand-ins for Slurm's commands and for torchrun: each node starts the files that
`export` would write, with the job's data and checkpoints."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shardwright.cli.main import cli
from shardwright.interchange.system import SYSTEMS
from support.ranks import PATIENCE_S

JOB = """
model.name = "llama3-8b"
precision.compute = "bf16"
batch.global_batch_size = 64
optimizer.learning_rate = 2e-4
[cluster]
device = "h100-sxm"
devices_per_node = 8
nodes = 2
software = "megatron-core"
[plan]
dp = 4
tp = 4
sequence_parallel = true
zero = 1
"""
STATED = ("checkpoint.every_s=1800", "data.path=tokens/text", "data.format=megatron")
SRUN = f"""#!{sys.executable} -IS
import os, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    assert "=" in words.pop(0)
asked = range(int(os.environ["NODES"]))
nodes = [subprocess.Popen(words, env=os.environ | {{"SLURM_NODEID": str(node)}}) for node in asked]
sys.exit(max(node.wait() for node in nodes))
"""
TORCHRUN = f"""#!{sys.executable} -IS
import json, os, sys
here, names = os.environ["STAND_IN"], ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
told = [os.getcwd(), sys.argv[1:], *(os.environ[name] for name in names)]
open(f"{{here}}/started-{{os.environ['NODE_RANK']}}", "a").write(json.dumps(told) + chr(10))
runs = len(open(f"{{here}}/started-{{os.environ['NODE_RANK']}}").readlines())
statuses = open(f"{{here}}/statuses").read().split()
sys.exit(int(statuses[runs - 1]))
"""
SCONTROL = "#!/bin/bash\nprintf 'first\\nsecond\\n'\n"


def launch(folder: Path, *words: str, stated: tuple[str, ...] = STATED) -> Result:
    (folder / "job.toml").write_text(JOB, encoding="utf-8")
    sets = [word for override in stated for word in ("--set", override)]
    return CliRunner().invoke(cli, ["launch", "job.toml", *words, *sets])


def ended(script: Path, folder: Path, statuses: str) -> subprocess.CompletedProcess[str]:
    """The script as Slurm's batch shell runs it on two nodes; each run of torchrun ends with the next status."""
    stand_in = folder / "bin"
    stand_in.mkdir()
    for name, text in (("srun", SRUN), ("torchrun", TORCHRUN), ("scontrol", SCONTROL)):
        (stand_in / name).write_text(text)
        (stand_in / name).chmod(0o755)
    (folder / "statuses").write_text(statuses)
    environment = os.environ | {
        "PATH": f"{stand_in}:{os.environ['PATH']}", "STAND_IN": str(folder), "NODES": "2", "SLURM_JOB_NODELIST": "node",
    }  # fmt: skip
    environment.pop("CODE", None)
    return subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout of Megatron-LM, in which the command is given."""
    (tmp_path / "pretrain_gpt.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("statuses", "status", "runs"), [("0", 0, 1), ("1 0", 0, 2), ("1 2 3 4", 4, 4)])
def test_every_node_starts_the_plan_with_data_and_checkpoints(
    folder: Path, statuses: str, status: int, runs: int
) -> None:
    done = launch(folder, "--slurm", "--for", "megatron", "--time", "2:00:00", "--port", "1234", "--out", "job.sh")
    assert done.exit_code == 0, done.output
    text = (folder / "job.sh").read_text()
    for line in ("nodes=2", "ntasks-per-node=1", "gpus-per-node=8", "time=02:00:00", "no-requeue"):
        assert f"#SBATCH --{line}\n" in text
    run = ended(folder / "job.sh", folder, statuses)
    assert run.returncode == status, run.stderr
    for node in range(2):
        lines = (folder / f"started-{node}").read_text().splitlines()
        assert len(lines) == runs and len({*lines}) == 1
        place, words, rank, address, port = json.loads(lines[0])
        assert (place, rank, address, port) == (str(folder), str(node), "first", "1234")
        told = shlex.join(words)
        assert f"--nproc_per_node 8 --nnodes 2 --node_rank {node} --master_addr first --master_port 1234" in told
        assert "pretrain_gpt.py '--num-layers 32'" in told or "pretrain_gpt.py --num-layers 32" in told
        assert f"--data-path {folder}/tokens/text" in told and "--mock-data" not in told
        place = f"{folder}/runs/job/megatron"
        assert f"--save {place}" in told and f"--load {place}" in told and "--lr 0.0002" in told


def test_what_it_starts_is_the_job(folder: Path) -> None:
    """The files come back as the job that was launched; checkpoints are as far apart as the job says."""
    assert launch(folder, "--slurm", "--for", "megatron", "--out", "job.sh").exit_code == 0
    ended(folder / "job.sh", folder, "0")
    script = str(folder / "job-megatron" / "run.sh")
    back = json.loads(CliRunner().invoke(cli, ["import", "megatron", script, "--json", "--devices", "16"]).stdout)
    plan = back["job"]["plan"]
    assert (plan["dp"], plan["tp"], plan["sequence_parallel"], plan["zero"]) == (4, 4, True, 1)
    predicted = json.loads(CliRunner().invoke(cli, ["estimate", "job.toml", "--json"]).stdout)
    text = (folder / "job-megatron" / "run.sh").read_text()
    every = int(text.partition("--save-interval ")[2].split()[0])
    assert every == round(1800 / predicted["step_s"])


@pytest.mark.parametrize(
    ("words", "stated", "fault"),
    [
        (("--slurm",), (), "data.path is not stated"),
        (("--slurm",), STATED[:2], "Megatron-LM reads tokens in PREFIX.bin and PREFIX.idx, and 'tokens/text' is not"),
        (("--torchrun",), STATED, "--for says nothing to --torchrun; use --slurm, or start what"),
        (("--slurm", "--save-before", "60"), STATED, "--save-before is of this runtime"),
        (
            ("--slurm",),
            (*STATED, "plan.pp=2", "plan.dp=2", "plan.schedule=zb-h2"),
            "plan.schedule = zb-h2 can't be said",
        ),
    ],
)
def test_what_it_lacks_is_refused(folder: Path, words: tuple[str, ...], stated: tuple[str, ...], fault: str) -> None:
    done = launch(folder, *words, "--for", "megatron", stated=stated)
    assert done.exit_code and fault in str(done.exception)


def test_a_mixture_and_steps_between_checkpoints(folder: Path) -> None:
    sources = 'data.sources=[{path="/a.bin", format="megatron", weight=3}, {path="b", format="megatron"}]'
    stated = ("checkpoint.every_steps=70", sources)
    done = launch(folder, "--slurm", "--for", "megatron", stated=stated)
    assert done.exit_code == 0, done.output
    assert f"    --data-path 3 /a 1 {folder}/b\n" in done.stdout and "    --save-interval 70\n" in done.stdout
    none = launch(folder, "--slurm", "--for", "megatron", stated=("checkpoint.every_steps=0", sources)).stdout
    assert "--save" not in none and "run <= 0" in none


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ((), "--split 95,5,0 --seed 1234 --log-interval 10 --eval-interval 200 --eval-iters 4"),
        (
            ("data.validation_share=0.125", "run.seed=7", "run.log_every=3", "run.eval_every=50", "run.eval_batches=9"),
            "--split 87.5,12.5,0 --seed 7 --log-interval 3 --eval-interval 50 --eval-iters 9",
        ),
        (
            ("data.validation_share=0",),
            "--split 100,0,0 --seed 1234 --log-interval 10 --eval-interval 200 --eval-iters 0",
        ),
    ],
)
def test_what_is_held_out_evaluated_and_logged_is_the_jobs(folder: Path, stated: tuple[str, ...], words: str) -> None:
    done = launch(folder, "--slurm", "--for", "megatron", stated=(*STATED, *stated))
    assert done.exit_code == 0 and words in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("stated", "fault"),
    [
        ("checkpoint.path=s3://bucket/run", "checkpoint.path is s3://bucket/run; name a folder that all nodes see"),
        ("data.path=s3://bucket/text", "Megatron-LM reads tokens of a folder, and s3://bucket/text is an address"),
        ("data.separate_documents=true", "data.separate_documents can't be said for Megatron-LM"),
        ('data.validation=[{path="/v", format="megatron"}]', "data.validation can't be said for Megatron-LM"),
        ("checkpoint.keep_best=held-out", "checkpoint.keep_best can't be said for Megatron-LM"),
    ],
)
def test_what_megatron_would_do_otherwise_is_refused(folder: Path, stated: str, fault: str) -> None:
    done = launch(folder, "--slurm", "--for", "megatron", stated=(*STATED, stated))
    assert done.exit_code and fault in " ".join(str(done.exception).split())


def test_code_that_is_elsewhere_is_told_and_looked_for(folder: Path) -> None:
    (folder / "pretrain_gpt.py").unlink()
    done = launch(folder, "--slurm", "--for", "megatron", "--out", "job.sh")
    assert done.exit_code == 0 and "pretrain_gpt.py of Megatron-LM, which is not in" in " ".join(done.stderr.split())
    run = ended(folder / "job.sh", folder, "0")
    assert run.returncode == 2 and f"no pretrain_gpt.py in {folder}; set CODE" in run.stderr


@pytest.mark.parametrize("name", [system.name for system in SYSTEMS.values() if system.run_files is None])
def test_software_whose_data_are_said_otherwise_is_refused(folder: Path, name: str) -> None:
    done = launch(folder, "--slurm", "--for", name)
    assert f"--for {name}: how its data and checkpoints are said is not known here; take megatron" in str(
        done.exception
    )
