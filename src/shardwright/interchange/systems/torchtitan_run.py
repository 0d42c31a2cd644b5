"""Lines of torchtitan's configuration that a run needs beside its plan: the data, the tokenizer, the seed, and
checkpoints."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.config.base import PlanError
from shardwright.config.data import DataSpec
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.interchange.run_places import (
    checkpoint_faults,
    checkpoint_place,
    is_address,
    steps_between_checkpoints,
)

_TITLE = "torchtitan"
_BUILDERS = {"jsonl": "json", "parquet": "parquet", "arrow": "arrow"}  # formats of text that its data loader reads
_ENDINGS = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
_PACKED = (".gz", ".zst")
_LEAST_KEPT = 2  # checkpoints, of which one may be in the making
_TEXTS = "torchtitan.hf_datasets.text_datasets"


@dataclass(frozen=True)
class RunLines:
    """Lines of a configuration for a run: those of arguments of Trainer.Config, statements before its function, and
    the modules of further names, some of which have a name of their own there."""

    arguments: tuple[str, ...]
    statements: tuple[str, ...]
    imports: Mapping[str, str]


Written = Callable[[Any], str]  # a value as Python source


def run_lines(job: JobSpec, folder: Path, step_s: float, written: Written) -> RunLines:
    """The lines of a job's data and checkpoints, whose paths are from a folder, and whose step takes `step_s`; 0 if
    that is unknown. PlanError with every fault."""
    if faults := [*_faults(job, step_s), *(fault for data in job.data.each for fault in _data_faults(data))]:
        raise PlanError(say("job {name} for {system}", name=job.name, system=_TITLE), faults)
    arguments = [
        "# All rows are trained on, and none is held out.",
        f"hf_assets_path={written(_from(folder, job.data.tokenizer))},",
        *_loader_lines(job, written),
        f"metrics=MetricsProcessor.Config(log_freq={written(job.run.log_every)}),",
        f"debug=DebugConfig(seed={written(job.run.seed)}),",
        *_checkpoint_lines(job, folder, step_s, written),
    ]
    statements = [
        line for number, data in enumerate(job.data.each) for line in _dataset_lines(number, data, folder, written)
    ]
    return RunLines(tuple(arguments), tuple(statements), _IMPORTS)


_IMPORTS = {
    "CheckpointManager": "torchtitan.components.checkpoint",
    "DATASETS": _TEXTS,
    "DatasetConfig": "torchtitan.hf_datasets",
    "DebugConfig": "torchtitan.config",
    "HFDataSource": _TEXTS,
    "InterleavedHuggingFaceTextDataLoader": _TEXTS,
    "MetricsProcessor": "torchtitan.components.metrics",
    "load_dataset": "datasets",
}


def _faults(job: JobSpec, step_s: float) -> list[str]:
    """The faults of a job apart from those of its sources of text."""
    unsaid = (
        ("data.separate_documents", job.data.separate_documents),
        ("data.validation", bool(job.data.validation)),
        ("data.validation_share", bool(job.data.validation_share) and "validation_share" in job.data.model_fields_set),
        ("checkpoint.keep_best", bool(job.checkpoint.keep_best)),
    )
    faults: list[str] = [
        say("{field} can't be said for {system}; leave it out", field=field, system=_TITLE)
        for field, is_set in unsaid
        if is_set
    ]
    if job.data.tokenizer == "bytes":
        faults.append(
            say(
                "torchtitan turns text into tokens by a tokenizer of the Hub, and data.tokenizer is {tokenizer}; set "
                "it to the folder that has the model's tokenizer.json",
                tokenizer=repr(job.data.tokenizer),
            )
        )
    return faults + checkpoint_faults(job, _TITLE, step_s)


def _data_faults(data: DataSpec) -> list[str]:
    """The fault of data that torchtitan's loader of text does not read."""
    if data.chats:
        return [say("{field} can't be said for {system}; leave it out", field="data.chats", system=_TITLE)]
    if is_address(data.path):
        return [
            say(
                "{system} reads files of text, and {path} is an address; copy them into a folder that all nodes see, "
                "and set data.path to it",
                system=_TITLE,
                path=data.path,
            )
        ]
    if _format(data) in _BUILDERS:
        return []
    return [
        say(
            "torchtitan reads rows of text in JSONL, parquet or Arrow files, and {path} is not known to be of these; "
            "set data.path to such files, and data.format=jsonl (or parquet, arrow) where their names don't say it",
            path=repr(data.path),
        )
    ]


def _format(data: DataSpec) -> str:
    """The format of files, by their ending where it is not said."""
    if data.format != "auto":
        return data.format
    name = Path(data.path)
    return _ENDINGS.get(Path(name.stem).suffix if name.suffix in _PACKED else name.suffix, "auto")


def _from(folder: Path, path: str) -> str:
    return os.path.normpath(folder / os.path.expanduser(path))


def _name(number: int) -> str:
    return f"job-{number}"


def _dataset_lines(number: int, data: DataSpec, folder: Path, written: Written) -> list[str]:
    """The statement that makes a source of text known to torchtitan under a name."""
    is_folder = not any(sign in data.path for sign in "*?[") and not Path(data.path).suffix
    place, split = f"{'data_dir' if is_folder else 'data_files'}=path", data.split if is_folder else "train"
    builder = written(_BUILDERS[_format(data)])
    return [
        f"DATASETS[{written(_name(number))}] = DatasetConfig(",
        f"    path={written(_from(folder, data.path))},",
        f"    loader=lambda path: load_dataset({builder}, {place}, split={written(split)}, streaming=True),",
        f"    sample_processor=lambda sample: sample[{written(data.text_field)}],",
        ")",
    ]


def _loader_lines(job: JobSpec, written: Written) -> list[str]:
    if not job.data.sources:
        return [f"dataloader=HuggingFaceTextDataLoader.Config(dataset={written(_name(0))}),"]
    return [
        "dataloader=InterleavedHuggingFaceTextDataLoader.Config(",
        "    sources=[",
        *(
            f"        HFDataSource(dataset={written(_name(number))}, weight={written(source.weight)}),"
            for number, source in enumerate(job.data.sources)
        ),
        "    ],",
        f"    seed={written(job.run.seed)},",
        "),",
    ]


def _checkpoint_lines(job: JobSpec, folder: Path, step_s: float, written: Written) -> list[str]:
    if not job.checkpoint.is_on:
        return []
    return [
        "checkpoint=CheckpointManager.Config(",
        "    enable=True,",
        f"    folder={written(checkpoint_place(job, folder, _TITLE))},",
        f"    interval={written(steps_between_checkpoints(job, step_s))},",
        f"    keep_latest_k={written(max(_LEAST_KEPT, job.checkpoint.keep_last))},",
        "),",
    ]
