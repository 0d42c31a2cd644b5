"""The judge of steps: is a loss or a gradient norm no number, is a loss a spike, and what is done about it.

It is asked when all gradients are summed and no weight is changed yet. The loss of the step is summed over the ranks
then, in place of after the update: so a step can be left out for its loss, and no collective is added for that. Norm
and loss are the same on every rank, and with them the decision.

A step that was undone comes again after the rewind, with the samples behind those that it saw: so Chowdhery et al.
2022 (PaLM, arXiv 2204.02311, section 5.1) got past their spikes. If it is bad again, its update is left out.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from shardwright.config.health import HealthSpec
from shardwright.config.units import counted
from shardwright.train.health.decision import ALL_IS_WELL, Course, Decision
from shardwright.train.health.loss_band import LossBand


@dataclass
class StepCounts:
    """How many steps of a run so far were what: left out because a gradient of fp16 overflowed, because something was
    not finite, because of a spike, because no token of it has a loss; not finite and spikes in all; and how often the
    run went back."""

    overflows: int = 0
    skipped_not_finite: int = 0
    skipped_spikes: int = 0
    not_finite: int = 0
    spikes: int = 0
    rewinds: int = 0
    without_target: int = 0

    @property
    def skipped(self) -> int:
        """Steps that changed no weight."""
        return self.overflows + self.skipped_not_finite + self.skipped_spikes + self.without_target

    def sentences(self) -> list[str]:
        """Sentences about the events, for the end of a run."""
        parts = [
            f"{counted(self.overflows, 'step')} left out for gradients that overflowed" if self.overflows else "",
            f"{counted(self.not_finite, 'step')} not finite ({self.skipped_not_finite} left out)"
            if self.not_finite
            else "",
            f"{counted(self.spikes, 'spike')} of the loss ({self.skipped_spikes} left out)" if self.spikes else "",
            f"{counted(self.rewinds, 'rewind')}" if self.rewinds else "",
            f"{counted(self.without_target, 'step')} left out for no token of them has a loss"
            if self.without_target
            else "",
        ]
        return [part for part in parts if part]


class StepJudge:
    """Decides on each step, and counts what it decided. `learning_rate` is for its sentences."""

    def __init__(self, health: HealthSpec, learning_rate: float, scales_loss: bool, can_skip: bool = True) -> None:
        """`can_skip`: it is asked before the update. Else, where the pipeline never drains, after it."""
        self._health = health
        self._can_skip = can_skip
        self._learning_rate = learning_rate
        self._scales_loss = scales_loss
        self._band = LossBand(health.spike_window, health.spike_deviations)
        self._num_bad_in_a_row = 0  # left out or undone, with no good step behind the last of them
        self._last_bad = -1
        self._undone: set[int] = set()  # steps that a rewind has undone
        self.counts = StepCounts()

    def __call__(self, step: int, loss: float, norm: float | None) -> Decision:
        """The decision on a step, counted from 0. `norm` is None where there is no norm of all gradients; the norm of
        a loss that is scaled may overflow, and then the step is left out whatever the policy."""
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
            self._num_bad_in_a_row = 0
        if decision.course is Course.GO_ON or decision.cause == "spike":
            self._band.add(loss)
        return decision

    def weights_not_finite(self, step: int) -> Decision:
        """The decision on a step, counted from 0, whose update was made before anybody was asked, and left weights that
        are not finite."""
        self.counts.not_finite += 1
        what = f"weights are not finite after step {step + 1}, whose loss was"
        return replace(self._apply(self._health.not_finite, step, "not finite", what), step=step)

    def rewound(self, bad_step: int) -> None:
        """The run has gone back to a checkpoint because of a step, counted from 0. Call it after `load_state_dict`."""
        self._undone.add(bad_step)
        self.counts.rewinds += 1

    def had_no_target(self) -> None:
        """A step was left out, for no token of it has a loss: nothing was seen of how the run goes."""
        self.counts.without_target += 1

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {
            "band": self._band.state_dict(),
            "num_skips_in_a_row": self._num_bad_in_a_row,
            "last_bad": self._last_bad,
            "undone": sorted(self._undone),
            "counts": asdict(self.counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. What this run knows of steps that were undone and of bad ones in a row, and its
        counts where they are higher, stay: a rewind forgets none of them."""
        self._band.load_state_dict(state["band"])
        self._num_bad_in_a_row = max(self._num_bad_in_a_row, int(state["num_skips_in_a_row"]))
        self._last_bad = max(self._last_bad, int(state.get("last_bad", -1)))
        self._undone |= {int(step) for step in state["undone"]}
        before = state["counts"]
        for field in fields(self.counts):
            setattr(self.counts, field.name, max(getattr(self.counts, field.name), int(before.get(field.name, 0))))

    def _decide(self, step: int, loss: float, norm: float | None) -> Decision:
        if not math.isfinite(loss) or (norm is not None and not math.isfinite(norm)):
            what = f"the loss is {loss} in step {step + 1}" + (f" (gradient norm {norm})" if norm is not None else "")
            return self._apply(self._health.not_finite, step, "not finite", what)
        if self._health.spike == "ignore" or not self._band.is_above(loss):
            return ALL_IS_WELL
        what = (
            f"the loss is {loss:.4f} in step {step + 1}, a spike: the last ones have a median of "
            f"{self._band.middle:.4f} and their band ends at {self._band.top:.4f}"
        )
        return self._apply(self._health.spike, step, "spike", what)

    def _apply(self, policy: str, step: int, cause: str, what: str) -> Decision:
        decision = self._by_policy(policy, step, cause, what)
        if decision.course in (Course.SKIP, Course.REWIND):
            return self._bounded(decision, step, what)
        return decision

    def _by_policy(self, policy: str, step: int, cause: str, what: str) -> Decision:
        if policy == "tell":
            return Decision(Course.GO_ON, cause, what)
        if policy == "skip":
            return Decision(Course.SKIP, cause, f"{what}; its update is left out")
        if policy == "rewind" and step in self._undone:
            if not self._can_skip:
                course = Course.GO_ON if cause == "spike" else Course.STOP
                return Decision(course, cause, f"{what}, as before the rewind; its update was made already")
            return Decision(Course.SKIP, cause, f"{what}, as before the rewind; its update is left out")
        if policy == "rewind":
            return Decision(Course.REWIND, cause, f"{what}; going back to the last healthy checkpoint")
        return Decision(Course.STOP, cause, f"{what}; {self._way_out()}")

    def _bounded(self, decision: Decision, step: int, what: str) -> Decision:
        """A decision to leave a step out or to undo it, or the end of the run: a good step that comes again after a
        rewind does not make up for the bad one that is still to come."""
        self._num_bad_in_a_row += 1
        self._last_bad = max(self._last_bad, step)
        most = self._health.most_skips
        if self._num_bad_in_a_row > most:
            sentence = (
                f"{what}; {counted(most, 'time')} in a row before it a step was left out or undone, and "
                f"health.most_skips is {most}: {self._way_out()}"
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
        return f"lower optimizer.learning_rate ({self._learning_rate:g}) or raise optimizer.warmup_steps"
