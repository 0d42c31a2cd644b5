"""The commands that bring jobs in from other systems and take them there, as docs/other-systems.md shows them."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shardwright.cli.main import cli

pytestmark = pytest.mark.usefixtures("searched_once")

SCRIPT = """#!/bin/bash
GPUS_PER_NODE=8
NNODES=${NNODES:-2}
MODEL=(--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096
    --group-query-attention --num-query-groups 8 --ffn-hidden-size 14336 --swiglu --normalization RMSNorm
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 128000)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py ${MODEL[@]} \\
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 --micro-batch-size 1 --global-batch-size 128 \\
    --bf16 --lr 3e-4 --train-iters 1000 --recompute-granularity full --recompute-method uniform \\
    --recompute-num-layers 1 --use-distributed-optimizer --log-interval 10
"""


# The job that goes to the systems whose models are those of transformers or of torchtitan.
LLAMA = """
[model]
name = "llama3-8b"
sequence = 4096
[cluster]
device = "h100-sxm"
devices_per_node = 8
nodes = 2
[plan]
dp = 16
zero = 3
recompute = "full"
cp_method = "all-gather"
[batch]
global_batch_size = 32
[precision]
compute = "bf16"
[optimizer]
schedule = "cosine"
"""


# Of few plans the best is soon found.
FEW = ("--keep", "plan.cp=1", "--keep", "plan.pp=2")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), catch_exceptions=False)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    return str(path)


def test_a_launch_script_becomes_a_job_that_commands_read(script: str, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    done = run("import", "megatron", script, "--device", "h100-sxm", "--toml", str(job))
    assert done.exit_code == 0
    assert "Assumed:" in done.stderr and "logs: --log-interval" in done.stderr
    assert "tp 8" in run("estimate", str(job)).stdout


def test_a_job_goes_out_and_comes_back(tmp_path: Path, script: str) -> None:
    first = json.loads(run("import", "megatron", script, "--json").stdout)["job"]
    job, out = tmp_path / "job.toml", tmp_path / "out"
    run("import", "megatron", script, "--toml", str(job))
    for system in ("megatron", "nemo"):
        done = run("export", str(job), "--to", system, "--out", str(out))
        assert done.exit_code == 0
        assert all(f"wrote {file}" in done.stderr for file in out.iterdir() if file.name.startswith(system))
    for files in (("megatron", "run.sh"), ("nemo", "megatron_gpt_config.yaml")):
        again = json.loads(run("import", files[0], str(out / files[1]), "--json").stdout)["job"]
        assert again["plan"] == first["plan"] and again["batch"] == first["batch"]


def test_a_learning_rate_that_the_job_leaves_to_us_is_said(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(LLAMA)
    answer = "The job says no learning rate, and 0.001 is in the files; say yours with --set"
    assert answer in run("export", str(job), "--to", "torchtitan", "--out", str(tmp_path / "out")).stderr
    own = ("--set", "optimizer.learning_rate=0.001")
    assert (
        "learning rate"
        not in run("export", str(job), "--to", "torchtitan", "--out", str(tmp_path / "out"), *own).stderr
    )
    assert json.loads(run("export", str(job), "--to", "torchtitan", "--json").stdout)["unsaid_learning_rate"] == 0.001


def test_plan_from_says_what_it_costs_and_which_flags_to_change(script: str) -> None:
    done = run("plan", "--from", "megatron", script, "--device", "h100-sxm", "--top", "2", *FEW)
    assert done.exit_code == 0
    text = done.stdout
    assert text.startswith("As it stands, Megatron-LM takes ")
    assert "MFU" in text and re.search(r"1\. \d\.\d", text) and "times as fast" in text
    assert "--tensor-model-parallel-size 8 -> 1" in text and "- --recompute-granularity full" in text


def test_flags_with_other_names_that_mean_what_is_changed_are_named_to_go(tmp_path: Path) -> None:
    own = SCRIPT.replace("--pipeline-model-parallel-size 1", "--pipeline-model-parallel-size 2")
    own = re.sub(
        r"--recompute-granularity .* --use-d", "--num-layers-per-virtual-pipeline-stage 8 --use-d", own, flags=re.S
    )
    own += "    --recompute-activations\n"
    own = own.replace("--log-interval 10\n", "--log-interval 10 \\\n")
    path, changed = tmp_path / "run.sh", tmp_path / "changed.sh"
    path.write_text(own)
    options = ("--device", "h100-sxm", "--json", "--top", "1", *FEW, "--keep", "plan.virtual_stages=4")
    result = json.loads(run("plan", "--from", "megatron", str(path), *options).stdout)["as_given"]["faster"][0]
    old = {"--num-layers-per-virtual-pipeline-stage 8", "--recompute-activations"}
    assert set(result["instead_of"]) == old
    for words in old:
        own = own.replace(words, "")
    for name, (before, after) in result["changes"].items():
        own = re.sub(rf"--{name}\b( {before})?", "", own)
        value = "" if after is True else f" {shlex.quote(str(after))}"
        own = own.rstrip("\n") + ("" if after is None else f" --{name}{value}") + "\n"
    changed.write_text(own)
    again = json.loads(run("plan", "--from", "megatron", str(changed), *options).stdout)["as_given"]
    assert again["step_s"] == pytest.approx(result["step_s"])


def test_two_flags_of_virtual_stages_are_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    flags = "--num-layers-per-virtual-pipeline-stage 8 --num-virtual-stages-per-pipeline-rank 4 --bf16"
    path.write_text(SCRIPT.replace("--bf16", flags))
    with pytest.raises(ValueError, match="are both there, and Megatron-LM takes one of them"):
        run("import", "megatron", str(path))


def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(SCRIPT)
    Path("llama3-titan.toml").write_text(LLAMA)
    page = (Path(__file__).parents[2] / "docs" / "other-systems.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```sh\n(.*?)```", page, re.S) for line in block.splitlines()]
    assert len(lines) == 19
    (with_arguments,) = (line for line in lines if " -- " in line)
    (check,) = (line for line in lines if " check " in line)
    lines = [line for line in lines if line not in (with_arguments, check)]
    script = str(Path(__file__).parents[2] / "docs" / "pretrain.sh")
    writing = [line for line in lines if " export " in line]
    first = [line for line in lines if "--toml" in line]
    for line in [*first, *writing]:
        assert run(*shlex.split(line)[1:]).exit_code == 0, line
    Path("titan-0.2/job.toml").rename("job-titan.toml")
    for source in ("nemo/megatron_gpt_config.yaml", "deepspeed/ds_config.json", "deepspeed/config.json"):
        shutil.copy(source, ".")
    for source in ("accelerate/accelerate.yaml", "axolotl/axolotl.yaml", "nanotron/nanotron.yaml"):
        shutil.copy(source, ".")
    assert run(*shlex.split(check.replace("docs/pretrain.sh", script))[1:]).exit_code == 0
    for line in lines:
        if line not in (*writing, *first):
            assert run(*shlex.split(line)[1:]).exit_code == 0, line
    Path("run.sh").write_text("bash inner.sh --tensor-model-parallel-size $2 --global-batch-size $((8 * $3))\n")
    Path("inner.sh").write_text(
        SCRIPT.replace("--tensor-model-parallel-size 8", '"$@"').replace("--global-batch-size 128 ", "")
    )
    assert run(*shlex.split(with_arguments)[1:]).exit_code == 0


def test_plan_from_as_json(script: str) -> None:
    result = json.loads(run("plan", "--from", "megatron", script, "--device", "h100-sxm", "--json", *FEW).stdout)
    faster = result["as_given"]["faster"]
    assert faster and faster[0]["times_faster"] > 1 and faster[0]["changes"]
    assert result["plans"]


def test_changes_of_an_old_script_are_those_of_its_generation(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    old = SCRIPT.replace("--use-distributed-optimizer", "--DDP-impl local").replace("--recompute-granularity full", "")
    path.write_text(re.sub(r"--recompute-\S+ (uniform|1)\b", "", old))
    done = run("plan", "--from", "megatron", str(path), "--device", "a100-80g", "--top", "2", *FEW)
    assert "as megatron-2021" in done.stdout and "held to what megatron-2021 has" in done.stdout.replace("\n", " ")
    assert "--sequence-parallel" not in done.stdout and "--use-distributed-optimizer" not in done.stdout


def test_plan_from_asks_for_the_device(script: str) -> None:
    with pytest.raises(ValueError, match="--device, such as h100-sxm"):
        run("plan", "--from", "megatron", script)


def test_a_system_may_be_named_before_the_files_or_by_from(script: str) -> None:
    options = (script, "--device", "h100-sxm")
    assert run("import", "megatron", *options).stdout == run("import", *options, "--from", "megatron").stdout
    assert run("import", "megatron", *options, "--from", "megatron").exit_code == 0
    with pytest.raises(ValueError, match=r"two systems are named, megatron before the files and deepspeed by --from"):
        run("import", "megatron", *options, "--from", "deepspeed")


def test_a_plan_that_a_system_lacks_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"nearest plan that Megatron-LM has: --set plan\.schedule=1f1b"):
        run("export", "deepseek-v3", "--to", "megatron")


def test_the_way_out_is_no_fault_and_leads_on() -> None:
    sets = ("--set", "batch.ramp.start=8", "--set", "batch.ramp.increment=8", "--set", "batch.ramp.samples=64")
    with pytest.raises(ValueError, match="nearest plan that") as caught:
        run("export", "quickstart", "--to", "deepspeed", *sets)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith(f"{len(lines) - 2} faults") and lines[-1].startswith(
        "  the nearest plan that DeepSpeed has"
    )
    way = shlex.split(lines[-1].partition(": ")[2])
    assert run("export", "quickstart", "--to", "deepspeed", *sets, *way).exit_code == 0


def test_a_model_that_torchtitan_has_not_is_told_with_those_that_it_has() -> None:
    with pytest.raises(
        ValueError, match=r"names its models, and this one is none .*known: llama3 .*llama3 8B.*take another --to"
    ):
        run("export", "quickstart", "--to", "torchtitan")


def test_plan_from_torchtitan_says_fields_in_the_form_of_its_files(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(LLAMA)
    few = ("--keep", "plan.cp=1", "--keep", "plan.pp=1")
    options = ("--device", "h100-sxm", "--json", "--top", "1", *few)
    for system, files in (("torchtitan", ("run.sh", "job_config.py")), ("torchtitan-0.2", ("job.toml",))):
        run("export", str(job), "--to", system, "--out", str(tmp_path / system))
        paths = [str(tmp_path / system / name) for name in files]
        beside = [word for path in paths[1:] for word in ("--with", path)]
        done = run("plan", "--from", "torchtitan", paths[0], *beside, "--devices", "16", *options)
        changes = json.loads(done.stdout)["as_given"]["faster"][0]["changes"]
        policy = "activation_checkpoint" if system == "torchtitan" else "activation_checkpoint.mode"
        assert changes[policy][0] == "full"


def test_a_file_that_is_none_is_one_fault(tmp_path: Path) -> None:
    for name in ("nothing.sh", str(tmp_path)):
        with pytest.raises(ValueError, match="1 fault"):
            run("import", "megatron", name)
