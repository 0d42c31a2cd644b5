"""Runs the commands in the tables of docs/extrapolation.md, and writes the figures that they have now.

    python tests/support/extrapolation_page.py       # write the page anew

A row is a command, its figure and the reason; the first cell of a table's head begins the command.
"""

import json
import re
from pathlib import Path

from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config.base import PlanError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extrapolation.md"
HEAD = re.compile(r"^\| `shardwright (?P<command>[^`]+)` \|")
ROW = re.compile(r"^\| `(?P<options>[^`]+)` \| (?P<figure>.*?) ?\| (?P<reason>.*) \|$")


def figure(command: str) -> str:
    """The step and MFU that a command of `shardwright estimate` prints, or the first fault that it finds."""
    arguments = [str(ROOT / word) if word.startswith("docs/") else word for word in command.split()]
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    if isinstance(result.exception, PlanError):
        return f"refused: {result.exception.faults[0]}"
    assert result.exit_code == 0, (command, result.output)
    answer = json.loads(result.stdout)
    fits = "" if answer["fits"] else ", does not fit"
    return f"{answer['step_s']:.3g} s, {100 * answer['mfu']:.1f} %{fits}"


def filled(markdown: str) -> str:
    """The page with the figures of now."""
    lines, command = [], ""
    for line in markdown.splitlines():
        if head := HEAD.match(line):
            command = head["command"]
        elif row := ROW.match(line):
            shown = figure(f"{command} {row['options']}")
            line = f"| `{row['options']}` | {shown} | {row['reason']} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
