"""Shell scripts drawn at random, followed and run by bash: what is followed has the values of bash, or is asked for.

python tests/fuzz/shell_scripts.py [--seed N] [--count N] [--forms]

One in ten is read as a job of Megatron-LM, too: with status 0, its degrees and batch are those of bash. --forms draws
each form alone, and lists those that are asked for.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).parents[1])

from fuzz.draw_scripts import FORMS, ScriptDraw
from shardwright.config.base import PlanError
from shardwright.interchange.foreign_job import job_of_texts
from shardwright.interchange.imported import Asked
from shardwright.interchange.reading.shell_marks import unknown_names
from shardwright.interchange.reading.shell_script import Script
from shardwright.interchange.reading.shell_values import Variables
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.system import SOURCES

_FLAGS = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--micro-batch-size", "--global-batch-size")
_SHOWN = (
    "exec 3>&1 >/dev/null 2>/dev/null\nrun() { printf '%s\\0' \"$@\" >&3; printf '\\n\\0' >&3; }\n"
    'torchrun() { run "$@"; }\n'
)


def words_of_bash(text: str, folder: Path) -> list[list[str]] | None:
    """The words of each command `run` by bash; None if it stops before its end."""
    bash = shutil.which("bash")
    assert bash
    (folder / "main.sh").write_text(_SHOWN + text, encoding="utf-8")
    variables = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run([bash, "main.sh"], capture_output=True, check=False, timeout=3, cwd=folder, env=variables)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for file in folder.iterdir():
            file.unlink()
    if done.returncode:
        return None
    commands: list[list[str]] = [[]]
    for word in done.stdout.decode().split("\0")[:-1]:
        if word == "\n":
            commands.append([])
        else:
            commands[-1].append(word)
    return commands[:-1]


def words_followed(text: str) -> list[list[str]] | None:
    """The words of each command `run` by what is followed; None if one of them is asked for, or the script refused."""
    script = Script(Variables())
    try:
        script.follow(text)
    except ShellFault:
        return None
    commands = [command.words[1:] for command in script.commands if command.words[0] == "run"]
    return None if any(unknown_names(word) for words in commands for word in words) else commands


def way_of(text: str, folder: Path) -> tuple[str, str]:
    """How a script is read, "as bash", "asked" or "otherwise", with the difference."""
    followed = words_followed(text)
    if followed is None:
        return "asked", ""
    wanted = words_of_bash(text, folder)
    if wanted is None:
        return "stopped", ""
    return ("as bash", "") if followed == wanted else ("otherwise", f"{text}\nbash: {wanted}\nhere: {followed}\n")


def way_of_job(text: str, folder: Path) -> tuple[str, str]:
    """How a script is read as a job of Megatron-LM: "the job of bash", "refused" or "otherwise" with the difference."""
    try:
        job = job_of_texts(SOURCES["megatron"], {"run.sh": text}, Asked(), "a script").job
    except PlanError:
        return "refused", ""
    wanted = words_of_bash(text, folder)
    if not wanted:
        return "stopped", ""
    words = wanted[-1]
    values = [int(words[words.index(flag) + 1]) for flag in _FLAGS]
    plan = job.plan
    degrees = [plan.tp, plan.pp, plan.microbatch_size, job.batch.global_batch_size]
    if degrees == values:
        return "the job of bash", ""
    return ("otherwise", f"{text}\nbash: {values}\nhere: {degrees}\n")


def read_of_seed(seed: int, count: int) -> tuple[Counter[str], list[str]]:
    """How many of so many drawn scripts were read in each way, and what is wrong."""
    random, ways, faults = Random(seed), Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            draw, length = ScriptDraw(random), random.randint(1, 6)
            if number % 10 == 9:
                way, difference = way_of_job(draw.training_script(length), Path(folder))
            else:
                way, difference = way_of(draw.script(length), Path(folder))
            ways[way] += 1
            faults += [difference] if difference else []
    return ways, faults


def ways_of_forms(seed: int, count: int) -> dict[str, Counter[str]]:
    """How each form was read in so many scripts that have it alone."""
    random = Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        return {
            f"{kind}: {form}": Counter(
                way_of(ScriptDraw(random).script_of(kind, form), Path(folder))[0] for _ in range(count)
            )
            for kind, forms in FORMS.items()
            for form in forms
        }


def main() -> int:
    """Draw scripts. 1 if one is read otherwise than bash does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--forms", action="store_true", help="draw each form alone, and list those not read as by bash")
    options = parser.parse_args()
    if options.forms:
        for form, ways in ways_of_forms(options.seed, options.count).items():
            if set(ways) != {"as bash"}:
                print(dict(ways), form.replace("\n", "\\n"))
        return 0
    ways, faults = read_of_seed(options.seed, options.count)
    print("\n".join(faults), dict(ways))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
