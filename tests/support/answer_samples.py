"""Samples of what commands answer with --json, and the schemas that are made of them, which `make schemas` writes.

{run} is the folder of a run of a model with experts, which has two checkpoints.
"""

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwright.cli import answer_schemas
from shardwright.cli.main import cli
from shardwright.report.answer_schema import answer_schema

ROOT = Path(__file__).parents[2]
SCHEMAS = Path(answer_schemas.__file__).parent / "schemas"
_H100 = "--set cluster.device=h100-sxm"
_RUN = (
    "train quickstart-moe --set optimizer.steps=4 --set checkpoint.every_steps=2 --set plan.tp=1 --set plan.pp=2 "
    "--set plan.dp=1 --set plan.ep=1 --set run.folder={run} --set data.path={text}"
)
SAMPLES: dict[str, list[str]] = {
    "plan": [
        "plan llama3-8b --devices 8 --device h100-sxm --top 2",
        "plan quickstart-moe --devices 8 --device h100-sxm --top 2",
        "plan tiny-llama --devices 2 --device h100-sxm --objective cost --top 2",
    ],
    "estimate": [
        "estimate llama3-8b --devices 64 --device h100-sxm",
        "estimate llama3-8b --devices 64 --device h100-sxm --beside",
        "estimate llama3-8b --devices 8 --device h100-sxm --set plan.tp=8 --set batch.global_batch_size=8",
        "estimate quickstart",
        "estimate tiny-llama --devices 1 --device h100-sxm --set model.adapter.rank=4",
        "estimate gpt3-175b-1024",
        "estimate gpt3-175b-1024 --set plan.tp=1 --set plan.dp=64",
    ],
    "explain": [
        "explain quickstart",
        f"explain quickstart-moe {_H100}",
        "explain llama3-8b --devices 64 --device h100-sxm",
    ],
    "scale": [
        "scale tiny-llama --devices 8,16 --device h100-sxm",
        "scale tiny-llama --devices 1 --device h100-sxm --memory-gib 4",
    ],
    "compare": [
        "compare tiny-llama --on h100-sxm:8 --on a100-sxm-80g:8",
        "compare tiny-llama --on h100-sxm:1@2.50 --on mi300x:2",
    ],
    "simulate": ["simulate quickstart", f"simulate quickstart-moe {_H100}"],
    "schedule": ["schedule zb-h1", "schedule 1f1b --recompute --gather 0.1"],
    "layout": [f"layout quickstart {_H100}", "layout gemma2-27b-tpu"],
    "validate": ["validate benchmarks/truth/runs-2026.csv", "validate benchmarks/truth/playbook-memory.csv"],
    "dryrun": ["dryrun quickstart", "dryrun quickstart-moe"],
    "collective": ["collective all-reduce --ranks 4", "collective all-to-all --ranks 8 --device h100-sxm"],
    "models": ["models"],
    "devices": ["devices"],
    "clusters": ["clusters"],
    "schedules": ["schedules"],
    "software": ["software"],
    "fields": ["fields", "fields plan"],
    "check": ["check docs/job.toml docs/pretrain.sh"],
    "import": ["import megatron docs/pretrain.sh"],
    "export": ["export gpt3-175b-1024 --to megatron"],
    "train": [_RUN, _RUN + " --set optimizer.steps=5"],
    "verify": ["verify quickstart --steps 1 --set plan.tp=1 --set plan.dp=1"],
    "generate": ["generate {run} --tokens 4"],
    "experts": ["experts {run}"],
    "report": ["report {run}"],
    "runs": ["runs {run}"],
    "top": ["top {run}"],
    "checkpoint ls": ["checkpoint ls {run}"],
    "checkpoint show": ["checkpoint show {run}"],
    "checkpoint verify": ["checkpoint verify {run}"],
}


def answer_of(words: str, **places: str) -> Any:
    """The answer of a command with --json, run in the project's folder."""
    command = [sys.executable, "-m", "shardwright", *shlex.split(words.format(**places)), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if not done.stdout:
        raise RuntimeError(f"{words}: {done.stderr}")
    return json.loads(done.stdout)


def made_schemas(names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema of each of these commands, by its name."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text("one two three four five six seven eight nine ten\n" * 400, encoding="utf-8")
        answer_of(_RUN, run=f"{folder}/run", text=str(text))
        for name in names:
            answers = [answer_of(words, run=f"{folder}/run", text=str(text)) for words in SAMPLES[name]]
            yield name, answer_schema(f"shardwright {name} --json", _purpose(name), answers)


def _purpose(name: str) -> str:
    command: Any = cli
    for word in name.split():
        command = command.commands[word]
    return str(command.get_short_help_str(200))


if __name__ == "__main__":
    for command_name, made in made_schemas(sys.argv[1:] or list(SAMPLES)):
        file = SCHEMAS / f"{command_name.replace(' ', '-')}.json"
        file.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        print(file, flush=True)
