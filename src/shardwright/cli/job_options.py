"""What every command on a job shares: its argument, its overrides, its help, and how a job is read."""

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from shardwright.config.job import JobSpec


class JobCommand(click.Command):
    """A command on a job: its help ends with every field of a job, its default and its meaning."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from shardwright.config.fields import job_fields

        for section, rows in job_fields().items():
            with formatter.section(f"Fields of [{section}]" if section else "Fields of a job"):
                formatter.write_dl(rows)


def job_options(command: Any) -> Any:
    """The job, `--set` and `--json`."""
    json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
    set_option = click.option(
        "--set", "overrides", multiple=True, metavar="SECTION.FIELD=VALUE", help="Override a field; may be repeated."
    )
    return click.argument("job")(set_option(json_option(command)))


def load(job: str, overrides: tuple[str, ...]) -> "JobSpec":
    """The job with its overrides, checked. PlanError lists every fault."""
    from shardwright.config.load import load_job

    return _planned(job, load_job(job, list(overrides)))


def load_to_run(job: str, overrides: tuple[str, ...]) -> "JobSpec":
    """The job, checked, for a command that executes it: PlanError also where this runtime can't."""
    from shardwright.config.base import PlanError
    from shardwright.config.runtime_support import runtime_limits

    spec = load(job, overrides)
    if limits := runtime_limits(spec):
        raise PlanError(f"job {job}", limits)
    return spec


def load_to_plan(job: str, overrides: tuple[str, ...]) -> "tuple[JobSpec, bool]":
    """The job, checked, to find a plan for; and whether it has one of its own."""
    from shardwright.config.load import load_to_plan as read

    spec, has_own = read(job, list(overrides))
    return (_planned(job, spec) if has_own else spec), has_own


def _planned(job: str, spec: "JobSpec") -> "JobSpec":
    """The job with its plan checked too."""
    from shardwright.account.budget import meet_budget
    from shardwright.config.base import PlanError
    from shardwright.schedule.job_program import plan_faults

    if faults := plan_faults(spec):
        raise PlanError(f"job {job}", faults)
    return meet_budget(spec)
