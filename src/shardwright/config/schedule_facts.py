"""Pipeline schedules by name: each is described in a file of its own (schedule/generators), and here one asks for it.

Numbers are p ranks of a pipeline, the `rank` of one of them, m microbatches of a step, and v stages a rank. Times are
F, I and W of a microbatch through all layers of a rank: forward, input gradient and weight gradient, and B = I + W.
Each may be an array, with one entry a plan (config/array_math.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from shardwright.config.registry import NameOf, Registry

Numbers = Any


@dataclass(frozen=True, kw_only=True)
class ScheduleFacts:
    """The facts of a schedule, known without making it. A time that has no formula here is played.

    How it is made, from a PipelineShape (schedule/pipeline_shape.py):

    - `make` gives the order of work; `faults` says why a shape is not admitted, each fault with a way out; `admits` of
      (p, m) says the same of many plans; `understands` are fields of a shape that only some schedules read.
    - `place` is where lists show it.

    How stages lie:

    - `stages_per_rank`, 0 for as many as plan.virtual_stages says; `simpler` is then its like for one stage a rank.
    - `placement` of (p, v) gives a StagePlacement; `num_copies` is how often a pipeline holds each stage.
    - `are_alternating`: a rank's two stages take turns with every microbatch.

    How work is ordered:

    - `splits_weights`: weight gradients are computed apart from input gradients.
    - `pairs`: a forward and a backward of two microbatches run as one.
    - `drains`, unless weights are updated while the pipeline is full.
    - `overlaps_steps`: its next step begins before all ranks have ended the one before.

    How long it takes:

    - `bubble` is how long a rank idles in a step, for reading, and `when` the formula holds; `repeated` is the same of
      a step among others with no barrier between, where it is less. `idle_s` of (p, m, v, F, I, W) computes it.
    - `fills_and_drains`: the bubble is a microbatch's way past all other ranks.
    - `message_waits` is how a step waits for messages between stages: 0 as 1F1B does, for each that a receiver waits
      for; 1 at the ends and at each turn of a rank's stages; 2 twice at the ends alone.

    How much it keeps:

    - `alive` of (p, rank, m, v, extra warm-up) is how many microbatches a rank keeps at once, of all its layers.
    - `keeps_as_1f1b`: no rank keeps fewer than under 1F1B; `keeps_unevenly`: they gather in some of a rank's stages.
    - `waiting` of (p, rank, m) are those that it keeps, and those that wait for weight gradients alone, when most wait.
    - `num_gathers` of (p, m, v) is how often a rank gathers its parameters in a step under ZeRO-3, and `num_runs` of
      (p, m) how many stretches of backwards of one stage it has.

    For whom it is: `complexity` is 0 for one pass after the other, 1 for stages in turn, 2 for the rest. A search looks
    at it in the order of `search_place`, or says why `not_searched`.
    """

    name: str
    place: int
    make: Callable[[Any], Any]
    faults: Callable[[Any], list[str]] = lambda shape: []
    admits: Callable[[Numbers, Numbers], Numbers] = lambda p, m: p > 0
    understands: tuple[str, ...] = ()
    stages_per_rank: int = 1
    simpler: str = ""
    placement: Callable[[int, int], Any]
    num_copies: int = 1
    are_alternating: bool = False
    splits_weights: bool = False
    pairs: bool = False
    drains: bool = True
    overlaps_steps: bool = False
    bubble: str = ""
    when: str = ""
    repeated: str = ""
    idle_s: Callable[..., Numbers] | None = None
    fills_and_drains: bool = False
    alive: Callable[..., Numbers]
    keeps_as_1f1b: bool = False
    keeps_unevenly: bool = False
    waiting: Callable[..., tuple[Numbers, Numbers]] | None = None
    num_gathers: Callable[..., Numbers] = lambda p, m, v: 1.0
    num_runs: Callable[..., Numbers] = lambda p, m: 1.0
    message_waits: int = 0
    complexity: int = 2
    search_place: int = 0
    not_searched: str = ""

    @property
    def has_ends_apart(self) -> bool:
        """True where stages lie down the pipeline alone, so that the first and the last are on ranks of their own."""
        return not self.are_alternating and self.num_copies == 1


SCHEDULES: Registry[ScheduleFacts] = Registry("a schedule", "shardwright.schedule.generators", ScheduleFacts)


def searched() -> tuple[str, ...]:
    """Names of the schedules that a search looks at, in its order."""
    candidates = (facts for facts in SCHEDULES.values() if not facts.not_searched)
    return tuple(facts.name for facts in sorted(candidates, key=lambda facts: facts.search_place))


ScheduleName = Annotated[str, NameOf(SCHEDULES)]
