"""The judge of steps: it detects losses and gradient norms that are not finite, and spikes of the loss, and decides how
the run goes on.

It is asked when all gradients are summed and no weight is updated yet. The loss of the step is summed over the ranks at
that time, instead of after the update: so a step can be skipped for its loss without an additional collective. Norm and
loss are the same on every rank, and so is the decision.

After a rewind, an undone step is repeated with the next samples of the data, not with those that it saw: so Chowdhery
et al. 2022 (PaLM, arXiv 2204.02311, section 5.1) got past their spikes. If it is bad again, its update is skipped.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from statistics import median
from typing import Any

from shardwright.config.health import HealthSpec
from shardwright.config.phrase import each, say
from shardwright.config.units import counted, counted_phrase


class Course(Enum):
    """The courses of a run after the loss and the gradient of a step are known. If the schedule drains, all courses but
    GO_ON skip the update of the step."""

    GO_ON = "go on"
    SKIP = "skip"
    REWIND = "rewind"
    STOP = "stop"


@dataclass(frozen=True)
class Decision:
    """A course, the same on every rank. `cause` is "not finite", "spike", "overflow", "no target", or "" if nothing is
    wrong; `sentence` is for the user, or ""; `step` is the number of the step that it is about."""

    course: Course = Course.GO_ON
    cause: str = ""
    sentence: str = ""
    step: int = 0


ALL_IS_WELL = Decision()
# For a step without a loss on any token: the weights can't be updated, and the judge is not asked.
WITHOUT_TARGET = Decision(Course.SKIP, "no target")

# A function that decides on a step, counted from 0, by its loss and its gradient norm, None if there is no norm.
Judge = Callable[[int, float, float | None], Decision]


def go_on(step: int, loss: float, norm: float | None) -> Decision:
    """A judge that lets every step update the weights."""
    return ALL_IS_WELL


TO_NORMAL = 1.4826  # standard deviation over median absolute deviation
LEAST_DEVIATION = 0.005  # as a share of the median
LEAST_LOSSES = 8  # losses that the band needs


class LossBand:
    """The last finite losses, and the band in which the next one is expected. A loss above the band is a spike.

    The band follows from the median of the losses, and from their median absolute deviation times 1.4826, which is the
    standard deviation if losses are normally distributed (Hampel 1974, J. Am. Stat. Assoc. 69). A few outliers change
    neither, so that one spike does not hide the next. The deviation of a nearly constant loss is close to 0, so the
    band uses at least a share of the median instead. While the loss falls, at the beginning of a run, the higher losses
    of the window only widen the band and raise its median.
    """

    def __init__(self, window: int, deviations: float) -> None:
        self._past: deque[float] = deque(maxlen=window)
        self._deviations = deviations

    @property
    def top(self) -> float:
        """The highest loss that is not a spike; infinite until LEAST_LOSSES are known."""
        if len(self._past) < LEAST_LOSSES:
            return math.inf
        middle = median(self._past)
        deviation = TO_NORMAL * median(abs(loss - middle) for loss in self._past)
        return middle + self._deviations * max(deviation, LEAST_DEVIATION * abs(middle))

    @property
    def middle(self) -> float:
        """The median of the last losses; nan if there are none."""
        return median(self._past) if self._past else math.nan

    def is_above(self, loss: float) -> bool:
        """True if a finite loss is a spike."""
        return loss > self.top

    def add(self, loss: float) -> None:
        """Add a loss to the window, if it is finite. Spikes are added, too: a loss that stays as high becomes the new
        median after half a window."""
        if math.isfinite(loss):
            self._past.append(loss)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"past": list(self._past)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint. If its window was longer, only its newest losses are kept."""
        self._past = deque((float(loss) for loss in state["past"]), maxlen=self._past.maxlen)


@dataclass
class StepCounts:
    """The number of events of a run so far: steps skipped for an overflow of fp16 gradients (`overflows`), for a loss,
    norm or weight that is not finite, for a spike, or because none of their tokens has a loss (`without_target`); all
    steps that were not finite, all spikes, and rewinds."""

    overflows: int = 0
    skipped_not_finite: int = 0
    skipped_spikes: int = 0
    not_finite: int = 0
    spikes: int = 0
    rewinds: int = 0
    without_target: int = 0

    @property
    def skipped(self) -> int:
        """The number of steps that changed no weight."""
        return self.overflows + self.skipped_not_finite + self.skipped_spikes + self.without_target

    def sentences(self) -> list[str]:
        """Phrases about the events, for the end of a run."""
        parts = [
            say("{steps} left out for gradients that overflowed", steps=counted_phrase(self.overflows, "step"))
            if self.overflows
            else "",
            say(
                "{steps} not finite ({skipped_not_finite} left out)",
                steps=counted_phrase(self.not_finite, "step"),
                skipped_not_finite=self.skipped_not_finite,
            )
            if self.not_finite
            else "",
            say(
                "{spikes} of the loss ({skipped_spikes} left out)",
                spikes=counted_phrase(self.spikes, "spike"),
                skipped_spikes=self.skipped_spikes,
            )
            if self.spikes
            else "",
            f"{counted(self.rewinds, 'rewind')}" if self.rewinds else "",
            say("{steps} left out for no token of them has a loss", steps=counted_phrase(self.without_target, "step"))
            if self.without_target
            else "",
        ]
        return [part for part in parts if part]


class StepJudge:
    """Decides on each step, and counts its decisions. `learning_rate` is for its sentences."""

    def __init__(self, health: HealthSpec, learning_rate: float, scales_loss: bool, can_skip: bool = True) -> None:
        """`can_skip`: the judge is asked before the update. In a pipeline that never drains it is asked after it."""
        self._health = health
        self._can_skip = can_skip
        self._learning_rate = learning_rate
        self._scales_loss = scales_loss
        self._band = LossBand(health.spike_window, health.spike_deviations)
        self._num_skips_in_a_row = 0  # steps skipped or undone since the last good step
        self._last_bad = -1
        self._undone: set[int] = set()  # steps that a rewind has undone
        self.counts = StepCounts()

    def __call__(self, step: int, loss: float, norm: float | None) -> Decision:
        """The decision on a step, counted from 0. `norm` is None if no norm of all gradients is computed. With a scaled
        loss the norm may overflow; then the step is skipped under any policy."""
        is_overflow = self._scales_loss and math.isfinite(loss) and norm is not None and not math.isfinite(norm)
        if is_overflow:
            self.counts.overflows += 1
            self._band.add(loss)
            return Decision(Course.SKIP, "overflow")
        decision = self._decide(step, loss, norm)
        if decision.cause == "not finite":
            self.counts.not_finite += 1
        if decision.cause == "spike":
            self.counts.spikes += 1
        if decision.course is Course.GO_ON and step >= self._last_bad:
            self._num_skips_in_a_row = 0
        if decision.course is Course.GO_ON or decision.cause == "spike":
            self._band.add(loss)
        return decision

    def weights_not_finite(self, step: int) -> Decision:
        """The decision on a step, counted from 0, whose loss was finite, but whose update left weights that are not
        finite."""
        self.counts.not_finite += 1
        event = say("weights are not finite after step {step}, whose loss was", step=step + 1)
        return replace(self._apply(self._health.not_finite, step, "not finite", event), step=step)

    def rewound(self, bad_step: int) -> None:
        """Note a rewind to a checkpoint because of a step, counted from 0. Call it after `load_state_dict`."""
        self._undone.add(bad_step)
        self.counts.rewinds += 1

    def had_no_target(self) -> None:
        """Note a step that was skipped because none of its tokens has a loss: it shows nothing of the run's health."""
        self.counts.without_target += 1

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {
            "band": self._band.state_dict(),
            "num_skips_in_a_row": self._num_skips_in_a_row,
            "last_bad": self._last_bad,
            "undone": sorted(self._undone),
            "counts": asdict(self.counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint. Undone steps stay known, and so do counts that are higher here: a rewind does
        not forget them."""
        self._band.load_state_dict(state["band"])
        self._num_skips_in_a_row = max(self._num_skips_in_a_row, int(state["num_skips_in_a_row"]))
        self._last_bad = max(self._last_bad, int(state.get("last_bad", -1)))
        self._undone |= {int(step) for step in state["undone"]}
        stored = state["counts"]
        for field in fields(self.counts):
            setattr(self.counts, field.name, max(getattr(self.counts, field.name), int(stored.get(field.name, 0))))

    def _decide(self, step: int, loss: float, norm: float | None) -> Decision:
        if not math.isfinite(loss) or (norm is not None and not math.isfinite(norm)):
            event = say("the loss is {loss} in step {step}", loss=loss, step=step + 1)
            if norm is not None:
                event = say(
                    "the loss is {loss} in step {step} (gradient norm {norm})", loss=loss, step=step + 1, norm=norm
                )
            return self._apply(self._health.not_finite, step, "not finite", event)
        if self._health.spike == "ignore" or not self._band.is_above(loss):
            return ALL_IS_WELL
        event = say(
            "the loss is {loss:.4f} in step {step}, a spike: the last ones have a median of {middle:.4f} and their "
            "band ends at {top:.4f}",
            loss=loss,
            step=step + 1,
            middle=self._band.middle,
            top=self._band.top,
        )
        return self._apply(self._health.spike, step, "spike", event)

    def _apply(self, policy: str, step: int, cause: str, event: str) -> Decision:
        decision = self._by_policy(policy, step, cause, event)
        if decision.course in (Course.SKIP, Course.REWIND):
            return self._bounded(decision, step, event)
        return decision

    def _by_policy(self, policy: str, step: int, cause: str, event: str) -> Decision:
        if policy == "tell":
            return Decision(Course.GO_ON, cause, event)
        if policy == "skip":
            return Decision(Course.SKIP, cause, say("{event}; its update is left out", event=event))
        if policy == "rewind" and step in self._undone:
            if not self._can_skip:
                course = Course.GO_ON if cause == "spike" else Course.STOP
                return Decision(
                    course, cause, say("{event}, as before the rewind; its update was made already", event=event)
                )
            return Decision(
                Course.SKIP, cause, say("{event}, as before the rewind; its update is left out", event=event)
            )
        if policy == "rewind":
            return Decision(
                Course.REWIND, cause, say("{event}; going back to the last healthy checkpoint", event=event)
            )
        return Decision(Course.STOP, cause, each([event, self._way_out()]))

    def _bounded(self, decision: Decision, step: int, event: str) -> Decision:
        """The decision to skip or undo a step, or to stop after too many in a row. Good steps that are repeated after a
        rewind do not count until the run has passed the last bad step."""
        self._num_skips_in_a_row += 1
        self._last_bad = max(self._last_bad, step)
        most_skips = self._health.most_skips
        if self._num_skips_in_a_row > most_skips:
            sentence = say(
                "{event}; {times} in a row before it a step was left out or undone, and health.most_skips is "
                "{most_skips}: {way_out}",
                event=event,
                times=counted_phrase(most_skips, "time"),
                most_skips=most_skips,
                way_out=self._way_out(),
            )
            return Decision(Course.STOP, decision.cause, sentence)
        if decision.course is Course.REWIND:
            return decision
        if decision.cause == "spike":
            self.counts.skipped_spikes += 1
        else:
            self.counts.skipped_not_finite += 1
        return decision

    def _way_out(self) -> str:
        return say(
            "lower optimizer.learning_rate ({learning_rate:g}) or raise optimizer.warmup_steps",
            learning_rate=self._learning_rate,
        )
