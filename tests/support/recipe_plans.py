"""The table of `docs/recipes.md` that has what `plan` answers now, made by the page's own commands.

    python tests/support/recipe_plans.py     # write it again; about two minutes

Of each section of a case the first command of `plan` is asked, and in the section of two lengths both.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config.plan import PlanSpec
from shardwright.report.plans_text import plan_words, step_text

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
TABLE = re.compile(r"(?<=<!-- answers of plan -->\n).*?(?=<!-- end -->)", re.DOTALL)
_HEADING = (
    "| Case | `plan` recommends | Step | GiB | Simpler, as fast as can be told | Slower by | Sure |\n"
    "|---|---|---|---|---|---|---|\n"
)
_COMMAND = re.compile(r"^    (shardwright plan (?:.*\\\n)*.*)$", re.MULTILINE)
_VARIABLE = re.compile(r'^    (\w+=".*")$', re.MULTILINE)


def cases(page: str) -> dict[str, list[str]]:
    """The words of the commands of `plan`, by the titles of their sections."""
    result = {}
    for section in re.split(r"^## (?=\d)", page, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        variables = "; ".join(_VARIABLE.findall(text))
        for number, command in enumerate(_COMMAND.findall(text)):
            if "--as" in command:  # another software
                continue
            shell = f"{variables}\nprintf '%s\\0' {command}"
            words = subprocess.run(["bash", "-c", shell], capture_output=True, check=True, text=True).stdout
            result[title + ", the second" * number] = words.split("\0")[2:-1]
    return result


def row(title: str, words: list[str]) -> str:
    """The line of a case."""
    done = CliRunner().invoke(cli, ["plan", *words, "--json"], catch_exceptions=False)
    plans: list[dict[str, Any]] = json.loads(done.stdout)
    (first,) = (plan for plan in plans if plan["recommended"])
    cells = [title, _words(first), step_text(first["step_s"]), f"{first['memory']['process'] / 2**30:.1f}"]
    simpler = next((plan for plan in plans if plan["simpler"]), None)
    if simpler is None:
        cells += ["", "", ""]
    else:
        share = simpler["step_s"] / first["step_s"] - 1
        cells += [_words(simpler), f"{100 * share:.1f} %", f"{100 * simpler['first_is_faster']:.0f} %"]
    return "| " + " | ".join(cells) + " |\n"


def _words(plan: dict[str, Any]) -> str:
    fp8 = f", fp8 {plan['float8']}" if plan["float8"] != "none" else ""
    return plan_words(PlanSpec(**plan["plan"])) + fp8 + ", uneven stages" * bool(plan["plan"]["layout"])


def table(page: str) -> str:
    """All lines, as they are now."""
    return _HEADING + "".join(row(title, words) for title, words in cases(page).items())


if __name__ == "__main__":
    written = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: table(written), written), encoding="utf-8")
