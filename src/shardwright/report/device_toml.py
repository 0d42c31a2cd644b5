"""The TOML file of a calibrated device, and text about it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.config.toml_text import toml_text
from shardwright.config.units import seconds_text
from shardwright.report.output import replace_output
from shardwright.report.text_columns import aligned

_HEAD = "# A device that shardwright calibrate measured; `--set cluster.device=FILE` takes it.\n"


def write_device(path: Path, fields: Mapping[str, Any] | None) -> None:
    """Write the file, complete or not at all. Without fields, only check that it can be written. PlanError if not."""
    replace_output(path, _HEAD + toml_text(fields) if fields is not None else _HEAD, "--out", dry_run=fields is None)


def calibrated_text(path: Path, fields: Mapping[str, Any], rows: Sequence[Sequence[str]]) -> str:
    """The measurements of a calibration, and how to use them."""
    constants = fields["constants"]
    return "\n".join(
        [
            aligned([list(row) for row in rows]),
            "",
            f"A step takes {seconds_text(constants['step_s'])} beside what it computes and sends.",
            f"{fields['source']}; written to {path}.",
            f"Price a job with it: shardwright estimate JOB --set cluster.device={path}",
        ]
    )
