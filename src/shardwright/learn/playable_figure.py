"""Playable figures: pictures that a reader of the site changes by controls, of which every state was computed before.

A figure is a grid: one frame for each choice of its controls. The site has the frames as data, and `player` draws them;
it computes nothing. Where no script runs, the picture of idea_figures.py stays.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from shlex import quote
from typing import Any, Literal

from shardwright.api.loaded_job import load
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say, spoken

Painter = Literal["bars", "timeline", "pieces", "ranks", "links", "scores"]  # functions of player/painters.js
# A field that no search chooses: with it a plan is whole, and its other fields have their defaults.
WHOLE_PLAN = "plan.reduce_each=auto"
# Words of the player itself, by their names in player/figure.js.
PLAYER_WORDS = {
    "play": say("Play"),
    "pause": say("Pause"),
    "command": say("Commands that print these numbers"),
    "refused": say("Refused: "),
    "node": say("node"),
    "rank": say("rank"),
    "before": say("before"),
    "adds": say("adds"),
}


@dataclass(frozen=True)
class FigureControl:
    """One choice of the reader: its label, its values as they are shown, and the number of the first to show."""

    label: str
    values: Sequence[str]
    start: int = 0


@dataclass(frozen=True)
class FigureFrame:
    """A figure under one choice: the picture as its painter reads it, numbers as (label, text), and the command
    that prints them, or several, a line each. A plan that is refused has the first fault alone."""

    picture: Mapping[str, Any]
    numbers: Sequence[tuple[str, str]] = ()
    command: str = ""
    fault: str = ""


@dataclass(frozen=True)
class PlayableFigure:
    """A grid of frames. `frame` takes a value of each control; `steps` is the label of the moments of a frame that is
    played, "" if it has none."""

    title: str
    painter: Painter
    controls: Sequence[FigureControl]
    frame: Callable[..., FigureFrame]
    steps: str = ""

    def frames(self) -> Iterator[tuple[str, FigureFrame]]:
        """Each frame with its key: the numbers of the chosen values, as in "0/3"."""
        for chosen in product(*(range(len(control.values)) for control in self.controls)):
            values = [control.values[number] for control, number in zip(self.controls, chosen, strict=True)]
            try:
                frame = self.frame(*values)
            except PlanError as error:
                frame = FigureFrame({}, fault=error.faults[0])
            yield "/".join(map(str, chosen)), frame

    def data(self) -> dict[str, Any]:
        """The figure for the player; phrases stay phrases."""
        return {
            "title": self.title,
            "painter": self.painter,
            "steps": self.steps,
            "controls": [vars(control) for control in self.controls],
            "frames": {key: vars(frame) for key, frame in self.frames()},
        }


@dataclass(frozen=True)
class FigureJob:
    """A model under a plan, and the options of commands that say the same. Fields that `sets` lacks have defaults."""

    model: str
    devices: int
    device: str
    sets: Sequence[str]

    @property
    def _overrides(self) -> tuple[str, ...]:
        return (*self.sets, WHOLE_PLAN)

    @property
    def spec(self) -> JobSpec:
        """The checked job. PlanError with every fault."""
        return load(self.model, *self._overrides, devices=self.devices, device=self.device).spec

    def command(self, name: str) -> str:
        """The command line of a command of this job."""
        sets = " ".join(f"--set {quote(override)}" for override in self._overrides)
        return f"shardwright {name} {self.model} --devices {self.devices} --device {self.device} {sets}"


def script_of(name: str, data: Mapping[str, Any], language: str) -> str:
    """The script that gives the player the data of a figure in a language: pages opened as files may load no JSON."""
    text = json.dumps(spoken(data, language), ensure_ascii=False, separators=(",", ":"))
    return f"(window.playableFigures ??= {{}})[{json.dumps(name)}] = {text};\n"
