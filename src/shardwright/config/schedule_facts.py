"""The registry of pipeline schedules by name. Each schedule is described in its own file (schedule/generators).

Numbers are p ranks of a pipeline, the `rank` of one of them, m microbatches of a step, and v stages per rank. Times are
F, I and W of a microbatch through all layers of a rank: forward, input gradient and weight gradient, and B = I + W.
Each may be an array with one entry per plan (config/array_math.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from shardwright.config.array_math import most, where
from shardwright.config.registry import NameOf, Registry

Numbers = Any


def waits_of_1f1b(p: Numbers, m: Numbers, v: Numbers, extra_warmup: Numbers) -> Numbers:
    """Messages that 1F1B waits for, one after the other. There is no slack without extra warm-up forwards."""
    return where(extra_warmup > 0, 2.0 * (p - 1), 2.0 * ((p - 1) * m / p + most(0, p - 2)))


@dataclass(frozen=True, kw_only=True)
class ScheduleFacts:
    """The facts of a schedule that are known without making it. A time without a formula here is simulated.

    Construction, from a PipelineShape (schedule/pipeline_shape.py):

    - `make` gives the order of work. `faults` says why a shape is not admitted, each fault with a way out.
      `admits(p, m)` gives the same answer for many plans. `understands` are fields of a shape that only some schedules
      read.
    - `place` orders lists of schedules.

    Placement of stages:

    - `stages_per_rank`; 0 means plan.virtual_stages, and `simpler` is then the like schedule with one stage per rank.
    - `placement(p, v)` gives a StagePlacement; `num_copies` is how often a pipeline holds each stage.
    - `are_alternating`: a rank's two stages take turns with every microbatch.

    Order of work:

    - `splits_weights`: weight gradients are computed separately from input gradients.
    - `pairs`: a forward and a backward of two microbatches run as one action.
    - `drains`: the pipeline drains before weights are updated.
    - `overlaps_steps`: the next step begins before all ranks have ended the step before.

    Time:

    - `bubble` is the text of a formula for the idle time of a rank in a step, and `when` the condition of the formula.
      `repeated` is the formula for a step among others with no barrier between, if that is less.
      `idle_s(p, m, v, F, I, W)` computes the idle time.
    - `fills_and_drains`: the bubble is the time of a microbatch on all other ranks.
    - `num_waits(p, m, v, extra_warmup)` is the number of messages between stages for which a step waits, one after
      the other, if only their receivers wait for them and F = I = W.

    Memory:

    - `alive(p, rank, m, v, extra_warmup)` is the number of microbatches that a rank keeps at once, of all its layers.
    - `keeps_as_1f1b`: no rank keeps fewer than under 1F1B; `keeps_unevenly`: some of a rank's stages keep more.
    - `waiting(p, rank, m)` is (microbatches kept, microbatches that wait only for weight gradients), of all its layers,
      after the input gradient with which most wait.
    - `num_losses(m)` is the number of microbatches whose loss waits for its backward.
    - `num_gathers(p, m, v)` is how often a rank gathers its parameters in a step under ZeRO-3, and `num_runs(p, m)` the
      number of stretches of backwards of one stage.

    Each fact with a default may be left out. A search then takes longer: a step without `idle_s` is simulated, and
    without `fills_and_drains` and `keeps_as_1f1b` bounds exclude fewer plans.

    Search: `complexity` is 0 for one pass after the other, 1 for stages in turn, 2 for all others. A search tries
    schedules in the order of `search_place`; `not_searched` is the reason why it leaves one out. `is_simple`: it is
    also tried for a simpler plan.
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
    num_losses: Callable[[Numbers], Numbers] = lambda m: 1.0
    num_gathers: Callable[..., Numbers] = lambda p, m, v: 1.0
    num_runs: Callable[..., Numbers] = lambda p, m: 1.0
    num_waits: Callable[[Numbers, Numbers, Numbers, Numbers], Numbers] = waits_of_1f1b
    complexity: int = 2
    search_place: int = 0
    not_searched: str = ""
    is_simple: bool = False

    @property
    def has_ends_apart(self) -> bool:
        """True if stages lie down the pipeline in one direction, so that the first and the last stage are on different
        ranks."""
        return not self.are_alternating and self.num_copies == 1


SCHEDULES: Registry[ScheduleFacts] = Registry("a schedule", "shardwright.schedule.generators", ScheduleFacts)


def searched() -> tuple[str, ...]:
    """Names of the schedules that a search tries, in its order."""
    candidates = (facts for facts in SCHEDULES.values() if not facts.not_searched)
    return tuple(facts.name for facts in sorted(candidates, key=lambda facts: facts.search_place))


ScheduleName = Annotated[str, NameOf(SCHEDULES)]
