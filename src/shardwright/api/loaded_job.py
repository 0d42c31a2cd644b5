"""A job in Python: what the commands do, as methods, and results that print as the commands do."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.api.asked_job import AskedJob
from shardwright.api.estimated import Estimated, estimated
from shardwright.api.found_plans import FoundPlans, Wanted, found_plans
from shardwright.api.simulated import Simulated
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError, shortened
from shardwright.config.job import JobSpec
from shardwright.config.plain_values import GivenOptions, plain, strange
from shardwright.config.toml_text import value_text
from shardwright.report.job_toml import job_toml, write_toml
from shardwright.report.timeline.job_study import study_job

if TYPE_CHECKING:
    from shardwright.api.training import Trained


def load(
    job: str | Path | Mapping[str, Any], *overrides: str, devices: int = 0, device: str = "",
    devices_per_node: int = 0, software: str = "", **sections: Mapping[str, Any],
) -> "Job":  # fmt: skip
    """Read a job: a TOML file, a name of the catalog, a config.json or a folder with one, or a dictionary of fields.

    Fields are overridden as with --set, or by sections; `devices`, `device` and `devices_per_node` take the place of
    the job's cluster, and `software` is that of --as. Raises PlanError with every fault, but for those of the plan,
    which is checked where it is used: `plan` starts from any.

    >>> job = load("quickstart", "plan.tp=1", plan={"dp": 4})
    >>> job
    Job('quickstart', 'plan.tp=1', 'plan.dp=4')
    >>> job.spec.plan.degrees
    'dp 4 x tp 1 x pp 2'
    """
    given = GivenOptions()
    given.faults += _wrong_kinds(job, overrides)
    asked = AskedCluster(
        given.whole("devices", devices, least=0), given.text("device", device, "h100-sxm"),
        given.whole("devices_per_node", devices_per_node, least=0),
    )  # fmt: skip
    software = given.text("software", software, "megatron-2023")
    given.check("load")
    named = (f"cluster.software={software}",) if software else ()
    found = Job(plain(job), (*named, *overrides, *_as_overrides(sections)), asked)
    _ = found.read, found.to_plan()
    return found


@dataclass(frozen=True, repr=False)
class Job(AskedJob):
    """A model, a cluster, a plan and all else that a run needs. `load` makes one, and it never changes: `set` and
    `with_` give another."""

    @property
    def spec(self) -> JobSpec:
        """Every field of the job, checked under its plan; of a model without one, under the best on its cluster.
        Raises PlanError with every fault."""
        return self.to_predict()[0]

    def set(self, *overrides: str) -> "Job":
        """The job with fields overridden, as by --set. Raises PlanError.

        >>> load("quickstart").set("plan.zero=1", "optimizer.steps=5").spec.optimizer.steps
        5
        """
        return load(self.job, *self.overrides, *overrides, **self._cluster_options())

    def with_(self, **sections: Mapping[str, Any]) -> "Job":
        """The job with fields of sections in the place of its own. Raises PlanError.

        >>> load("quickstart").with_(plan={"zero": 1}, optimizer={"steps": 5}).spec.plan.zero
        1
        """
        return self.set(*_as_overrides(sections))

    def estimate(self, *, beside: bool = False) -> Estimated:
        """Memory by rank, and where the device is known whether it fits, time, MFU and money: the command `estimate`.

        >>> found = load("tiny-llama", "plan.tp=2", devices=8, device="h100-sxm").estimate()
        >>> found.fits, found.parameters
        (True, 803968)
        """
        return estimated(self.subject, self.spec, with_others=beside)

    def plan(
        self, *, top: int = 10, keep: Sequence[str] = (), between: Sequence[str] = (), float8: str = "none",
        objective: str = "time", as_software: bool = False, tokens: float = 0.0, days: float = 0.0,
    ) -> "Plans":  # fmt: skip
        """The best plans for the job's model, batch and cluster: the command `plan`, with its options.

        >>> kept = ["plan.tp=2", "plan.pp=1", "plan.microbatch_size=1"]
        >>> found = load("tiny-llama", devices=8, device="h100-sxm").plan(keep=kept)
        >>> found.recommended.spec.plan.tp
        2
        """
        wanted = Wanted(top, keep, between, float8, objective, as_software, tokens, days)
        found = found_plans(self.subject, self.to_plan(), wanted)
        return Plans(found.subject, found.given, found.advice, found.constraints)

    def simulate(self, *, steps: int = 1, communication: float = 0.0, execute: bool = False) -> Simulated:
        """The timeline of a step: the command `simulate`. With `execute` stages are measured on this machine, and some
        steps are run.

        >>> load("quickstart").simulate().bubble > 0
        True
        """
        given = GivenOptions()
        steps, communication = given.whole("steps", steps, 1), given.number("communication", communication, 0.5)
        given.check(self.subject)
        if execute:
            from shardwright.api.executing import run_and_study

            return Simulated(run_and_study(self.to_run()))
        return Simulated(study_job(self.spec, communication, steps))

    def train(self, *, fresh: bool = False, weights_from: str | Path | None = None) -> "Trained":
        """Run the job here: the command `train`, with its --fresh and --from. Starts the local ranks itself; under
        torchrun it is one of them. Raises PlanError, RunError."""
        from shardwright.api.training import Begins, train_job

        given = GivenOptions()
        if weights_from is not None:
            weights_from = given.text("weights_from", weights_from, "runs/NAME")
        given.check(self.subject)
        return train_job(self.to_run(), Begins(fresh, weights_from))

    def toml(self) -> str:
        """The job as a TOML file has it, under its plan."""
        return job_toml(self.spec)

    def save(self, path: str | Path) -> None:
        """Write the job as a TOML file, which every command reads. Raises PlanError."""
        given = GivenOptions()
        name = given.text("path", path, "job.toml")
        given.check("save")
        write_toml(Path(name), self.spec)

    def _cluster_options(self) -> dict[str, Any]:
        return vars(self.cluster)

    def __repr__(self) -> str:
        words = [self.job if isinstance(self.job, str) else dict(self.job), *self.overrides]
        asked = [f"{name}={value!r}" for name, value in self._cluster_options().items() if value]
        return f"Job({', '.join([*map(repr, words), *asked])})"


@dataclass(frozen=True, repr=False)
class Plans(FoundPlans):
    """The plans that `Job.plan` found; they print as the command does."""

    @property
    def recommended(self) -> Job:
        """The job under the plan to take. PlanError where no plan fits."""
        if self.best is None:
            devices = f"{self.given.job.cluster.num_devices:,} {self.given.job.cluster.device}"
            raise PlanError(self.subject, [f"no plan fits on {devices}; use more devices"])
        return Job(tomllib.loads(job_toml(self.best)))


def _wrong_kinds(job: Any, overrides: Sequence[Any]) -> list[str]:
    """Faults of arguments that are of no kind that `load` takes."""
    faults = []
    if not isinstance(job, (str, Path, Mapping)):
        faults.append(
            f"{shortened(repr(job), 80)} is no job; give a path, a name of the catalog or a dictionary of fields, such "
            'as "quickstart"'
        )
    elif isinstance(job, Mapping):
        faults += strange(job, "")
    faults += [
        f"{shortened(repr(one), 80)} is no field with a value; give a text, such as 'plan.tp=4'"
        for one in overrides
        if not isinstance(one, str)
    ]
    return faults


def _as_overrides(sections: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Sections of fields as --set has them. Raises PlanError for what is no section."""
    faults = [
        f"{name} is {section!r}, and a section is a dictionary of its fields, such as plan={{'tp': 2}}"
        for name, section in sections.items()
        if not isinstance(section, Mapping)
    ]
    if faults := faults or list(strange(sections, "")):
        raise PlanError("overrides", faults)
    return tuple(f"{name}.{field}={value_text(value)}" for name, of in sections.items() for field, value in of.items())
