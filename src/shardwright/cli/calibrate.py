"""The command that measures the machine on which it runs."""

import json
from pathlib import Path

import click

from shardwright.cli.command_language import command_language
from shardwright.cli.job_options import command_language_option, file_option, json_option
from shardwright.cli.localized_commands import LocalizedCommand
from shardwright.cli.progress_bar import progress_shown
from shardwright.config import largest
from shardwright.config.text_columns import fitting


@click.command(cls=LocalizedCommand)
@file_option("--out", help="Write what was measured, for --set cluster.device=FILE.  [default: calibrated.toml]")
@click.option(
    "--ranks",
    type=click.IntRange(1, largest.RANKS),
    default=None,
    metavar="N",
    help="Ranks that are busy at once.  [default: one for each GPU, or for each core]",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="What is measured; auto takes CUDA where there is some.",
)
@click.option("--quick", is_flag=True, help="A few sizes in some seconds: to see that it works, not to rely on.")
@json_option
@command_language_option
def calibrate(out: Path | None, ranks: int | None, device: str, quick: bool, as_json: bool) -> None:
    """Measure this machine, and write a file by which estimate, plan, simulate and train price what runs on it.

    Products by shape and number type, attention, every other operator, the update, collectives and messages between
    ranks, and copies: of this runtime as it is, with as many ranks busy as a job may have. About two minutes on two
    cores.
    """
    from shardwright.train.launch.fork_server import start_server_early

    start_server_early(device)
    from shardwright.measure.calibrate.calibration_run import calibrate_here, ranks_here
    from shardwright.measure.calibrate.device_file import summary
    from shardwright.measure.calibrate.sweep import QUICK, Sweep
    from shardwright.report.toml_files import calibrated_text, write_device

    out = out or Path("calibrated.toml")
    write_device(out, None)  # an unwritable file is reported before two minutes of measuring
    with progress_shown(command_language()):
        fields, launches = calibrate_here(QUICK if quick else Sweep(), ranks or ranks_here(), device)
    write_device(out, fields)
    click.echo(
        json.dumps({"file": str(out), **fields})
        if as_json
        else fitting(calibrated_text(out, fields, summary(launches), command_language()))
    )


COMMANDS = (calibrate,)
