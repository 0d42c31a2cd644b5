"""The command that trains."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import click

from shardwright.cli.checked_job import load_to_run
from shardwright.cli.command_language import command_language, tell
from shardwright.cli.job_options import JobCommand, command_language_option, job_options
from shardwright.config.phrase import say
from shardwright.config.text_columns import fitting

_GOES_ON = say("the same command goes on from the newest checkpoint, and --fresh begins anew")
_STEPS = say("a run is as long as --set optimizer.steps=N")
_FOLDER = say("a run writes to --set run.folder=FOLDER, and checkpoints by --set checkpoint.every_s=1800")


@click.command(
    cls=JobCommand,
    examples=("train quickstart", "train docs/job.toml --set optimizer.steps=50", "train quickstart --fresh"),
    unneeded=dict.fromkeys(("--resume", "--continue", "--load"), _GOES_ON)
    | {"--epochs": _STEPS, "--num-epochs": _STEPS, "--output-dir": _FOLDER, "--save": _FOLDER},
)
@job_options
@click.option("--fresh", is_flag=True, help="Begin anew: put aside the checkpoints that the run's folder has.")
@click.option(
    "--from",
    "weights_from",
    default=None,
    metavar="RUN",
    help="Begin with the weights of another run's newest healthy checkpoint, where this one has none yet: its folder, "
    "or the folder or address of its checkpoints.",
)
@command_language_option
def train(job: str, overrides: tuple[str, ...], as_json: bool, fresh: bool, weights_from: str | None) -> None:
    """Train JOB. Starts the local ranks itself; under torchrun it is one of them. A run whose folder has a checkpoint
    goes on from it."""
    from shardwright.train.launch.rank_environment import rank_0_first

    with rank_0_first():
        spec = load_to_run(job, overrides)
    from shardwright.api.training import StartOptions, train_job
    from shardwright.train.launch import preemption

    start = StartOptions(
        fresh,
        weights_from,
        tell=tell,
        warn=partial(tell, err=True),
        language=command_language(),
    )
    with _standard_output_for_json_alone(as_json):
        result = train_job(spec, start)
        if result.comparison_text:
            click.echo(fitting(result.comparison_text))
    if as_json and result.is_main_process:
        click.echo(json.dumps(result.to_dict()))
    if result.preempted:
        if result.is_main_process:
            tell(preemption.saved_sentence(result.preempted_by, result.steps), err=True)
        sys.exit(preemption.EXIT_STATUS)


@contextmanager
def _standard_output_for_json_alone(active: bool) -> Iterator[None]:
    """A context in which the output of ranks goes to standard error, if `active`."""
    if not active:
        yield
        return
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
