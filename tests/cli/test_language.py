"""Screens in Chinese: by option or locale, with the numbers and units of the English ones and no template left out."""

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen

import click
import pytest
from click.testing import CliRunner, Result

from shardwright.cli.main import cli
from shardwright.config.base import RunError
from shardwright.config.phrase import language_of_locale, say
from shardwright.config.text_columns import num_columns
from support.languages import assert_same_in_chinese, differing, num_chinese, words_of_picture
from support.recorded_run import write_run

SCREENS = (
    "estimate quickstart",
    "estimate llama2-7b --devices 8 --device h100-sxm --set plan.dp=8 --set plan.zero=1 --set plan.microbatch_size=1 "
    "--set plan.recompute=full --set plan.offload_optimizer=0.5 --set cluster.checkpoint_gb_per_s=10",
    "estimate yi-34b --as flash-2023",
    "estimate llama3-8b --devices 1 --device rtx-4090 --set plan.dp=1 --set plan.offload_optimizer=0",
    "explain quickstart-moe",
    "explain gpt-100b-told",
    pytest.param("explain deepseek-v3", marks=pytest.mark.long),
    pytest.param("explain llama3-405b-16k-long --as llama3", marks=pytest.mark.long),
)


# Tables and drawings, which have fewer words.
SHORT_SCREENS = (
    "devices",
    "clusters",
    "schedules",
    "software",
    "collective all-reduce --bytes 1MB --ranks 16",
    "collective all-to-all --ranks 4",
    "check quickstart gemma2-27b-tpu",
    "check llama2-70b --devices 8 --device h100-sxm --set plan.dp=8",
    "simulate quickstart",
    "schedule dualpipe --stages 4 --microbatches 8 --gather 1",
    "schedule 1f1b --stages 4 --microbatches 8 --slow 2 1.5",
    "schedule --compare --stages 2 --microbatches 4 --communication 0.1",
)
PRINT_LANGUAGE = "from shardwright.config.phrase import language_of_locale; print(language_of_locale())"


def run(words: str, *more: str, **environment: str) -> Result:
    return CliRunner(env={"LC_ALL": "C.UTF-8"} | environment).invoke(cli, [*shlex.split(words), *more])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("words", [*SCREENS, *SHORT_SCREENS])
def test_a_screen_has_the_same_numbers_in_chinese(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def text_in(language: str) -> str:
        result = run(words, "--lang", language)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert_same_in_chinese(text_in, monkeypatch, least=10 if words in SHORT_SCREENS else 100)


def test_the_locale_chooses_and_the_option_overrides_it() -> None:
    assert "放得进" in run("estimate gemma2-27b-tpu", LC_ALL="zh_CN.UTF-8").output
    assert "It fits" in run("estimate gemma2-27b-tpu", "--lang", "en", LC_ALL="zh_CN.UTF-8").output
    assert "It fits" in run("estimate gemma2-27b-tpu", LC_ALL="de_DE.UTF-8").output


def test_a_picture_of_a_collective_has_the_same_numbers_in_chinese(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def words_in(language: str) -> str:
        file = tmp_path / f"{language}.svg"
        assert run(f"collective all-reduce --ranks 8 --svg {file} --lang {language}").exit_code == 0
        return words_of_picture(file.read_text(encoding="utf-8"))

    assert_same_in_chinese(words_in, monkeypatch, 20)


def test_a_dry_run_speaks_chinese() -> None:
    screen = run("dryrun quickstart --lang zh").stdout
    for words in ("按在 cpu 上运行：一步的", "峰值时", "激活值", "集合通信", "次数和字节都与此相同"):
        assert words in screen, screen


@pytest.mark.usefixtures("searched_once")
def test_json_is_english() -> None:
    words = "estimate gpt-100b-32xa100 --set model.hidden=12288 --set model.heads=96 --json"
    (note, *_), (other, *_) = (json.loads(run(words, *lang).stdout)["notes"] for lang in ((), ("--lang", "zh")))
    assert note == other and "billion parameters" in note


@pytest.mark.parametrize("words", ["estimate quickstart --set plan.tp=3", "check quickstart --set plan.tp=3"])
def test_faults_beside_json_are_english(words: str) -> None:
    english, chinese = run(f"{words} --json"), run(f"{words} --json", "--lang", "zh")
    assert str(english.exception) == str(chinese.exception) and english.stdout == chinese.stdout
    assert not num_chinese(f"{chinese.exception}{chinese.stdout}{chinese.stderr}")


def test_a_failure_is_told_in_the_language(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RunError(say("{path} is empty", path="a"))

    monkeypatch.setattr("shardwright.report.catalog_tables.catalog_text", fail)
    assert str(run("models").exception) == "failed: a is empty"
    assert str(run("models", "--lang", "zh").exception) == "失败：a 是空的"


def test_processes_that_a_command_starts_speak_its_language(monkeypatch: pytest.MonkeyPatch) -> None:
    def speaking(*_: object) -> str:
        with Popen([sys.executable, "-c", PRINT_LANGUAGE], stdout=PIPE, text=True) as process:
            return process.communicate()[0]

    monkeypatch.setattr("shardwright.report.catalog_tables.catalog_text", speaking)
    assert run("models --lang zh").stdout.split() == ["zh"] and run("models").stdout.split() == ["en"]
    assert run("models --lang en", LC_ALL="zh_CN.UTF-8").stdout.split() == ["en"]
    assert language_of_locale() == "en"


def test_a_run_is_watched_in_the_language(tmp_path: Path) -> None:
    folder = write_run(tmp_path, overrides=["optimizer.steps=10"])
    screen = run(f"top {folder} --once --lang zh").stdout
    for words in ("第 5 步，共 10 步，还剩 2.5 s", "损失", "留出集损失", "一步的组成", "计算 70 %", "1 步没有更新权重"):
        assert words in screen, screen
    table = run(f"runs {folder} --lang zh").stdout
    assert "每秒" in table and "rank" in table and "效率" in table


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("estimate quickstart --set plan.tp=3", "plan.tp 3 不能整除 8 个注意力头（8 / 3 = 2.67）；可用 1、2、4 或 8"),
        (
            "estimate quickstart --set plan.zero_ranks=4",
            "plan.zero_ranks 4 不能整除 plan.dp 2（2 / 4 = 0.50）；可用 1 或 2",
        ),
        ("plan quickstart", "cluster.device 未知，无法估算方案；请用 --device 指定，比如 h100-sxm"),
        ("explain quickstart --set plan.dp=3", "批次请用 24 或 36，或者换一个 plan.dp"),
        ("estimate quickstart --set cluster.nodes=2 --set cluster.devices_per_node=8", "请用 dp 4"),
        ("estimate quickstart --set model.layers=0", "model.layers = 0：应大于 0（Transformer 块的数目）"),
        ("estimate quickstart --html /no/x.html", "无法写 --html /no/x.html：没有这个文件或目录；请用 --html 另选一个"),
        ("import nope", "不能作为文件读取（没有这个文件或目录）"),
        ("launch quickstart --slurm", "启动 quickstart：1 处错误"),
        ("schedule gpipe --stages 0", "--stages 是 0；请用 1 或更大的数"),
    ],
)
def test_faults_are_told_in_the_language(words: str, text: str) -> None:
    english, chinese = str(run(words).exception), str(run(words, "--lang", "zh").exception)
    assert text in chinese and "处错误" in chinese and text not in english
    assert not differing(english, chinese)


def commands(group: click.Group, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of all commands in a group."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name)


def test_helps_are_told_in_the_language(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in [(), *commands(cli)]:

        def help_in(language: str, words: tuple[str, ...] = words) -> str:
            command = cli
            for word in words:
                command = command.commands[word]
            options = {option for parameter in command.params for option in parameter.opts}
            result = run(shlex.join(words), "--lang", language, "--help-all" if "--help-all" in options else "--help")
            assert result.exit_code == 0, result.output
            return result.stdout

        assert_same_in_chinese(help_in, monkeypatch, least=30)


def test_a_help_in_chinese_is_no_wider_than_the_terminal() -> None:
    for words in ("", "plan", "checkpoint", "simulate"):
        screen = run(words, "--help", "--lang", "zh").stdout
        prose = [line for line in screen.splitlines() if num_chinese(line)]
        assert 60 < max(map(num_columns, prose)) <= 80 and "选项：" in screen  # which click takes under a test


def test_fields_are_explained_in_the_language(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same_in_chinese(lambda language: run(f"fields --lang {language}").stdout, monkeypatch, 4000)
    assert run("fields plan --lang zh").stdout.startswith("[plan] 的字段：")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("plna", "错误：没有命令 'plna'。是不是指 'plan'？"),
        ("--nope", "错误：没有选项 '--nope'。"),
        ("plan", "错误：缺少参数 'JOB'。"),
        (
            "plan quickstart --detials",
            "错误：没有选项 '--detials'。（是不是指 '--days'、'--details'、'--devices' 之一？）",
        ),
        ("plan quickstart --top 0", "错误：'--top' 的值无效：0 不在范围 1<=x<=100 内。"),
        ("plan quickstart --top few", "错误：'--top' 的值无效：'few' 不是整数。"),
        (
            "plan quickstart --tokens few",
            "错误：'--tokens' 的值无效：'few' 不是 token 数；请写 1e12、300B 或 15T 这样的数",
        ),
        ("plan quickstart more", "错误：多了参数（more）"),
        ("export quickstart", "错误：缺少选项 '--to'。可选：\n\tmegatron,"),
        ("plan quickstart --from tpu", "错误：'--from' 的值无效：'tpu' 不在可选的值里：'megatron'、'torchtitan'、"),
        ("validate 'no such file'", "错误：'RUNS' 的值无效：文件 'no such file' 不存在。"),
        ("scale llama3-8b --devices 8 --tokens 1e99", "错误：--tokens 的值无效：1e+99 不在 0 到 1e+18 之间"),
        ("generate quickstart --chat", '错误：--chat 回答用户说的话，而这里什么也没有说；请加上 --prompt "..."'),
    ],
)
def test_usage_errors_are_told_in_the_language(words: str, text: str) -> None:
    english, chinese = run(words), run(f"--lang zh {words}")
    assert english.exit_code == chinese.exit_code == 2
    assert text in chinese.stderr and chinese.stderr.startswith("用法：cli ") and "--help' 查看帮助。" in chinese.stderr
    assert not differing(english.stderr, chinese.stderr) and not num_chinese(english.stderr)
    assert "Error: " in english.stderr and "Error: " in run(f"{words} --lang zh --json").stderr


def test_all_wrong_values_of_a_command_are_told_at_once() -> None:
    words = "plan llama3-8b --devices eight --memory-gib x --tokens few"
    english, chinese = run(words), run(f"--lang zh {words}")
    for option in ("'--devices' / '--gpus'", "'--memory-gib'", "'--tokens'"):
        assert f"Invalid value for {option}" in english.stderr and f"{option} 的值无效" in chinese.stderr
    assert english.stderr.count("Error: ") == 1 and english.exit_code == chinese.exit_code == 2
    assert not differing(english.stderr, chinese.stderr)
    both = run("export quickstart --devices eight").stderr
    assert "Missing option '--to'" in both and "'eight' is no whole number" in both


def test_the_language_holds_wherever_it_stands() -> None:
    for words in ("--lang zh plan --nope", "plan --lang=zh --nope", "plan --nope --lang zh"):
        assert "没有选项" in run(words).stderr
    assert "No such option" in run("import run.sh --nope -- --lang zh").stderr
    assert "No such option" in run("plan --nope --lang en", LC_ALL="zh_CN.UTF-8").stderr
    assert "没有选项" in run("plan --nope", LC_ALL="zh_CN.UTF-8").stderr
    assert "放得进" in run("--lang zh estimate gemma2-27b-tpu").output
