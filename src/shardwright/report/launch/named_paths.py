"""Files and folders that a job names, which have to be there where its ranks run."""

from collections.abc import Iterator
from pathlib import Path

from shardwright.config.job import JobSpec


def read_paths(job: JobSpec) -> dict[str, list[str]]:
    """The paths that a run reads, by field: words that name no path, such as `bytes`, are left out."""
    named = {
        "model.weights": [job.model.weights],
        "data.path": [data.path for data in (*job.data.each, *job.data.each_validation)],
        "data.tokenizer": [job.data.tokenizer],
        "data.chat_template": [job.data.chat_template],
        "cluster.device": [job.cluster.device],
        "cluster.software": [job.cluster.software],
    }
    paths = {field: [value for value in values if _is_path(value)] for field, values in named.items()}
    return {field: values for field, values in paths.items() if values}


def written_paths(job: JobSpec) -> dict[str, list[str]]:
    """The paths to which a run writes, by field."""
    named = {"run.folder": job.run.folder, "checkpoint.path": job.checkpoint.path, "data.cache": job.data.cache}
    return {field: [value] for field, value in named.items() if _is_path(value)}


def folders_elsewhere(job: JobSpec) -> Iterator[str]:
    """Folders with absolute names that a run reads in, and then those that it writes to."""
    for values in read_paths(job).values():
        for value in values:
            before, is_glob, _ = value.partition("*")
            is_folder = before.endswith("/") if is_glob else Path(before).is_dir()
            yield from _absolute(before.rstrip("/") or "/" if is_folder else str(Path(before).parent))
    yield from folders_written(job)


def folders_written(job: JobSpec) -> list[str]:
    """Folders with absolute names that a run writes to."""
    return [value for values in written_paths(job).values() for value in _absolute(*values)]


def _is_path(value: str) -> bool:
    return "/" in value or value.endswith((".toml", ".json"))


def _absolute(*folders: str) -> Iterator[str]:
    return (folder for folder in folders if folder.startswith("/"))
