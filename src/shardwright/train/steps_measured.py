"""Measurements of a run, to compare with the prediction: a rank's own steps (seconds, waits, bytes by axis), and the
memory of every pipeline rank."""

import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import torch

from shardwright.config.phrase import say
from shardwright.config.units import memory_text
from shardwright.parallel.comm.collectives import all_reduce
from shardwright.parallel.comm.ledger import Ledger
from shardwright.sharding.memory_account import KINDS, RankMemory
from shardwright.train.build import Replica

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


def span_bytes(ledger: Ledger, first: int, num_steps: int) -> SpanBytes:
    """The bytes of a span of `num_steps` steps, from its ledger."""
    axis_bytes: Counter[str] = Counter()
    for (_, axis), tally in ledger.tallies.items():
        axis_bytes[axis] += tally.num_bytes
    return SpanBytes(first, num_steps, dict(sorted(axis_bytes.items())))


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


def measure_memory(replica: Replica) -> list[RankMemory]:
    """The memory of every pipeline rank, in the first replica and tensor-parallel rank; the same list on every rank.

    Call it after the first update. Activations count as 0: to measure them would take as long as a step. Moves one
    small all-reduce over the world.
    """
    own_bytes, mesh = astuple(replica.memory()), replica.mesh
    values = torch.zeros(mesh.pp.size, len(own_bytes), dtype=torch.int64)
    if mesh.is_first_replica:
        values[mesh.pp.index] = torch.tensor(own_bytes)
    rows = mesh.on_host(all_reduce(values.to(mesh.device), mesh.world)).tolist()
    return [RankMemory(*row) for row in rows]


def predicted_lines(predicted: Sequence[RankMemory]) -> list[str]:
    """The lines of predicted memory, before the run."""
    return [
        say("pp rank {rank} will hold {memory}", rank=rank, memory=str(memory)) for rank, memory in _shown(predicted)
    ]


def measured_lines(predicted: Sequence[RankMemory], measured: Sequence[RankMemory]) -> list[str]:
    """The lines of measured memory, after the first update: the memory that stays, and differences from the prediction.

    Only the buffers of the pool are measured, not messages and the memory of collectives.
    """
    lines: list[str] = []
    for rank, memory in _shown(measured):
        held: list[str] = []
        for kind in ("parameters", "gradients", "optimizer", "host"):
            num_bytes = getattr(memory, f"{kind}_bytes")
            predicted_bytes = getattr(predicted[rank], f"{kind}_bytes") if predicted else num_bytes
            if num_bytes or predicted_bytes:
                held.append(say("{kind} {size}", kind=KINDS[kind], size=memory_text(num_bytes)))
                if num_bytes != predicted_bytes:
                    held.append(say("predicted {size}", size=memory_text(predicted_bytes)))
        held.append(say("pool of buffers {size}", size=memory_text(memory.buffers_bytes)))
        line = say("pp rank {rank} holds {held}", rank=rank, held=tuple(held))
        as_predicted = predicted and memory.state_bytes == predicted[rank].state_bytes
        lines.append(say("{line}; state as predicted", line=line) if as_predicted else line)
    return lines


def _shown(memory: Sequence[RankMemory]) -> list[tuple[int, RankMemory]]:
    """All pipeline ranks with their memory, or in a long pipeline only the rank with most memory."""
    ranks = list(enumerate(memory))
    return ranks if len(ranks) <= 8 else [max(ranks, key=lambda entry: entry[1].total_bytes)]
