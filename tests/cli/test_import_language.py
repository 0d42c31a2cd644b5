"""Imports and exports in Chinese: by option or locale, on standard error; JSON and files stay as they are."""

import json
import shlex
from pathlib import Path

from click.testing import CliRunner, Result

from shardwright.cli.main import cli

SCRIPT = str(Path(__file__).parents[2] / "docs" / "pretrain.sh")


def run(words: str, **environment: str) -> Result:
    return CliRunner(env={"LC_ALL": "C.UTF-8"} | environment).invoke(cli, shlex.split(words))


def test_notes_of_an_import_follow_the_option_or_the_locale() -> None:
    by_option, by_locale = run(f"import {SCRIPT} --lang zh"), run(f"import {SCRIPT}", LC_ALL="zh_CN.UTF-8")
    assert by_option.stderr == by_locale.stderr and by_option.stderr.startswith("假定：\n")
    english = run(f"import {SCRIPT} --lang en", LC_ALL="zh_CN.UTF-8")
    assert english.stderr.startswith("Assumed:\n") and english.stdout == by_option.stdout
    assert json.loads(run(f"import {SCRIPT} --lang zh --json").stdout)["assumed"][0].startswith("nobody set these")


def test_a_script_is_predicted_as_the_job_that_import_writes(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    on_device = "--device a100-sxm-80g"
    assert run(f"import --from megatron {SCRIPT} {on_device} --toml {job}").exit_code == 0
    for command in ("estimate", "explain"):
        of_script, of_job = run(f"{command} --from megatron {SCRIPT} {on_device}"), run(f"{command} {job}")
        assert (of_script.exit_code, of_job.exit_code) == (0, 0)
        assert of_script.stdout == of_job.stdout and of_script.stderr.startswith("Assumed:\n")
    further = run(f"estimate {job} --with {SCRIPT}")
    assert further.exit_code == 2 and "say --from, too" in further.stderr


def test_software_that_is_named_is_not_said_to_be_assumed() -> None:
    by_flags, named = run(f"import {SCRIPT}"), run(f"import {SCRIPT} --as megatron-2023")
    assert "priced as" in by_flags.stderr and "(--as NAME for another)" in by_flags.stderr
    assert "priced as" not in named.stderr and 'software = "megatron-2023"' in named.stdout


def test_a_system_that_is_not_read_is_refused_in_chinese(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("xtuner train my_config.py\n", encoding="utf-8")
    assert "它启动的是 XTuner，这里不读取；请写成作业" in str(run(f"import {script} --lang zh").exception)


def test_an_export_is_told_in_chinese(tmp_path: Path) -> None:
    result = run(f"export quickstart --to megatron --out {tmp_path / 'out'} --lang zh")
    assert f"已写入 {tmp_path / 'out' / 'run.sh'}" in result.stderr
    refused = str(run("export llama3-405b-8k --to deepspeed --lang zh").exception)
    assert "DeepSpeed 无法表示 plan.zero = 2；最接近的是 1" in refused
    assert "DeepSpeed 支持的最接近的方案：--set" in refused
