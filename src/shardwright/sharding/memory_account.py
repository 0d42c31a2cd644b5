"""The memory account of one rank, by kind: predicted by the left wing, measured by the right."""

from dataclasses import asdict, dataclass, fields

from shardwright.config.units import memory_text


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank. Optimizer state is Adam's two moments and, unless the weights are float32, master weights.

    Activations are what is kept for the backward. Buffers are at their peak: gathered parameters, whole gradients on
    their way to shards, what a reduction needs, pipeline messages; and what stays beside the state, weights cast to fp8
    and the errors of compression. Working memory is what operators need at the peak while they run; a run does not
    measure it. Adam's step counters, a few bytes a unit, are not counted. What is offloaded is `host_bytes` and in no
    other kind; the others are on the device.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    buffers_bytes: int
    working_bytes: int = 0
    host_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """The bytes that exist from the first update to the last: parameters, gradients, optimizer."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        """All kinds on the device. Their peaks need not coincide, so the true peak of them is at most this."""
        return self.state_bytes + self.activations_bytes + self.buffers_bytes + self.working_bytes

    def as_dict(self) -> dict[str, int]:
        """For `--json`."""
        return asdict(self) | {"total_bytes": self.total_bytes}

    def __str__(self) -> str:
        """One line, of the kinds that there are."""
        kinds = {field.name.removesuffix("_bytes"): getattr(self, field.name) for field in fields(RankMemory)}
        words = ", ".join(f"{kind} {memory_text(num_bytes)}" for kind, num_bytes in kinds.items() if num_bytes)
        return f"{memory_text(self.total_bytes)} ({words})"
