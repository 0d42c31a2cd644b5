"""Rank 0's measurements of its own steps, beside the prediction: seconds, waiting, bytes by axis, memory."""

import statistics
from collections import Counter, deque
from dataclasses import dataclass, field

from shardwright.parallel.comm.ledger import Ledger
from shardwright.sharding.memory_account import RankMemory

_WARMING = 2  # steps of a run that say little of the others
_KEPT = 4096  # newest spans, of which medians are taken


@dataclass(frozen=True)
class StepsMeasured:
    """Steps of this part of a run, as one rank saw them: median seconds of one and of those in which it stood still
    for an axis, bytes of the newest span by axis as the ledger counts them, and its memory, once measured. `device` is
    the catalog's name of what computed them, empty if it has none."""

    num_steps: int
    step_s: float
    blocked_s: dict[str, float]
    moved: "SpanBytes | None"
    memory: RankMemory | None
    peak_memory_bytes: int
    device: str = ""


@dataclass(frozen=True)
class SpanBytes:
    """Bytes by axis of a span in which no step was left out: `num_steps` after the `first` of the run."""

    first: int
    num_steps: int
    axis_bytes: dict[str, int]


@dataclass(frozen=True)
class SpanUse:
    """A step of a span, its seconds and those blocked by axis; and the bytes of the span, None where it left a step
    out, which moves less."""

    step_s: float
    blocked_s: dict[str, float]
    moved: SpanBytes | None


def span_use(ledger: Ledger, span_s: float, first: int, num_steps: int, *, is_whole: bool) -> SpanUse:
    """The use in a ledger of a span of so many steps, which is whole if no step was left out."""
    found: Counter[str] = Counter()
    for (_, axis), tally in ledger.tallies.items():
        found[axis] += tally.num_bytes
    blocked_s = {axis: seconds / num_steps for axis, seconds in ledger.blocked_s().items()}
    moved = SpanBytes(first, num_steps, dict(sorted(found.items()))) if is_whole else None
    return SpanUse(span_s / num_steps, blocked_s, moved)


@dataclass
class StepsRecorder:
    """Keeps what the newest spans used on a device, until it is asked for them."""

    device: str = ""
    memory: RankMemory | None = None
    peak_memory_bytes: int = 0
    _warming: list[SpanUse] = field(default_factory=list)
    _spans: deque[SpanUse] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def add(self, span: SpanUse, peak_memory_bytes: int) -> None:
        """A span has ended, with as much memory as any rank has held."""
        into = self._warming if len(self._warming) < _WARMING else self._spans
        into.append(span)
        self.peak_memory_bytes = max(self.peak_memory_bytes, peak_memory_bytes)

    def measured(self) -> StepsMeasured | None:
        """The newest spans, or where there are few the last of the first; None if there were none."""
        spans = self._spans or self._warming[-1:]
        if not spans:
            return None
        axes = dict.fromkeys(axis for span in spans for axis in span.blocked_s)
        blocked_s = {axis: statistics.median(span.blocked_s.get(axis, 0.0) for span in spans) for axis in axes}
        step_s = statistics.median(span.step_s for span in spans)
        moved = next((span.moved for span in reversed(spans) if span.moved is not None), None)
        return StepsMeasured(
            len(spans), step_s, blocked_s, moved=moved, memory=self.memory, peak_memory_bytes=self.peak_memory_bytes,
            device=self.device,
        )  # fmt: skip
