"""Files and folders that a job names and that its ranks need."""

from collections.abc import Iterator
from pathlib import Path

from shardwright.config.job import JobSpec


def read_paths(job: JobSpec) -> dict[str, list[str]]:
    """The paths that a run reads, by field. Words that are no path, such as `bytes`, are left out."""
    values_by_field = {
        "model.weights": [job.model.weights],
        "data.path": [data.path for data in (*job.data.each, *job.data.each_validation)],
        "data.tokenizer": [job.data.tokenizer],
        "data.chat_template": [job.data.chat_template],
        "cluster.device": [job.cluster.device],
        "cluster.software": [job.cluster.software],
    }
    paths = {field: [value for value in values if _is_path(value)] for field, values in values_by_field.items()}
    return {field: values for field, values in paths.items() if values}


def written_paths(job: JobSpec) -> dict[str, list[str]]:
    """The paths to which a run writes, by field."""
    value_by_field = {
        "run.folder": job.run.folder,
        "checkpoint.path": job.checkpoint.path,
        "data.cache": job.data.cache,
    }
    return {field: [value] for field, value in value_by_field.items() if _is_path(value)}


def folders_elsewhere(job: JobSpec) -> Iterator[str]:
    """Folders with absolute names: first those from which a run reads, then those to which it writes."""
    for values in read_paths(job).values():
        for value in values:
            prefix, is_glob, _ = value.partition("*")
            is_folder = prefix.endswith("/") if is_glob else Path(prefix).is_dir()
            yield from _absolute(prefix.rstrip("/") or "/" if is_folder else str(Path(prefix).parent))
    yield from folders_written(job)


def folders_written(job: JobSpec) -> list[str]:
    """Folders with absolute names to which a run writes."""
    return [value for values in written_paths(job).values() for value in _absolute(*values)]


def _is_path(value: str) -> bool:
    return "/" in value or value.endswith((".toml", ".json"))


def _absolute(*folders: str) -> Iterator[str]:
    return (folder for folder in folders if folder.startswith("/"))
