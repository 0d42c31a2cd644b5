"""The memory account of one rank, by kind: the planner's side predicts it, and the runtime measures it."""

from dataclasses import asdict, dataclass, fields

from shardwright.config.phrase import say
from shardwright.config.units import memory_text

# The kinds that lie on the device, by the names of their fields without `_bytes`.
DEVICE_KINDS = {
    "parameters": say("parameters"),
    "gradients": say("gradients"),
    "optimizer": say("optimizer"),
    "activations": say("activations"),
    "buffers": say("buffers"),
    "working": say("working"),
}
KINDS = DEVICE_KINDS | {"host": say("host")}


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank. Optimizer state is Adam's two moments and, unless the weights are float32, master weights.

    Activations are the tensors kept for the backward. Buffers are counted at their peak: gathered parameters, whole
    gradients before they are sharded, reduction buffers, pipeline messages; and the permanent buffers outside the
    state: weights cast to fp8, and the errors of compression. Working memory is the peak of the operators' temporary
    memory; a run does not measure it. Adam's step counters, a few bytes per unit, are not counted. Offloaded bytes are
    `host_bytes` and in no other kind; all the others are on the device.
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
        """The sum of all kinds on the device. Their peaks need not coincide, so the true peak is at most this sum."""
        return self.state_bytes + self.activations_bytes + self.buffers_bytes + self.working_bytes

    def as_dict(self) -> dict[str, int]:
        """For `--json`."""
        return asdict(self) | {"total_bytes": self.total_bytes}

    def __str__(self) -> str:
        """One line, with the kinds that are not 0."""
        kinds = {field.name.removesuffix("_bytes"): getattr(self, field.name) for field in fields(RankMemory)}
        held = tuple(
            say("{kind} {size}", kind=KINDS[kind], size=memory_text(num_bytes))
            for kind, num_bytes in kinds.items()
            if num_bytes
        )
        return say("{total} ({held})", total=memory_text(self.total_bytes), held=held)
