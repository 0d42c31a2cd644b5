"""The launch of a job on its cluster, described for every launcher: servers, links, restarts, time to save, and the
files and folders that the job names."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwright.config.base import PlanError, faults_in
from shardwright.config.cluster import DeviceSpec
from shardwright.config.cluster_facts import device_entry
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.units import seconds_text
from shardwright.planner.own_plan import Estimate, estimate
from shardwright.report.launch.launch_options import LaunchOptions
from shardwright.report.launch.link_environment import LinkEnvironment, link_environment
from shardwright.report.launch.save_time import SaveTime, save_time
from shardwright.report.launch.server_layout import ServerLayout, server_layout

# A line for shellcheck, behind the first lines of a script.
QUOTED = "# shellcheck disable=SC2016 # what stands in single quotes is for the ranks"

_ON_CPU = "cpu"  # the calibration of devices that are processors


@dataclass(frozen=True)
class Launch:
    """A job to start in a folder. `words` are the arguments of `train`: the job as it was typed, and its overrides.

    `layout` is the layout of its ranks on servers. `saving` is None if the job writes no checkpoints.
    """

    job: JobSpec
    words: tuple[str, ...]
    folder: Path
    options: LaunchOptions
    layout: ServerLayout
    on_cpu: bool
    links: LinkEnvironment
    saving: SaveTime | None
    notes: tuple[str, ...]

    @property
    def max_restarts(self) -> int:
        """Restarts after failures: 0 without checkpoints to resume from."""
        return self.job.run.max_restarts if self.job.checkpoint.is_on else 0

    @property
    def save_s(self) -> int:
        """Seconds that the ranks get to save and leave; 0 if there is nothing to save."""
        return self.saving.seconds if self.saving is not None else 0

    @property
    def is_amd(self) -> bool:
        """True if the job's devices are AMD's, by the names that drivers give them."""
        return any(name.startswith("AMD") for device in _devices(self.job) for name in device.cuda_names)

    @property
    def heading(self) -> str:
        """The description of the launch, for a comment in the first lines of a file."""
        return f"{self.job.name}: {self.layout.words}, {self.job.plan.degrees}"


def launch_of(
    job: JobSpec, words: tuple[str, ...], options: LaunchOptions, *, folder: Path, run_folder: Path
) -> Launch:
    """The launch of a checked job in a folder; its run writes to `run_folder`. PlanError with every fault."""
    faults = options.faults()
    on_cpu = _runs_on_cpu(job) and not options.target
    faults += _device_faults(job, on_cpu or bool(options.target))
    try:
        layout = server_layout(job)
        links = link_environment(job, layout, on_cpu)
    except PlanError as error:
        raise PlanError(say("launch of {name}", name=job.name), faults + faults_in(error)) from None
    if faults:
        raise PlanError(say("launch of {name}", name=job.name), faults)
    needs_prediction = job.checkpoint.is_on or options.launcher != "torchrun"  # torchrun has no time limit
    predicted = _predicted(job) if needs_prediction else None
    saving = None if options.target else _saving(job, run_folder, options, predicted)
    limit_s, save_s = options.limit_s, saving.seconds if saving is not None else 0
    if limit_s and save_s and limit_s <= 2 * save_s:
        fault = say(
            "--time {time} is {limit_s:,} s, of which a run needs {save_s:,} s to save and leave, so that it would "
            "hardly train (2 x {save_s:,} = {double:,}); raise --time, or lower --save-before",
            time=options.time,
            limit_s=limit_s,
            save_s=save_s,
            double=2 * save_s,
        )
        raise PlanError(say("launch of {name}", name=job.name), [fault])
    saving_notes = [] if options.target and job.checkpoint.is_on else _saving_notes(saving)
    notes = [*_part_notes(job), *links.notes, *saving_notes, *_length_notes(job, options, predicted)]
    return Launch(job, words, folder, options, layout, on_cpu, links, saving, tuple(notes))


def _devices(job: JobSpec) -> list[DeviceSpec]:
    """The catalog's entries of the cluster's devices, one of each kind; none if they are unknown."""
    names = [part.device for part in job.cluster.parts] or [job.cluster.device]
    return [device_entry(name) for name in dict.fromkeys(names) if name != "unknown"]


def _runs_on_cpu(job: JobSpec) -> bool:
    """True if ranks run on processors: the job says so, or its device is one."""
    if job.runs_on_cpu or job.run.device != "auto":
        return job.runs_on_cpu
    return all(device.generation == _ON_CPU for device in _devices(job))


def _device_faults(job: JobSpec, on_cpu: bool) -> list[str]:
    """Faults of devices on which this runtime does not run."""
    if on_cpu or job.run.device == "cuda":
        return []
    return [
        say(
            "the entry of {device} has no name of CUDA for it (cuda_names), and this runtime runs on CUDA devices "
            "and on processors; use another cluster.device, or set run.device to cuda where torch drives it as that, "
            "or to cpu",
            device=device.name,
        )
        for device in _devices(job)
        if not device.cuda_names
    ]


def _predicted(job: JobSpec) -> Estimate | None:
    if job.cluster.device == "unknown" or job.cluster.parts:
        return None
    try:
        return estimate(job)
    except (KeyError, ValueError):  # too little is known of the device
        return None


def predicted_step_s(job: JobSpec) -> float:
    """The predicted seconds of a step; 0 if too little is known."""
    predicted = _predicted(job)
    return 0.0 if predicted is None else float(predicted.step.total)


def _part_notes(job: JobSpec) -> list[str]:
    """A note about a cluster with several kinds of devices, whose order a launcher does not know."""
    parts = [f"{part.nodes} of {part.device}" for part in job.cluster.parts]
    if len(_devices(job)) < 2:
        return []
    return [
        say(
            "ranks lie on nodes in the order of cluster.parts ({parts}), and what is written takes nodes as they "
            "come; give it nodes in that order",
            parts=", then ".join(parts),
        )
    ]


def _saving(job: JobSpec, run_folder: Path, options: LaunchOptions, predicted: Estimate | None) -> SaveTime | None:
    if not job.checkpoint.is_on:
        return None
    return SaveTime(options.save_before, "") if options.save_before else save_time(job, run_folder, predicted)


def _saving_notes(saving: SaveTime | None) -> list[str]:
    if saving is None:
        return [
            say(
                "the job writes no checkpoints, so a failure and the time limit end it for good; set "
                "checkpoint.every_steps, every_s or auto"
            )
        ]
    return [saving.sentence] if saving.sentence else []


def _length_notes(job: JobSpec, options: LaunchOptions, predicted: Estimate | None) -> list[str]:
    """A note on the length of the run; none if it is not predicted."""
    if predicted is None or options.launcher == "torchrun":
        return []
    run_s = job.optimizer.steps * predicted.effective_step_s
    steps, seconds = job.optimizer.steps, seconds_text(run_s)
    if not options.limit_s:
        return [
            say(
                "{steps:,} steps are predicted to take {seconds}; --time sets a limit, else the cluster's own holds",
                steps=steps,
                seconds=seconds,
            )
        ]
    return [
        say(
            "{steps:,} steps are predicted to take {seconds}, and --time allows {limit} at once",
            steps=steps,
            seconds=seconds,
            limit=seconds_text(options.limit_s),
        )
    ]


def read_paths(job: JobSpec) -> dict[str, list[str]]:
    """The paths that a run reads, by field. Words that are no path, such as `bytes`, are left out."""
    values_by_field = {
        "model.weights": [job.model.weights],
        "model.adapter.weights": [job.model.adapter.weights],
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
