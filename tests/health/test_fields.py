"""The page on health has every field, with its default."""

import re
from pathlib import Path

from shardwright.config.job import JobSpec

PAGE = Path(__file__).parents[2] / "docs" / "health.md"


def test_the_page_has_every_field_and_its_default() -> None:
    answer = dict(re.findall(r"^\| `([a-z_.]+)` \| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    job = JobSpec()
    fields = {f"health.{name}": str(value) for name, value in job.health}
    fields |= {f"run.{name}": str(getattr(job.run, name)) for name in ("profile_first_step", "profile_steps")}
    assert answer == fields
