"""Public jobs of other systems (public_jobs.toml): what their files say, as files of our own, and as published.

    python tests/interchange/public_jobs.py CLONES     # imports the files themselves, from CLONES/OWNER+NAME/repo

The settings are facts, restated; the files are their authors'.
"""

import json
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).parents[1])

from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.dotted_keys import nested_keys
from shardwright.config.toml_text import value_text
from shardwright.config.yaml_text import yaml_text
from shardwright.interchange.foreign_job import job_of_texts
from shardwright.interchange.imported import Asked, Imported, split_sets
from shardwright.interchange.system import SYSTEMS

# Degrees, as one reads them in the files: dp, tp, pp, cp, ep, ZeRO, microbatch, batch, layers, width.
DEGREES = {
    "megatron-lm-39b-2021": (32, 8, 2, 1, 1, 0, 4, 1536, 48, 8192),
    "bigscience-13b-2022": (64, 2, 4, 1, 1, 1, 1, 1024, 40, 5120),
    "bloom-176b-2022": (8, 4, 12, 1, 1, 1, 2, 2048, 70, 14336),
    "gpt3-175b-2026": (8, 8, 16, 1, 1, 0, 1, 1536, 96, 12288),
    "mixtral-8x7b-2026": (16, 1, 4, 1, 8, 1, 1, 256, 32, 4096),
    "llama3-8b-fp8-2026": (8, 1, 1, 1, 1, 1, 1, 128, 32, 4096),
    "deepseek-v3-fsdp-2026": (512, 1, 1, 1, 8, 3, 4, 2048, 61, 7168),
    "llama3-405b-2024": (16, 8, 1, 1, 1, 3, 2, 32, 126, 16384),
    "deepseek-v3-2025": (2048, 1, 1, 1, 1, 3, 4, 8192, 61, 7168),
    "nemo-gpt3-175b-2024": (32, 4, 8, 1, 1, 1, 1, 2048, 96, 12288),
    "nemo-mixtral-8x7b-2024": (16, 1, 4, 1, 8, 1, 1, 256, 32, 4096),
    "accelerate-tp-hsdp-2025": (4, 2, 1, 1, 1, 3, 1, 4, 32, 4096),
    "zero3-offload-2022": (8, 1, 1, 1, 1, 3, 1, 8, 32, 4096),
    "pipeline-2023": (8, 1, 1, 1, 1, 0, 8, 256, 32, 4096),
}


@cache
def public_jobs() -> dict[str, dict[str, Any]]:
    """All of them by name."""
    text = (Path(__file__).parent / "public_jobs.toml").read_text(encoding="utf-8")
    return {job["name"]: job for job in tomllib.loads(text)["job"]}


def files_of(job: dict[str, Any]) -> dict[str, str]:
    """Files of our own that say what the published ones do."""
    settings = job["settings"]
    if job["system"] == "megatron":
        each = job["devices_per_node"]
        flags = " ".join(_words(name, value) for name, value in settings.items())
        start = f"torchrun --nproc_per_node {each} --nnodes {job['devices'] // each}"
        return {"run.sh": f"{start} pretrain_gpt.py {flags}\n"}
    nested = nested_keys(settings)
    if job["system"] == "torchtitan":
        lines = [line for name, keys in nested.items() for line in (f"[{name}]", *_lines(keys))]
        return {"job.toml": "\n".join(lines) + "\n"}
    return {"config.json": json.dumps(nested)} if job["system"] == "deepspeed" else {"config.yaml": yaml_text(nested)}


def _lines(keys: dict[str, Any]) -> list[str]:
    return [f"{key} = {value_text(value)}" for key, value in keys.items()]


def _words(name: str, value: Any) -> str:
    values = [] if value is True else value if isinstance(value, list) else [value]
    return " ".join([f"--{name}", *(shlex.quote(str(one)) for one in values)])


def import_job(job: dict[str, Any], texts: dict[str, str], is_published: bool = False) -> Imported:
    """A job of texts, on the devices that it is for."""
    variables, overrides = split_sets(tuple(job["sets"]))
    asked = Asked(variables if is_published else {}, overrides, AskedCluster(job["devices"], job["device"]))
    return job_of_texts(SYSTEMS[job["system"]], texts, asked, job["name"])


def degrees_of(imported_job: Imported) -> tuple[int, ...]:
    """The degrees of a job, in the order of DEGREES."""
    plan, model = imported_job.job.plan, imported_job.job.model
    return (plan.dp, plan.tp, plan.pp, plan.cp, plan.ep, plan.zero, plan.microbatch_size,
            imported_job.job.batch.global_batch_size, model.layers, model.hidden)  # fmt: skip


def main(clones: Path) -> int:
    """Import the published files. 1 if one has other degrees."""
    wrong = 0
    for name, job in public_jobs().items():
        folder = clones / job["repository"].replace("/", "+") / "repo"
        show = ["git", "-C", str(folder), "show"]
        texts = {
            path: subprocess.run([*show, f"{job['commit']}:{path}"], capture_output=True, text=True, check=True).stdout
            for path in job["paths"]
        }
        result = degrees_of(import_job(job, texts, is_published=True))
        wrong += result != DEGREES[name]
        print(name, result, "" if result == DEGREES[name] else f"and not {DEGREES[name]}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
