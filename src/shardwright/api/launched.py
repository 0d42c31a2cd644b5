"""The result of `launch`: what starts a job on its cluster, of this runtime or of other software."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shardwright.api.run_start import refuse_unstated, regretted_defaults, regretted_warmup, unseen_paths
from shardwright.api.shown import Shown
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.phrase import either, say
from shardwright.config.plain_values import GivenOptions
from shardwright.interchange.system import SYSTEMS, System, names_with_run_files
from shardwright.report.launch.kubernetes_manifest import kubernetes_manifest, kubernetes_notes
from shardwright.report.launch.launch_description import Launch, launch_of, predicted_step_s
from shardwright.report.launch.launch_options import LAUNCHERS, Launcher, LaunchOptions
from shardwright.report.launch.slurm_script import slurm_script
from shardwright.report.launch.software_script import software_notes, software_script
from shardwright.report.launch.torchrun_command import torchrun_command, torchrun_notes
from shardwright.report.output import write_output
from shardwright.train.launch.run_folder import folder_of


@dataclass(frozen=True, repr=False)
class LaunchedJob(Shown):
    """A script, a manifest or command lines that start a job, and notes on what nobody has stated."""

    description: Launch
    script: str
    notes: tuple[str, ...]

    @property
    def text(self) -> str:
        return self.script

    def to_dict(self) -> dict[str, Any]:
        description, layout = self.description, self.description.layout
        return {
            "launcher": description.options.launcher,
            "servers": layout.servers,
            "ranks_per_server": layout.ranks_per_server,
            "ranks": description.job.plan.world,
            "port": description.options.port,
            "environment": description.links.variables,
            "left_to_you": {unset.variable: unset.meaning for unset in description.links.placeholders},
            "max_restarts": description.max_restarts,
            "save_s": description.save_s or None,
            "time_limit_s": description.options.limit_s or None,
            "notes": list(self.notes),
            "text": self.script,
        }

    def rows(self) -> list[dict[str, Any]]:
        """A row for each variable that ranks get of the links between them."""
        return [{"variable": name, "value": value} for name, value in self.description.links.variables.items()]

    def save(self, path: str | Path, option: str = "save") -> str:
        """Write it to a file, and return the command that starts it. PlanError, which names the `option` that names the
        file, if it can't be written."""
        file = Path(path)
        write_output(file, self.script, option)
        return {"slurm": f"sbatch {file}", "kubernetes": f"kubectl create -f {file}", "torchrun": f"bash {file}"}[
            self.description.options.launcher
        ]


def launched(job: JobSpec, words: tuple[str, ...], options: LaunchOptions) -> LaunchedJob:
    """Describe what starts a checked job in the working folder; `words` are the arguments of `train` that name it.
    PlanError with every fault of the options, and with all that a run on a cluster must state."""
    description = launch_of(job, words, options, folder=Path.cwd(), run_folder=folder_of(job))
    refuse_unstated(job, description.layout.servers, or_long=True)
    script, notes = _of_software(description) if options.target else _of_this_runtime(description)
    return LaunchedJob(description, script, tuple(notes))


def launch_options(subject: str, launcher: str, options: Mapping[str, Any]) -> LaunchOptions:
    """The options of a call, by the names that the command's have, with _ for -. PlanError with every one that is no
    option, or has a value of another kind."""
    defaults = {field.name: field.default for field in fields(LaunchOptions) if field.name != "launchers"}
    given, values = GivenOptions(), dict[str, Any]()
    start: Launcher = LAUNCHERS[LAUNCHERS.index(given.one_of("launcher", launcher, LAUNCHERS))]
    for name, value in options.items():
        if name not in defaults:
            given.faults.append(
                say("{name} is no option of launch; its options are {known}", name=name, known=tuple(defaults))
            )
        elif name == "target":
            values[name] = given.one_of(name, value, SYSTEMS.names)
        else:
            is_number = isinstance(defaults[name], int)
            values[name] = given.whole(name, value, 1) if is_number else given.text(name, value, "04:00:00")
    given.check(subject)
    return LaunchOptions((start,), **values)


def words_of(job: str, overrides: Iterable[str]) -> tuple[str, ...]:
    """The arguments of `train` that name a job and its overrides."""
    return (job, *(word for override in overrides for word in ("--set", override)))


def system_that_runs(name: str, subject: str) -> System:
    """The training system of a name, whose data and checkpoints are written, too. PlanError for any other."""
    system = SYSTEMS[name]
    if system.run_files is not None:
        return system
    fault = say(
        "--for {name}: how its data and checkpoints are said is not known here; take {known}, or `shardwright export "
        "JOB --to {name}` and add them",
        name=name,
        known=either(names_with_run_files()),
    )
    raise PlanError(subject, [fault])


def _of_software(description: Launch) -> tuple[str, list[str]]:
    """The script of other software, and notes."""
    system, job = SYSTEMS[description.options.target], description.job
    assert system.run_files is not None
    files = system.run_files.write(job, description.folder, predicted_step_s(job))
    unseen = unseen_paths(job, description.folder)
    notes = [*regretted_warmup(job), *unseen, *description.notes, *software_notes(description, system)]
    return software_script(description, system, files), notes


def _of_this_runtime(description: Launch) -> tuple[str, list[str]]:
    """The script, manifest or command lines of this runtime, and notes."""
    unseen = unseen_paths(description.job, description.folder)
    notes = [*regretted_defaults(description.job), *unseen, *description.notes]
    match description.options.launcher:
        case "slurm":
            return slurm_script(description), notes
        case "torchrun":
            return torchrun_command(description), notes + torchrun_notes(description)
        case "kubernetes":
            return kubernetes_manifest(description), notes + kubernetes_notes(description)
