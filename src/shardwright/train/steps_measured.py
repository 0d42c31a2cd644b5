"""What rank 0 saw of its own steps, for whoever predicted them: seconds, waiting, bytes by axis, memory."""

import statistics
from collections import Counter
from dataclasses import dataclass, field

from shardwright.parallel.comm.ledger import Ledger
from shardwright.sharding.memory_account import RankMemory

_WARMING = 2  # steps of a run that say little of the others


@dataclass(frozen=True)
class StepsMeasured:
    """Steps of this part of a run, as one rank saw them: median seconds of one and of those in which it stood still
    for an axis, bytes of one by axis as the ledger counts them, and its memory, once measured."""

    num_steps: int
    step_s: float
    blocked_s: dict[str, float]
    axis_bytes: dict[str, int]
    memory: RankMemory | None
    peak_memory_bytes: int


@dataclass(frozen=True)
class SpanUse:
    """One step of a span: its seconds, those blocked by axis, and bytes by axis."""

    step_s: float
    blocked_s: dict[str, float]
    axis_bytes: dict[str, int]


def span_use(ledger: Ledger, span_s: float, num_steps: int) -> SpanUse:
    """What a ledger says of a span of so many steps."""
    found: Counter[str] = Counter()
    for (_, axis), tally in ledger.tallies.items():
        found[axis] += tally.num_bytes
    blocked_s = {axis: seconds / num_steps for axis, seconds in ledger.blocked_s().items()}
    return SpanUse(span_s / num_steps, blocked_s, {axis: size // num_steps for axis, size in sorted(found.items())})


@dataclass
class StepsRecorder:
    """Keeps what spans used, until it is asked for all of them."""

    memory: RankMemory | None = None
    peak_memory_bytes: int = 0
    _spans: list[SpanUse] = field(default_factory=list)

    def add(self, span: SpanUse, peak_memory_bytes: int) -> None:
        """A span has ended, with as much memory as any rank has held."""
        self._spans.append(span)
        self.peak_memory_bytes = max(self.peak_memory_bytes, peak_memory_bytes)

    def measured(self) -> StepsMeasured | None:
        """All spans, but the first of many; None if there were none."""
        if not self._spans:
            return None
        spans = self._spans[_WARMING:] or self._spans[-1:]
        axes = dict.fromkeys(axis for span in spans for axis in span.blocked_s)
        blocked_s = {axis: statistics.median(span.blocked_s.get(axis, 0.0) for span in spans) for axis in axes}
        step_s = statistics.median(span.step_s for span in spans)
        return StepsMeasured(
            len(spans), step_s, blocked_s, spans[-1].axis_bytes, self.memory, self.peak_memory_bytes
        )  # fmt: skip
