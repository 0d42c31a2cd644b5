"""Figures of pipelines say what schedules and predictions say."""

import json
import re

from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config.units import seconds_text
from shardwright.learn.pipeline_figures import bubble_figure
from shardwright.learn.two_cuts_figure import two_cuts_job, two_cuts_rows
from support.languages import words_of_picture


def test_both_ratios_are_those_of_the_timeline() -> None:
    words = words_of_picture(bubble_figure()("en"))
    ratios = re.findall(r"= (\d+) / (\d+) = ([\d.]+) %", words)
    assert [f"{100 * int(part) / int(whole):.1f}" for part, whole, _ in ratios] == [share for *_, share in ratios]
    ideal, bubble, whole = (float(time) for time in re.findall(r"\(F \+ B\) = (\d+)\n", words))
    assert ideal + bubble == whole
    assert [f"{100 * bubble / ideal:.1f}", f"{100 * bubble / whole:.1f}"] == [share for *_, share in ratios]


def test_columns_of_tp_and_pp_are_those_of_estimate() -> None:
    command = two_cuts_job("pp", 16).command("estimate").split()
    printed = json.loads(CliRunner().invoke(cli, [*command[1:], "--json"], catch_exceptions=False).stdout)
    assert dict(two_cuts_rows("pp", 16))["a step"] == seconds_text(printed["step_s"])
