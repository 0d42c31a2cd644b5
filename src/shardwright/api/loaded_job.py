"""A job in Python: the commands as methods, with results that print as the commands do."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.api.asked_job import AskedJob
from shardwright.api.compared import Compared, compared
from shardwright.api.estimated import Estimated, estimated
from shardwright.api.executing import run_and_study
from shardwright.api.explained import Explained
from shardwright.api.found_plans import FoundPlans, PlanQuestion, found_plans
from shardwright.api.scaled import Scaled, scaled
from shardwright.api.simulated import Simulated
from shardwright.config.asked_cluster import NOTHING_ASKED, AskedCluster
from shardwright.config.base import PlanError, shortened
from shardwright.config.job import JobSpec
from shardwright.config.phrase import any_of, say
from shardwright.config.plain_values import GivenOptions, plain, strange
from shardwright.config.toml_text import value_text
from shardwright.planner.scaling import sizes_of
from shardwright.planner.search.constraints import constraints_of
from shardwright.planner.search.objectives import Objective
from shardwright.report.timeline.job_study import study_job
from shardwright.report.toml_files import job_toml, write_toml

if TYPE_CHECKING:
    from shardwright.api.exported_job import ExportedJob
    from shardwright.api.launched import LaunchedJob
    from shardwright.api.training import TrainingResult


def load(
    job: str | Path | Mapping[str, Any],
    *overrides: str,
    devices: int = 0,
    device: str = "",
    devices_per_node: int = 0,
    memory_gib: float = 0.0,
    software: str = "",
    **sections: Mapping[str, Any],
) -> "Job":
    """Read a job: a TOML file, a name of the catalog, a config.json or a folder with one, or a dictionary of fields.

    Overrides are those of --set, or sections of fields. `devices`, `device`, `devices_per_node` and `memory_gib`
    replace the job's cluster, and `software` is that of --as. Raises PlanError with every fault except those of the
    plan: the plan is checked when it is used, since `Job.plan` may start from a plan with faults.

    >>> job = load("quickstart", "plan.tp=1", plan={"dp": 4})
    >>> job
    Job('quickstart', 'plan.tp=1', 'plan.dp=4')
    >>> job.spec.plan.degrees
    'dp 4 x tp 1 x pp 2'
    """
    options = GivenOptions()
    options.faults += _wrong_kinds(job, overrides)
    cluster = AskedCluster(
        options.whole("devices", devices, least=0),
        options.text("device", device, "h100-sxm"),
        options.whole("devices_per_node", devices_per_node, least=0),
        options.number("memory_gib", memory_gib, 94.0),
    )
    software = options.text("software", software, "megatron-2023")
    options.check("load")
    software_overrides = (f"cluster.software={software}",) if software else ()
    loaded = Job(plain(job), (*software_overrides, *overrides, *_as_overrides(sections)), cluster)
    _ = loaded.job_fields, loaded.to_plan()
    return loaded


@dataclass(frozen=True, repr=False)
class Job(AskedJob):
    """A model, a cluster, a plan and everything else that a run needs, as `load` makes it. A job never changes: `set`
    and `with_` return another one."""

    @property
    def spec(self) -> JobSpec:
        """Every field of the job, checked under its plan; without a plan, under the best plan on its cluster. Raises
        PlanError with every fault."""
        return self.to_predict()[0]

    def set(self, *overrides: str) -> "Job":
        """The job with fields overridden, as with --set. Raises PlanError.

        >>> load("quickstart").set("plan.zero=1", "optimizer.steps=5").spec.optimizer.steps
        5
        """
        return load(self.job, *self.overrides, *overrides, **self._cluster_options())

    def with_(self, **sections: Mapping[str, Any]) -> "Job":
        """The job with fields of sections in place of its own. Raises PlanError.

        >>> load("quickstart").with_(plan={"zero": 1}, optimizer={"steps": 5}).spec.plan.zero
        1
        """
        return self.set(*_as_overrides(sections))

    def estimate(self, *, beside: bool = False, tokens: float = 0.0) -> Estimated:
        """The command `estimate`: memory by rank, and for a known device the verdict on its fit, time, MFU and money,
        of a run of some `tokens` in place of the job's steps.

        >>> estimate = load("tiny-llama", "plan.tp=2", devices=8, device="h100-sxm").estimate()
        >>> estimate.fits, estimate.parameters
        (True, 803968)
        """
        options = GivenOptions()
        tokens = options.number("tokens", tokens, 1e12)
        options.check(self.subject)
        asked = replace(self, run_tokens=Objective(tokens=tokens).tokens)
        return estimated(self.subject, asked.spec, with_others=beside, tokens=tokens)

    def plan(
        self,
        *,
        top: int = 5,
        keep: Sequence[str] = (),
        between: Sequence[str] = (),
        float8: str = "none",
        objective: str = "time",
        as_software: bool = False,
        tokens: float = 0.0,
        days: float = 0.0,
    ) -> "Plans":
        """The command `plan`, with its options: the best plans for the job's model, batch and cluster.

        >>> keep = ["plan.tp=2", "plan.pp=1", "plan.microbatch_size=1"]
        >>> plans = load("tiny-llama", devices=8, device="h100-sxm").plan(keep=keep)
        >>> plans.recommended.spec.plan.tp
        2
        """
        question = PlanQuestion(top, keep, between, float8, objective, as_software, tokens, days).read(self.subject)
        plans = found_plans(self.subject, replace(self, run_tokens=question.tokens).to_plan(), question)
        return Plans(plans.subject, plans.to_plan, plans.advice, plans.constraints)

    def simulate(self, *, steps: int = 1, communication: float = 0.0, execute: bool = False) -> Simulated:
        """The command `simulate`: the timeline of a step. With `execute`, stages are measured on this machine, and some
        steps are run.

        >>> load("quickstart").simulate().bubble > 0
        True
        """
        options = GivenOptions()
        steps, communication = options.whole("steps", steps, 1), options.number("communication", communication, 0.5)
        options.check(self.subject)
        if execute:
            return Simulated(run_and_study(self.to_run()))
        return Simulated(study_job(self.spec, communication, steps))

    def explain(self) -> Explained:
        """The command `explain`: one step as a story. Raises PlanError.

        >>> load("quickstart").explain().text.startswith("One step of quickstart")
        True
        """
        return Explained(self.spec)

    def scale(
        self,
        devices: str | Sequence[int],
        *,
        tokens: int = 0,
        keep: Sequence[str] = (),
        between: Sequence[str] = (),
    ) -> Scaled:
        """The command `scale`: the best plan at each number of devices, such as "8-64" or [8, 32]. Raises PlanError.

        `tokens` are those of the whole run; 0 takes those of the job's steps.

        >>> curve = load("tiny-llama", devices=8, device="h100-sxm").scale([8], keep=["plan.tp=2", "plan.pp=1"])
        >>> [row["devices"] for row in curve.rows()]
        [8, 8]
        """
        options = GivenOptions()
        keep, between = options.texts("keep", keep, "plan.tp=2"), options.texts("between", between, "plan.tp=1,4")
        tokens = options.whole("tokens", tokens, least=0)
        sizes = devices if isinstance(devices, str) else ",".join(map(str, options.wholes("devices", devices, least=1)))
        options.check(self.subject)
        job = replace(self, run_tokens=tokens).to_plan().job
        return scaled(self.subject, job, sizes_of(sizes), constraints_of(keep, between), tokens=tokens)

    def compare(
        self, on: Sequence[str], *, tokens: float = 0.0, keep: Sequence[str] = (), between: Sequence[str] = ()
    ) -> Compared:
        """The command `compare`: the best plan on each of some clusters, such as "h100-sxm:64", in place of the job's.
        Raises PlanError.

        >>> job = load("tiny-llama", devices=8, device="h100-sxm")
        >>> job.compare(["h100-sxm:8", "a100-sxm-80g:8"], keep=["plan.tp=2", "plan.pp=1"]).to_dict()["fastest"]
        0
        """
        options = GivenOptions()
        names = options.texts("on", on, "h100-sxm:64")
        options.check(self.subject)
        return compared(self.job, self.overrides, names, PlanQuestion(keep=keep, between=between, tokens=tokens))

    def train(self, *, fresh: bool = False, weights_from: str | Path | None = None) -> "TrainingResult":
        """The command `train`, with its --fresh and --from: run the job here. It starts the local ranks itself; under
        torchrun this process is one of them. Raises PlanError, RunError."""
        from shardwright.api.training import StartOptions, train_job

        options = GivenOptions()
        if weights_from is not None:
            weights_from = options.text("weights_from", weights_from, "runs/NAME")
        options.check(self.subject)
        return train_job(self.to_run(), StartOptions(fresh, weights_from))

    def launch(self, launcher: str = "slurm", *, job_file: str | Path = "", **options: str | int) -> "LaunchedJob":
        """The command `launch`: what starts the job on its cluster, by "slurm", "kubernetes" or "torchrun". Raises
        PlanError.

        `options` are the command's, with _ for -: time, partition, account, image, port and so on; its --for is
        `target`. A script starts a file: a job of fields, or with a cluster of its own, is written to `job_file` first.

        >>> job = load("quickstart", "cluster.devices_per_node=8", "cluster.nodes=1", "run.device=cpu")
        >>> job.launch("slurm", time="1:00:00").script.splitlines()[0]
        '#!/bin/bash'
        """
        from shardwright.api.exported_job import exported_job
        from shardwright.api.launched import launch_options, launched, system_that_runs
        from shardwright.api.plans_of_system import job_of_system

        given = GivenOptions()
        file = given.text("job_file", job_file, "job.toml")
        given.check(self.subject)
        asked = launch_options(self.subject, launcher, options)
        words = (file,) if file or asked.target else self._words()
        if asked.target:
            system = system_that_runs(asked.target, self.subject)
            spec, _ = job_of_system(system, self)
            exported_job(system, spec)  # which refuses what the system lacks
        else:
            spec = self.to_run()
        result = launched(spec, words, asked)
        if file:
            write_toml(Path(file), spec, "job_file")
        return result

    def export(self, system: str) -> "ExportedJob":
        """The command `export`: the job as files of another training system, such as "megatron". Raises PlanError, with
        all that the system lacks and the nearest plan that it has.

        >>> list(load("quickstart", "cluster.device=h100-sxm", "plan.zero=0").export("megatron").files)
        ['run.sh']
        """
        from shardwright.api.exported_job import exported_job
        from shardwright.api.plans_of_system import job_of_system
        from shardwright.interchange.system import SYSTEMS

        options = GivenOptions()
        target = SYSTEMS[options.one_of("system", system, SYSTEMS.names)]
        options.check(self.subject)
        return exported_job(target, job_of_system(target, self)[0])

    def toml(self) -> str:
        """The job under its plan, as the text of a TOML file."""
        return job_toml(self.spec)

    def save(self, path: str | Path) -> None:
        """Write the job as a TOML file, which every command reads. Raises PlanError."""
        options = GivenOptions()
        name = options.text("path", path, "job.toml")
        options.check("save")
        write_toml(Path(name), self.spec, "save")

    def _words(self) -> tuple[str, ...]:
        """The arguments of `train` that name the job as it is. PlanError for a job that they can't name."""
        if not isinstance(self.job, str) or self.cluster != NOTHING_ASKED:
            fault = say(
                "the job is not of one file or name, and a script starts one; say job_file='job.toml', to which it is "
                "written"
            )
            raise PlanError(self.subject, [fault])
        from shardwright.api.launched import words_of

        return words_of(self.job, self.overrides)

    def _cluster_options(self) -> dict[str, Any]:
        return vars(self.cluster)

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError with what a job does, and the way to commands that are not among it."""
        missing = f"'Job' object has no attribute {name!r}"
        if not name.startswith("_"):
            does = ", ".join(sorted(word for word, value in vars(Job).items() if word[0] != "_" and callable(value)))
            missing += f"; a job has {does}, and other commands take the file that save('job.toml') writes"
        raise AttributeError(missing, name=name, obj=self)

    def __repr__(self) -> str:
        words = [self.job if isinstance(self.job, str) else dict(self.job), *self.overrides]
        options = [f"{name}={value!r}" for name, value in self._cluster_options().items() if value]
        return f"Job({', '.join([*map(repr, words), *options])})"


@dataclass(frozen=True, repr=False)
class Plans(FoundPlans):
    """The plans that `Job.plan` found; they print as the command does."""

    @property
    def recommended(self) -> Job:
        """The job under the recommended plan. PlanError if no plan fits."""
        if self.best is None:
            devices = f"{self.to_plan.job.cluster.num_devices:,} {self.to_plan.job.cluster.device}"
            raise PlanError(self.subject, [say("no plan fits on {devices}; use more devices", devices=devices)])
        return Job(tomllib.loads(job_toml(self.best)))


def _wrong_kinds(job: Any, overrides: Sequence[Any]) -> list[str]:
    """Faults of arguments whose types `load` does not take."""
    faults = list[str]()
    if not isinstance(job, (str, Path, Mapping)):
        faults.append(
            say(
                '{job} is no job; give a path, a name of the catalog or a dictionary of fields, such as "quickstart"',
                job=shortened(repr(job), 80),
            )
        )
    elif isinstance(job, Mapping):
        faults += strange(job, "")
    faults += [
        say(
            "{override} is no field with a value; give a text, such as 'plan.tp=4'",
            override=shortened(repr(override), 80),
        )
        for override in overrides
        if not isinstance(override, str)
    ]
    return faults


def _no_section(name: str, value: Any) -> str:
    """The fault of a value that is no section: a field of one, an option by another name, or neither."""
    told = say(
        "{name} is {section}, and a section is a dictionary of its fields, such as plan={{'tp': 2}}",
        name=name,
        section=repr(value),
    )
    specs = {section: field.annotation for section, field in JobSpec.model_fields.items()}
    meant = [
        f"{section}={{{name!r}: {value!r}}}"
        for section, spec in specs.items()
        if name in getattr(spec, "model_fields", ()) and section != name
    ]
    if "gpu" in name:
        meant.append(f"devices={value!r}" if isinstance(value, int) else f"device={value!r}")
    return say("{fault}; did you mean {meant}?", fault=told, meant=any_of(meant)) if meant else told


def _as_overrides(sections: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Sections of fields as overrides of --set. Raises PlanError for a value that is no section."""
    faults = [_no_section(name, value) for name, value in sections.items() if not isinstance(value, Mapping)]
    if faults := faults or list(strange(sections, "")):
        raise PlanError("overrides", faults)
    return tuple(
        f"{name}.{field}={value_text(value)}" for name, fields in sections.items() for field, value in fields.items()
    )
