"""The README's commands work, its job is the file it names, and what it shows is what is printed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardwright.cli.main
from measure.test_validate import PUBLISHED
from shardwright.cli.checked_job import load
from shardwright.config import catalog
from shardwright.train.build import job_mesh
from support.brought_folder import bring_chats, bring_model
from support.experts_run import write_run
from support.ranks import PATIENCE_S
from train.test_released_models import job_of, trained_and_saved

pytestmark = pytest.mark.usefixtures("searched_once")

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
# Few steps, and so no long warm-up: small ones, for Adam's first steps turn rounding of tiny gradients into full ones.
SHORT = (
    "--set optimizer.steps=3 --set optimizer.warmup_steps=1 --set optimizer.learning_rate=2e-4 --set run.eval_every=0 "
    "--set run.eval_batches=1 --set run.sample_tokens=4"
)
# Half the batch, of short samples, through few layers.
SMALL = "--set batch.global_batch_size=16 --set model.sequence=32 --set model.layers=2"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


SHOWN = [line for block in blocks("sh") for line in block.splitlines()]
# `make train` runs it, and so it is not run once more.
MADE = "shardwright verify quickstart --steps 5"
# As many ranks as quickstart's plan has. `make train` starts as many, and here and in other runs of it some will do.
OF_EIGHT = "torchrun --standalone --nproc-per-node 8 -m shardwright train quickstart"
OF_TWO = "--set plan.dp=1 --set plan.tp=1 --set plan.sequence_parallel=false"
COMMANDS = [command for command in SHOWN if command not in (MADE, PUBLISHED)]


def shortened(command: str, folder: Path) -> list[str]:
    """The command as it is typed, with fewer steps and a folder of its own."""
    extra = f"{SHORT} {SMALL} --set run.folder={shlex.quote(str(folder))}"
    if command.startswith("make "):
        # The environment that runs the tests is the one that make would use.
        stamps = f"-o {BIN.parent}/installed -o {BIN.parent}/installed-test VENV={BIN.parent}"
        if command == "make test":  # this suite is what it runs: see which commands it would give
            return shlex.split(f"make -n {stamps} test")
        return [*shlex.split(f"{command} {stamps}"), f"ARGS={extra}"]
    if command.startswith("shardwright experts "):
        write_run(folder)
        command = command.replace("runs/quickstart-moe", str(folder))
    if command == OF_EIGHT:
        command = f"{command.replace('8', '2')} {OF_TWO}"
    if command.startswith("shardwright train quickstart "):
        command += f" {OF_TWO}"
    if "docs/finetune.toml" in command or "./Qwen3-0.6B" in command or "./tuned" in command:
        return brought(command, folder)
    if command.startswith("shardwright calibrate "):
        command = command.replace("here.toml", str(folder / "here.toml")) + " --quick --ranks 1"
    if "--html" in command:
        command = command.replace("timeline.html", str(folder / "timeline.html"))
    if re.match(r"(shardwright|torchrun .* -m shardwright) (train|verify) ", command):
        command += f" {extra}"
    return shlex.split(command)


def brought(command: str, folder: Path) -> list[str]:
    """The command with a small model in the place of what it names, and a job that is smaller too."""
    model = bring_model(folder / "Qwen3-0.6B")
    if "docs/finetune.toml" in command:
        bring_chats(folder / "chats.jsonl")
        (folder / "finetune.toml").write_text((ROOT / "docs" / "finetune.toml").read_text("utf-8"))
        command = command.replace("docs/finetune.toml", str(folder / "finetune.toml"))
        command += f" {SHORT} --set model.sequence=64 --set data.workers=1 --set run.folder={shlex.quote(str(folder))}"
    if "runs/finetune" in command:
        job = job_of(model)
        trained_and_saved(job_mesh(job, 0, torch.device("cpu")), job, folder / "run")
        command = command.replace("runs/finetune", str(folder / "run")).replace("./tuned", str(folder / "tuned"))
    if "generate" in command:
        command += " --tokens 2"
    return shlex.split(command.replace("./Qwen3-0.6B", str(model)).replace("./tuned", str(model)))


def of(program: str) -> list[str]:
    return [command for command in COMMANDS if (command.split()[0] == "shardwright") == (program == "shardwright")]


@pytest.mark.parametrize("command", of("others"))
def test_command_of_another_program(command: str, tmp_path: Path) -> None:
    """The script that is installed as `shardwright` is run by make, and here and below."""
    words = shortened(command, tmp_path)
    if not words[0].startswith("make"):
        words[0] = str(BIN / words[0])
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    assert command == "make test" or "examples/" in command or "step 3/3" in done.stdout


@pytest.mark.parametrize("command", of("shardwright"))
def test_command(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has loaded all that it takes; its ranks are processes of their own."""
    words = shortened(command, tmp_path)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        shardwright.cli.main.main()
    out, err = capfd.readouterr()
    assert not ended.value.code, out + err
    if words[1] == "train":  # its rank 0 prints, whose output is not caught here
        assert '"step": 3' in (tmp_path / "metrics.jsonl").read_text()
    else:
        assert out
    if words[1:3] == ["train", "quickstart-moe"]:
        assert f"how experts were used: {tmp_path / 'experts.svg'}" in out
        assert "steps 1 to 3" in (tmp_path / "experts.svg").read_text()


def test_make_test_runs_the_whole_suite() -> None:
    done = subprocess.run(shortened("make test", ROOT), cwd=ROOT, capture_output=True, text=True, check=True)
    for part in ("ruff check", "ruff format --check", "mypy", "lint-imports", "pytest"):
        assert part in done.stdout
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_make_train_runs_a_command_of_the_readme() -> None:
    words = ["make", "-n", "-o", f"{BIN.parent}/installed", f"VENV={BIN.parent}", "train"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert MADE in SHOWN
    assert f"{BIN}/{MADE}" in [line.strip() for line in done.stdout.splitlines()]


def test_published_runs_are_validated_as_the_readme_says() -> None:
    assert PUBLISHED in SHOWN


def test_torchrun_starts_the_ranks_of_the_job() -> None:
    assert OF_EIGHT in SHOWN
    assert load("quickstart", ()).plan.world == 8


def test_make_help_lists_the_targets() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {line.split()[0] for line in done.stdout.splitlines()} >= {"train", "test", "lint", "install", "clean"}


def test_job_in_the_readme_is_the_file() -> None:
    assert blocks("toml") == [(ROOT / "docs" / "job.toml").read_text(encoding="utf-8")]


def test_message_in_the_readme_is_what_is_printed() -> None:
    (shown,) = blocks("text")
    command = [str(BIN / "shardwright"), "train", "quickstart", "--set", "plan.tp=3"]
    fitting = ["--set", "model.ffn=354", "--set", "plan.sequence_parallel=false"]
    done = subprocess.run(command + fitting, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == shown


def test_folders_in_the_readme_exist() -> None:
    for path in re.findall(r"`((?:src|tests|benchmarks|docs)/[\w./]+)`", README):
        assert (ROOT / path).exists(), path


def test_every_model_of_the_catalog_is_named() -> None:
    models = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for name in catalog.names("models"):
        assert f"`{name}`" in models, name


def test_the_readme_is_short() -> None:
    assert README.count("\n") < 150
