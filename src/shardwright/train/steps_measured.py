"""Rank 0's measurements of its own steps, to compare with the prediction: seconds, waits, bytes by axis, memory."""

import statistics
from collections import Counter, deque
from dataclasses import dataclass, field

from shardwright.parallel.comm.ledger import Ledger
from shardwright.sharding.memory_account import RankMemory

_WARMING = 2  # first spans of a run, which are not typical of later ones
_KEPT = 4096  # newest spans, over which medians are taken


@dataclass(frozen=True)
class StepsMeasured:
    """One rank's measurements of the steps of this part of a run: median seconds of a step, median seconds blocked by
    axis, bytes of the newest span by axis as the ledger counts them, and memory, None until measured. `device` is the
    catalog's name of the device, empty if it has none."""

    num_steps: int
    step_s: float
    blocked_s: dict[str, float]
    moved: "SpanBytes | None"
    memory: RankMemory | None
    peak_memory_bytes: int
    device: str = ""


@dataclass(frozen=True)
class SpanBytes:
    """Bytes by axis of a span without skipped steps: `num_steps` steps, after the first `first` steps of the run."""

    first: int
    num_steps: int
    axis_bytes: dict[str, int]


@dataclass(frozen=True)
class SpanUse:
    """The mean step of a span: its seconds, and its seconds blocked by axis; and the bytes of the span, None if a step
    was skipped, which moves less."""

    step_s: float
    blocked_s: dict[str, float]
    moved: SpanBytes | None


def span_use(ledger: Ledger, span_s: float, first: int, num_steps: int, *, is_whole: bool) -> SpanUse:
    """The use of a span of `num_steps` steps, from its ledger. The span `is_whole` if no step was skipped."""
    axis_bytes: Counter[str] = Counter()
    for (_, axis), tally in ledger.tallies.items():
        axis_bytes[axis] += tally.num_bytes
    blocked_s = {axis: seconds / num_steps for axis, seconds in ledger.blocked_s().items()}
    span_bytes = SpanBytes(first, num_steps, dict(sorted(axis_bytes.items()))) if is_whole else None
    return SpanUse(span_s / num_steps, blocked_s, span_bytes)


@dataclass
class StepsRecorder:
    """Records the use of the newest spans on a device."""

    device: str = ""
    memory: RankMemory | None = None
    peak_memory_bytes: int = 0
    _warming: list[SpanUse] = field(default_factory=list)
    _spans: deque[SpanUse] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def add(self, span: SpanUse, peak_memory_bytes: int) -> None:
        """Record a finished span, and the peak memory of any rank so far."""
        spans = self._warming if len(self._warming) < _WARMING else self._spans
        spans.append(span)
        self.peak_memory_bytes = max(self.peak_memory_bytes, peak_memory_bytes)

    def measured(self) -> StepsMeasured | None:
        """The medians over the newest spans, or over the last of the first spans if there are no others; None without
        any span."""
        spans = self._spans or self._warming[-1:]
        if not spans:
            return None
        axes = dict.fromkeys(axis for span in spans for axis in span.blocked_s)
        blocked_s = {axis: statistics.median(span.blocked_s.get(axis, 0.0) for span in spans) for axis in axes}
        step_s = statistics.median(span.step_s for span in spans)
        newest_bytes = next((span.moved for span in reversed(spans) if span.moved is not None), None)
        return StepsMeasured(
            len(spans),
            step_s,
            blocked_s,
            moved=newest_bytes,
            memory=self.memory,
            peak_memory_bytes=self.peak_memory_bytes,
            device=self.device,
        )
