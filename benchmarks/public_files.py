"""Whole public configurations of other trainers, read as they are: how many are read, told, asked about, refused.

    python benchmarks/public_files.py CLONES          # git repositories as CLONES/OWNER+NAME/repo
    python benchmarks/public_files.py CLONES --faults # with each fault that no reason explains

A file counts as read if all that it says is in the job or without effect, as told if a line says what is not, as asked
if it leaves something to the user (the model's config.json, the vocabulary, a file that it names, GPUs), and as refused
with a reason if it trains what is not counted (adapters, preferences, state spaces, other programs) or does not divide.
Any other file was refused without one of these reasons, and has a setting that is not known.
"""

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError
from shardwright.interchange.foreign_job import read_job_of
from shardwright.interchange.imported import Asked, split_sets
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.python_source import source_of_text
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.system import SOURCES

LLAMA = (
    '{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, '
    '"num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "rms_norm_eps": 1e-05, '
    '"rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": false}'
)
KINDS = ("read", "told", "asked", "refused with a reason", "refused without", "crashed")


@dataclass(frozen=True)
class Collection:
    """Files of a repository by a pattern, on the first number of devices on which they are legal. `model` names a
    config.json for those that name a model, `beside` is a folder of files that others name, `sets` are for --set."""

    system: str
    repository: str
    pattern: str
    devices: tuple[int, ...] = (0,)
    model: bool = False
    beside: str = ""
    sets: tuple[str, ...] = ()
    device: str = "h100-sxm"


SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
COLLECTIONS = (
    Collection("axolotl", "axolotl-ai-cloud/axolotl", r"examples/.*\.ya?ml", (8,), True, "deepspeed_configs"),
    Collection("llamafactory", "hiyouga/LLaMA-Factory", r"examples/(?!deepspeed|accelerate).*\.yaml", (8,), True,
               "examples/deepspeed"),
    Collection("trl", "huggingface/alignment-handbook", r"recipes/.*/(sft|dpo|orpo)/.*\.yaml", (8,), True),
    Collection("trl", "huggingface/open-r1", r"recipes/(?!accelerate).*\.yaml", (8,), True),
    Collection("ms-swift", "modelscope/ms-swift", r"examples/.*megatron/.*\.sh", model=True),
    Collection("primus", "AMD-AGI/Primus", r"examples/megatron/configs/(MI300X|MI355X)/[^/]*\.yaml", SIZES,
               device="mi300x"),
    Collection("flagscale", "FlagOpen/FlagScale", r"examples/.*/conf/train/.*\.yaml", SIZES),
    Collection("gpt-neox", "EleutherAI/gpt-neox", r"configs/.*\.yml", SIZES, sets=("model.vocab=50432",)),
    Collection("nanotron", "huggingface/nanotron", r"examples/.*\.yaml"),
    Collection("picotron", "huggingface/picotron", r"template/.*\.json", model=True),
    Collection("megatron-bridge", "NVIDIA-NeMo/Megatron-Bridge", r"src/megatron/bridge/recipes/.*/h100/.*\.py"),
)  # fmt: skip

_ASKED = re.compile(
    "|".join((
        "name it too", r"config\.json", "--devices", "number of tokens", "name their file", "name the file of",
        "is not in the catalog", "nothing says what the model", "nothing names the recipe",
        "which is none of the files",
        "name the files of what it calls", "it should be a number", "spreads experts",
        "no file has options", "no command in it trains", "say what it is: --set", "name its file",
    ))
)  # fmt: skip
_REASONS = re.compile(
    "|".join((
        "adapters", "preferences", "rewards", "decoders", "trains nothing", "can't be said here", "does not split",
        "is not counted here", "share one replica", "Sinkhorn", "attention to all", "are not read",
        "follow no rule", "modules that train", "trains with", "are read for", "tasks that train", "not divide",
        "schedules of Primus", "none of is_llama", "this recipe of fp8", "linear_attention", "hybrid", "gated_delta",
        "mrope", "patch_dim", "hetero_", "doremi", "mamba", "rope_type", "its task", "the file is of this system",
        "apollo", "badam", "galore", "lisa_", "pure_bf16", "freezes them",
    ))
)  # fmt: skip


def outcome(system: str, paths: list[str], asked: Asked, sizes: Sequence[int]) -> tuple[str, list[str]]:
    """(one of KINDS, the faults), on the first number of devices on which the job is legal, else on the first."""
    outcomes = [_outcome(system, paths, replace(asked, cluster=replace(asked.cluster, devices=size))) for size in sizes]
    return next((result for result in outcomes if result[0] in KINDS[:2]), outcomes[0])


def _outcome(system: str, paths: list[str], asked: Asked) -> tuple[str, list[str]]:
    try:
        job = read_job_of(SOURCES[system], tuple(paths), asked)
    except PlanError as error:
        if all(_ASKED.search(fault) or _REASONS.search(fault) for fault in error.faults):
            is_reason = any(_REASONS.search(fault) for fault in error.faults)
            return ("refused with a reason" if is_reason else "asked"), error.faults
        if any(_REASONS.search(fault) or _ASKED.search(fault) for fault in error.faults):
            return "refused with a reason", error.faults
        return "refused without", error.faults
    except Exception as error:
        return "crashed", [f"{type(error).__name__}: {error}"]
    return ("told" if job.lost or job.unknown else "read"), []


def cases(collection: Collection, folder: Path) -> Iterator[tuple[str, list[str], Asked]]:
    """(name, paths, input) of each file; of each function of a file of recipes."""
    cluster = AskedCluster(0, collection.device)
    model = folder / "model/config.json"
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or not re.fullmatch(collection.pattern, name):
            continue
        paths = [str(path), *_named(path, folder / collection.beside)] if collection.beside else [str(path)]
        paths += [str(model)] if collection.model else []
        variables, overrides = split_sets(collection.sets)
        if path.suffix != ".py":
            yield name, paths, Asked(variables, overrides, cluster)
            continue
        functions = source_of_text(name, path.read_text(encoding="utf-8")).functions
        for function in [function for function in functions if function.endswith("_config") and function[0] != "_"]:
            yield f"{name}:{function}", paths, Asked({"CONFIG": function}, overrides, cluster)


def _named(path: Path, folder: Path) -> list[str]:
    """The file that a configuration names as its deepspeed, if the folder has it."""
    try:
        named = read_data(path.name, path.read_text(encoding="utf-8")).get("deepspeed")
    except ShellFault:
        return []
    file = folder / Path(str(named)).name
    return [str(file)] if named and file.is_file() else []


def extracted(repository: Path, folder: Path) -> None:
    """Write the small configurations, scripts and Python files of a git repository's newest commit into a folder."""
    git = ["git", "--git-dir", str(repository)]
    listing = subprocess.run([*git, "ls-tree", "-r", "-l", "HEAD"], capture_output=True, text=True, check=True).stdout
    for line in listing.splitlines():
        words, _, name = line.partition("\t")
        size = words.split()[3]
        if name.endswith((".yaml", ".yml", ".json", ".sh", ".py")) and size.isdigit() and int(size) < 1 << 18:
            blob = subprocess.run([*git, "cat-file", "blob", words.split()[2]], capture_output=True, check=False)
            if blob.returncode == 0:
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(blob.stdout)


def main() -> int:
    """Print a table. 1 if a file crashed a reader."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--read", action="store_true", help="the files that are read, with what the job has")
    options = parser.parse_args()
    totals: Counter[str] = Counter()
    print(f"| system | files | {' | '.join(KINDS)} |")
    for collection in COLLECTIONS:
        with TemporaryDirectory() as name:
            folder = Path(name)
            extracted(options.clones / collection.repository.replace("/", "+") / "repo", folder)
            (folder / "model").mkdir(exist_ok=True)
            (folder / "model/config.json").write_text(LLAMA, encoding="utf-8")
            counts: Counter[str] = Counter()
            for case, paths, asked in cases(collection, folder):
                kind, faults = outcome(collection.system, paths, asked, collection.devices)
                counts[kind] += 1
                if options.faults and kind in ("refused without", "crashed"):
                    print(f"  {case}: {'; '.join(faults)[:300]}")
        totals += counts
        print(f"| {collection.system} ({collection.repository}) | {counts.total()} | "
              f"{' | '.join(str(counts[kind]) for kind in KINDS)} |", flush=True)  # fmt: skip
    print(f"| all | {totals.total()} | {' | '.join(str(totals[kind]) for kind in KINDS)} |")
    return int(totals["crashed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
