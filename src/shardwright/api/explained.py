"""The result of `explain`: one step of a job as a story."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwright.api.shown import Shown
from shardwright.config.job import JobSpec
from shardwright.explain.story import Story, tell
from shardwright.report.explain.story_dict import story_dict
from shardwright.report.explain.story_text import story_text


@dataclass(frozen=True, repr=False)
class Explained(Shown):
    """One step of a checked job: where the batch goes, what each device holds, what crosses which link, how long."""

    job: JobSpec

    @cached_property
    def story(self) -> Story:
        """The story, with every number that its text shows."""
        return tell(self.job)

    @property
    def text(self) -> str:
        return story_text(self.story)

    def in_language(self, language: str) -> str:
        return story_text(self.story, language)

    def to_dict(self) -> dict[str, Any]:
        return story_dict(self.story)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each group of ranks that one rank belongs to."""
        groups: list[dict[str, Any]] = self.to_dict()["groups"]
        return groups
