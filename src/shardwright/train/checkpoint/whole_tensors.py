"""True if the boxes that files say they hold are tensors that a run can take up: whole, and each of its kind.

Boxes tile a tensor where every element lies in exactly one of them. To compare each box with each would take quadratic
time, and to mark elements as much memory as the tensor says it has. Here instead each element at (i, j, ...) stands for
the term x^i y^j ..., and a box for the sum of its terms, a product of geometric series. Boxes tile the tensor if and
only if their sums add up to the tensor's as polynomials, for a term's coefficient is how often its element is there.
Two polynomials are compared at a random point modulo a prime (Schwartz 1980, J. ACM 27(4)): different ones agree there
with a chance of at most their degree over the prime, 8 x 2^62 / 2^127. Torch is not needed.
"""

from collections.abc import Sequence
from secrets import randbelow

from shardwright.config import largest
from shardwright.config.optimizer import ADAMW, OptimizerSpec
from shardwright.sharding.optimizer_state import FACTORS, STATES, states_of
from shardwright.sharding.parameter_shard import Box
from shardwright.sharding.row_boxes import num_elements_of
from shardwright.train.checkpoint.manifest import BrokenCheckpointError, FileIndex, StoredBox

_WEIGHTS = "weights"
_FLOAT32, _BF16 = "F32", "BF16"
_PRIME = 2**127 - 1


def whole_tensors(indices: list[FileIndex]) -> dict[str, list[tuple[StoredBox, str]]]:
    """The boxes of each tensor, by name, with their files. BrokenCheckpointError where they are not all of it, once."""
    found: dict[str, list[tuple[StoredBox, str]]] = {}
    for index in indices:
        for stored in index.boxes:
            found.setdefault(stored.name, []).append((stored, index.file))
    for name, boxes in found.items():
        first = boxes[0][0]
        if any((one.full_shape, one.dtype) != (first.full_shape, first.dtype) for one, _ in boxes):
            raise BrokenCheckpointError(f"{name} has another shape or number type in another file")
        if not tile([one.box for one, _ in boxes], first.full_shape):
            raise BrokenCheckpointError(f"{name} {list(first.full_shape)} is not all there, each element once")
    return found


def tile(boxes: Sequence[Box], full_shape: tuple[int, ...]) -> bool:
    """True if every element of a tensor lies in exactly one of the boxes, which end inside it."""
    whole: Box = tuple((0, size) for size in full_shape)
    if len(boxes) == 1 or sum(map(num_elements_of, boxes)) != num_elements_of(whole):
        return list(boxes) == [whole]
    point = [2 + randbelow(_PRIME - 2) for _ in full_shape]
    return sum(_terms(box, point) for box in boxes) % _PRIME == _terms(whole, point)


def _terms(box: Box, point: Sequence[int]) -> int:
    """The sum of a box's terms at a point, times a factor that is the same for all boxes."""
    total = 1
    for (start, stop), x in zip(box, point, strict=True):
        total = total * (pow(x, stop, _PRIME) - pow(x, start, _PRIME)) % _PRIME
    return total


def check_kinds(
    indices: list[FileIndex], optimizer_steps: int, optimizer: OptimizerSpec = ADAMW
) -> None:  # fmt: skip
    """BrokenCheckpointError where tensors are not what a run writes: the weights and, once the optimizer has done a
    step, all that it remembers of each of them; in float32, or moments in bf16."""
    tensors = {stored.name: stored for index in indices for stored in index.boxes}
    start = f"{_WEIGHTS}."
    weights = {name.removeprefix(start): of for name, of in tensors.items() if name.startswith(start)}
    for name, stored in tensors.items():
        kind, _, of = name.partition(".")
        if kind in STATES and of not in weights:
            raise BrokenCheckpointError(f"it has {name}, and no {_WEIGHTS}.{of}")
        if kind in (_WEIGHTS, *STATES, "float8", "compression"):
            may_be = (_FLOAT32, _BF16) if kind in STATES and kind not in FACTORS else (_FLOAT32,)
            if stored.dtype not in may_be:
                raise BrokenCheckpointError(
                    f"{name} is of number type {stored.dtype}, and is written as {' or '.join(may_be)}"
                )
        if kind == "float8" and not (len(stored.full_shape) == 1 and 0 < stored.full_shape[0] <= largest.HISTORY + 1):
            raise BrokenCheckpointError(f"{name} is {list(stored.full_shape)}, and no history of amaxes")
    done = f"its optimizer, {optimizer.name}, has done {optimizer_steps:,} steps"
    for of, stored in sorted(weights.items()):
        expected = states_of(optimizer, of, stored.full_shape) if optimizer_steps else ()
        for state in STATES:
            if (f"{state}.{of}" in tensors) != (state in expected):
                has = "has no" if state in expected else "has"
                raise BrokenCheckpointError(f"{done}, and it {has} {state}.{of}")
