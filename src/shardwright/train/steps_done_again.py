"""Steps that a run does a second time, because it resumed from a checkpoint before them: are their losses the same?

Weights, optimizer, data order and random numbers all come from the checkpoint, so under the same plan the losses are
equal bit for bit.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from shardwright.config.phrase import say
from shardwright.config.units import counted_phrase


@dataclass(frozen=True)
class DoneAgain:
    """Steps `first` to `last`, done before and after a resume, and the largest difference of their losses in nats a
    token; None if one of two had no loss."""

    first: int
    last: int
    bit_exact: bool
    largest_loss_difference: float | None

    def as_dict(self) -> dict[str, object]:
        """The entry of metrics.jsonl."""
        return asdict(self)

    def __str__(self) -> str:
        num_steps = self.last - self.first + 1
        steps = (
            f"step {self.first}" if num_steps == 1 else say("steps {first} to {last}", first=self.first, last=self.last)
        )
        if self.bit_exact:
            return say(
                "{steps} done again: the loss of {count} is equal, bit for bit",
                steps=steps,
                count=counted_phrase(num_steps, "step"),
            )
        difference = self.largest_loss_difference
        size = (
            say("one of two has no loss")
            if difference is None
            else say("losses differ by up to {difference:.2e}", difference=difference)
        )
        return say("{steps} done again, and not bit for bit: {size}", steps=steps, size=size)


class StepsDoneAgain:
    """Compares losses with those that the same steps had before the run resumed, `earlier` by step."""

    def __init__(self, earlier: Mapping[int, float | None]) -> None:
        self._earlier = dict(earlier)
        self._pairs: dict[int, tuple[float | None, float | None]] = {}

    def see(self, step: int, loss: float | None) -> DoneAgain | None:
        """Take the loss of a step. Returns the comparison at the last of the earlier steps."""
        if step not in self._earlier:
            return None
        self._pairs[step] = (self._earlier.pop(step), loss)
        return None if self._earlier else self.compared()

    def compared(self) -> DoneAgain | None:
        """The comparison of the steps that were seen since the last one; None without any."""
        pairs, self._pairs = self._pairs, {}
        if not pairs:
            return None
        differences = [
            abs(before - after) for before, after in pairs.values() if before is not None and after is not None
        ]
        return DoneAgain(
            first=min(pairs),
            last=max(pairs),
            bit_exact=all(before == after for before, after in pairs.values()),
            largest_loss_difference=max(differences) if len(differences) == len(pairs) else None,
        )
