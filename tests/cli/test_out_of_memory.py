"""A job of another system's files that runs out of memory: why, and the smallest changes of its files that fit."""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shardwright.cli.main import cli
from shardwright.config.base import PlanError

DEVICE = ("--device", "a100-sxm-40g")
SCRIPT = """deepspeed --num_gpus 8 train.py --model_name_or_path meta-llama/Meta-Llama-3-8B \\
  --deepspeed ds_config.json --bf16 True --per_device_train_batch_size 4 --gradient_accumulation_steps 8 \\
  --model_max_length 4096 --gradient_checkpointing True
"""
AUTO = dict.fromkeys(("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu"), "auto")


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": 2}} | AUTO))
    (tmp_path / "train.sh").write_text(SCRIPT)
    return str(tmp_path / "train.sh")


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, words, catch_exceptions=False)


def test_the_kinds_of_other_software_add_up_to_its_process(script: str) -> None:
    text = " ".join(run("estimate", "--from", "deepspeed", script, *DEVICE).stdout.split())
    needed = re.search(r"needs ([\d.]+) GiB", text)
    kinds = re.search(r"By kind, in GiB: (.*?)\. The table", text)
    assert needed and kinds
    sizes = [float(size) for size in re.findall(r"[a-z]+ ([\d.]+)", kinds[1])]
    assert sum(sizes) == pytest.approx(float(needed[1]), abs=0.05 * (len(sizes) + 1))
    assert sizes == sorted(sizes, reverse=True)
    answer = json.loads(run("estimate", "--from", "deepspeed", script, *DEVICE, "--json").stdout)
    assert sum(answer["process_kinds"].values()) == pytest.approx(answer["process_bytes"])


def test_the_nearest_plans_are_those_that_its_system_has(script: str, tmp_path: Path) -> None:
    """And following one in the files is what --set does."""
    estimate = ("estimate", "--from", "deepspeed", script, *DEVICE)
    nearest = json.loads(run(*estimate, "--json").stdout)["nearest"]
    assert len(nearest) == 3
    for near in nearest:
        options = shlex.split(near["set"])
        assert json.loads(run(*estimate, *options, "--json").stdout)["fits"]
        assert (
            run("import", "deepspeed", script, *DEVICE, *options, "--toml", str(tmp_path / "job.toml")).exit_code == 0
        )
        assert run("export", str(tmp_path / "job.toml"), "--to", "deepspeed").exit_code == 0, near
    text = " ".join(run(*estimate).stdout.split())
    alone = next(near for near in nearest if near["set"] == "--set plan.microbatch_size=1")
    changes = "in its files: --per_device_train_batch_size 4 -> 1, --gradient_accumulation_steps 8 -> 32"
    assert f"{alone['set']} {changes} " in text
    Path(script).write_text(SCRIPT.replace("size 4", "size 1").replace("steps 8", "steps 32"))
    changed = json.loads(run(*estimate, "--json").stdout)
    assert changed["fits"] and changed["process_bytes"] == pytest.approx(alone["process_bytes"])


def test_a_check_names_the_plan_of_the_fewest_changes(script: str) -> None:
    nearest = json.loads(run("estimate", "--from", "deepspeed", script, *DEVICE, "--json").stdout)["nearest"]
    (found,) = json.loads(run("check", script, *DEVICE, "--json").stdout)[0]["findings"]
    assert found.endswith("the nearest plan that does: --set plan.microbatch_size=1")
    assert min(len(shlex.split(near["set"])) for near in nearest) == 2


def test_a_setting_that_is_auto_is_not_told_to_change(script: str) -> None:
    text = run("plan", "--from", "deepspeed", script, *DEVICE).stdout
    assert "--per_device_train_batch_size 4 -> " in text and "train_micro_batch_size_per_gpu" not in text


def test_a_method_without_ranks_that_share_a_sequence_is_not_told() -> None:
    job = ("llama3-8b", "--devices", "8", *DEVICE, "--as", "deepspeed-2025", "--set", "plan.dp=8", "--set")
    nearest = json.loads(run("estimate", *job, "plan.microbatch_size=4", "--json").stdout)["nearest"]
    assert nearest and not any("cp_method" in near["set"] for near in nearest if "plan.cp=" not in near["set"])


def test_plans_of_a_system_that_is_read_alone_are_told_as_fields(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text("model_name_or_path: gpt2\nper_device_train_batch_size: 64\nbf16: true\nmax_seq_length: 1024\n")
    options = ("--devices", "2", "--device", "l4", "--toml", str(tmp_path / "job.toml"))
    told = run("plan", "--from", "trl", str(file), *options)
    assert told.exit_code == 0 and "Recommended: " in told.stdout
    assert "files of TRL are read and not written" in " ".join(told.stdout.split())
    assert json.loads(run("plan", "--from", "trl", str(file), *options, "--json").stdout)["as_given"] is None
    assert run("estimate", str(tmp_path / "job.toml")).exit_code == 0


def test_pages_of_an_optimizer_that_stay_on_the_device_are_told(tmp_path: Path) -> None:
    file = tmp_path / "qlora.yaml"
    for word in ("paged_adamw_32bit", "paged_adamw_8bit", "paged_lion_32bit", "adamw_torch"):
        file.write_text(f"model_name_or_path: gpt2\nmax_seq_length: 1024\nbf16: true\noptim: {word}\n")
        told = " ".join(run("import", "trl", str(file), "--devices", "1").stderr.split())
        assert (f"optim = {word}: where a device is full, pages" in told) is word.startswith("paged_")


def test_a_program_in_python_and_files_without_with_are_told_the_way(tmp_path: Path, script: str) -> None:
    program = tmp_path / "train.py"
    program.write_text("from transformers import Trainer\nTrainer().train()\n")
    for system in ("trl", "deepspeed", "megatron", "accelerate"):
        with pytest.raises(PlanError, match=r"train.py is a program in Python, and .* is read from other files"):
            run("estimate", "--from", system, str(program), "--devices", "8")
    refused = run("estimate", "--from", "deepspeed", script, "config.json")
    assert refused.exit_code == 2
    assert "further files of --from stand behind --with: --with config.json" in " ".join(refused.stderr.split())
