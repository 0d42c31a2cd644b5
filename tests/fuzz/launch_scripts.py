"""Launch scripts drawn at random, whose right reading is known by how they are made: with status 0 a job has the plan,
the batch and the length of the command that trains last, and of the files that this one names.

python tests/fuzz/launch_scripts.py [--seed N] [--count N]

Ordinary scripts are drawn, so few are refused. Each has one to three training commands, programs that do not train, and
files of DeepSpeed's, of Accelerate's and of options, beside the script or below another folder. Some take a size from a
variable that nobody sets, which is asked for, and which gives the job that is meant once the user says it.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from random import Random

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).parents[1])

from shardwright.api.imported_job import system_and_files
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.interchange.foreign_job import read_job_of
from shardwright.interchange.imported import Asked
from shardwright.interchange.system import SOURCES

_MODELS = {
    "Qwen/Qwen3-8B": "qwen3-8b",
    "/data/models/Qwen3-8B": "qwen3-8b",
    "${HUB:-/hub}/Meta-Llama-3-8B": "llama3-8b",
    "meta-llama/Llama-3.2-3B": "llama3.2-3b",
    "$MODEL": "qwen3-8b",
}
_FOLDERS = ("", "conf/", "../shared/", "below/")  # of a configuration, from the script; "below/" is one that it goes to
_LENGTHS = ("--max_seq_length", "--max_length", "--model_max_length", "--block_size")
_IDLE = (
    "python merge.py --base out --micro_batch_size 9",
    "python tools/eval.py --per_device_train_batch_size 9 --deepspeed never.json",
    "# deepspeed train.py --per_device_train_batch_size 9 --deepspeed never.json",
    "if false; then\n  deepspeed train.py --per_device_train_batch_size 9 --deepspeed never.json\nfi",
    "unused() {\n  deepspeed train.py --per_device_train_batch_size 9 --deepspeed never.json\n}",
    "echo deepspeed train.py --per_device_train_batch_size 9",
)
_DEEPSPEED, _ACCELERATE, _BY_ACCELERATE = "deepspeed", "accelerate", "accelerate with deepspeed"
# How a script names a configuration: lines before the command, and the word for it.
_NAMINGS = (
    ("", "{name}"),
    ("CONF={name}\n", "$CONF"),
    ("CONF=never.json\nCONF={name}\n", '"${{CONF}}"'),
    ("CONF=${{1:-{name}}}\n", "$CONF"),
    ("STAGE=z{number}\n", "{folder}${{STAGE}}{suffix}"),
    ("for CONF in never.json {name}; do : $CONF; done\n", "$CONF"),
    ("CONFS=({name} never.json)\n", '"${{CONFS[0]}}"'),
    ("pick() {{ echo {name}; }}\nCONF=$(pick)\n", "$CONF"),
    ("if [ 1 -gt 2 ]; then CONF=never.json; else CONF={name}; fi\n", "$CONF"),
    ("source ../set{number}.sh\n", "$CONF"),
    ('source "$(dirname "$0")/../set{number}.sh"\n', "$CONF"),
)


@dataclass
class Drawn:
    """A script in a folder: the folder, and what a job of it has."""

    script: Path
    wanted: dict[str, int | str] = field(default_factory=dict)
    others: tuple[str, ...] = ()  # files that the user names behind it
    unset: dict[str, str] = field(default_factory=dict)  # variables that nobody sets, with the values that are meant


def draw_script(rng: Random, folder: Path) -> Drawn:
    """A script, written with its files below a folder, with the job of its last command."""
    place = folder / "repo/jobs"
    place.mkdir(parents=True)
    lines = ["#!/bin/bash", *_batch_lines(rng), "MODEL=Qwen/Qwen3-8B"]
    wanted: dict[str, int | str] = {}
    unset: dict[str, str] = {}
    entered = False
    for number in range(rng.choice([1, 1, 2, 3])):
        lines += rng.sample(_IDLE, rng.choice([0, 0, 1, 2]))
        where = rng.choice(_FOLDERS)
        if where == "below/" and not entered:
            entered = True
            lines.append("cd /home/someone/repo/engine")
        command, wanted = _command(rng, place, "" if where == "below/" and entered else where, number, entered)
        unset = {}
        if rng.random() < 0.2:
            command, unset = _with_variable(rng, command, number)
        lines.append(command)
    lines += rng.sample(_IDLE, rng.choice([0, 0, 1]))
    script = place / "run.sh"
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = sorted(path for path in folder.rglob("[yz]*.*") if path.suffix in (".json", ".yaml"))
    return Drawn(script, wanted, tuple(map(str, files)) if rng.random() < 0.3 else (), unset)


def _with_variable(rng: Random, command: str, number: int) -> tuple[str, dict[str, str]]:
    """A command that takes a size from a variable that nobody sets, and the variable with the size."""
    option = rng.choice(["--per_device_train_batch_size", "--gradient_accumulation_steps", *_LENGTHS])
    name = f"SIZE_{number}"
    match = re.search(rf"{option} (\d+)", command)
    return (command.replace(match[0], f"{option} ${name}"), {name: match[1]}) if match else (command, {})


def _batch_lines(rng: Random) -> list[str]:
    """Lines of a batch system whose tasks nothing starts."""
    lines = [
        [],
        ["#SBATCH --nodes=1", "#SBATCH --gres=gpu:8"],
        ['#SBATCH --gres="gpu:a100:4"', "#SBATCH --ntasks=16"],
        ["#SBATCH --ntasks-per-node=4", "#SBATCH --gpus-per-node=2"],
    ]
    return rng.choice(lines)


def _command(rng: Random, place: Path, where: str, number: int, entered: bool) -> tuple[str, dict[str, int | str]]:
    """A training command, with its files written, and what its job has. `where` is the folder of its configuration,
    below the one that the script has `entered`, if it has."""
    devices, micro, steps = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 3]), rng.choice([1, 4])
    length, path = rng.choice([512, 2048]), rng.choice([*_MODELS])
    engine, zero = rng.choice(["", _DEEPSPEED, _DEEPSPEED, _ACCELERATE, _BY_ACCELERATE]), 0
    flags, launcher = "", f"torchrun --nproc_per_node={devices}"
    before, word = "", ""
    if engine:
        zero = 3 if engine == _ACCELERATE else rng.choice([1, 2, 3])
        name = f"{where}z{number}{'.json' if engine == _DEEPSPEED else '.yaml'}"
        above = place.parent / "engine" if entered and "../" not in name else place
        file = Path(os.path.normpath(above / name))
        file.parent.mkdir(parents=True, exist_ok=True)
        inner = name.replace("z", "y", 1).replace(".yaml", ".json")
        parts = {"name": name, "number": number, "folder": where, "suffix": file.suffix}
        before, word = (text.format(**parts) for text in rng.choice(_NAMINGS))
        (place.parent / f"set{number}.sh").write_text(f"CONF={name}\n", encoding="utf-8")
        if engine == _DEEPSPEED:
            file.write_text(json.dumps(_deepspeed(rng, zero)), encoding="utf-8")
            flags = f" --deepspeed {word}"
            numbers = ",".join(map(str, range(devices)))
            launcher = rng.choice([launcher, f"deepspeed --num_gpus {devices}", f"deepspeed -i localhost:{numbers}"])
        else:
            launcher = f"accelerate launch --config_file {word}"
            text = f"num_processes: {devices}\nnum_machines: 1\n"
            if engine == _ACCELERATE:
                text += "distributed_type: FSDP\nmixed_precision: bf16\n"
                text += "fsdp_config: {fsdp_sharding_strategy: FULL_SHARD}\n"
            else:
                text += f"distributed_type: DEEPSPEED\ndeepspeed_config: {{deepspeed_config_file: {inner}}}\n"
                file.with_name(PurePath(inner).name).write_text(json.dumps(_deepspeed(rng, zero)), encoding="utf-8")
            file.write_text(text, encoding="utf-8")
    words = [f"--model_name_or_path {path}", f"--per_device_train_batch_size {micro}", "--bf16 True"]
    words += [f"{rng.choice(_LENGTHS)} {length}", f"--gradient_accumulation_steps {steps}", f"--output_dir out{number}"]
    if rng.random() < 0.3:
        data = place / "letters.json"
        data.write_text('[{"text": "a letter"}]', encoding="utf-8")
        words.append("--train_file letters.json")
    rng.shuffle(words)
    joint = rng.choice([" ", " \\\n  "])
    runner = rng.choice(["", "", "", "conda run -n own ", "nohup "])
    command = f"{before}{runner}{launcher} train.py{flags}{joint}{joint.join(words)}"
    return command, {
        "model": _MODELS[path], "dp": devices, "zero": zero, "micro": micro,
        "batch": devices * micro * steps, "sequence": length,
    }  # fmt: skip


def _deepspeed(rng: Random, zero: int) -> dict[str, object]:
    numbers = rng.choice([{"bf16": {"enabled": "auto"}}, {"bf16": {"enabled": True}}])
    batch = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    return {"zero_optimization": {"stage": zero}, **numbers, **rng.choice([{}, batch])}


def way_of(drawn: Drawn) -> tuple[str, str]:
    """How a script is read, "as meant", "refused" or "otherwise", with the difference."""
    text = drawn.script.read_text(encoding="utf-8")
    for name in drawn.unset:
        try:
            _read(drawn, {})
            return "otherwise", f"{text}\nread without a question for {name}\n"
        except PlanError as fault:
            if f"--set {name}=VALUE" not in "\n".join(fault.faults):
                return "refused", f"{text}\n{fault}\n"
    try:
        job = _read(drawn, drawn.unset)
    except PlanError as fault:
        return "refused", f"{text}\n{fault}\n"
    plan = job.plan
    read = {
        "model": job.model.name, "dp": plan.world, "zero": plan.zero, "micro": plan.microbatch_size,
        "batch": job.batch.global_batch_size, "sequence": job.model.sequence,
    }  # fmt: skip
    if plan.world == 1 and drawn.wanted["zero"]:
        read["zero"] = drawn.wanted["zero"]  # one rank shards nothing
    if read == drawn.wanted:
        return "as meant", ""
    return "otherwise", f"{text}\nmeant: {drawn.wanted}\nread: {read}\n"


def _read(drawn: Drawn, variables: dict[str, str]) -> JobSpec:
    """The job of a script, with variables of the user's. Raises PlanError."""
    system, files = system_and_files((str(drawn.script), *drawn.others), "")
    return read_job_of(SOURCES[system], files, Asked(variables)).job


def read_of_seed(seed: int, count: int) -> tuple[Counter[str], list[str], list[str]]:
    """(ways, differences, refusals) of a number of drawn scripts."""
    ways, faults, refusals = Counter[str](), list[str](), list[str]()
    for number in range(count):
        with tempfile.TemporaryDirectory() as folder:
            way, told = way_of(draw_script(Random(f"{seed}:{number}"), Path(folder)))
        ways[way] += 1
        faults += [f"seed {seed}, number {number}:\n{told}"] if way == "otherwise" else []
        refusals += [f"seed {seed}, number {number}:\n{told}"] if way == "refused" else []
    return ways, faults, refusals


def main() -> int:
    """Draw scripts, and show those that are read otherwise than they are meant, or refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=500)
    arguments = parser.parse_args()
    ways, faults, refusals = read_of_seed(arguments.seed, arguments.count)
    print(*faults, *refusals, sep="\n")
    print(dict(ways))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
