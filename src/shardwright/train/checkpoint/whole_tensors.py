"""Checks that the boxes in a checkpoint's indices tile their tensors, and that the tensors are those that a run writes.

Boxes tile a tensor if every element lies in exactly one of them. A comparison of all pairs of boxes would take
quadratic time, and a mark per element would take as much memory as the index claims. Instead, an element at (i, j, ...)
stands for the term x^i y^j ..., and a box for the sum of its elements' terms, a product of geometric series. The boxes
tile the tensor if and only if their sums add up to the tensor's sum as polynomials, because the coefficient of a term
counts how often its element occurs. The two polynomials are compared at a random point modulo a prime (Schwartz 1980,
J. ACM 27(4)): different polynomials agree there with a probability of at most their degree over the prime,
8 x 2^62 / 2^127. Torch is not needed.
"""

from collections.abc import Sequence
from secrets import randbelow

from shardwright.config import largest
from shardwright.config.optimizer import ADAMW, OptimizerSpec
from shardwright.config.phrase import any_of, say
from shardwright.sharding.optimizer_state import FACTORS, STATES, states_of
from shardwright.sharding.parameter_shard import Box
from shardwright.sharding.row_boxes import num_elements_of
from shardwright.train.checkpoint.manifest import BrokenCheckpointError, FileIndex, StoredBox

_WEIGHTS = "weights"
_FLOAT32, _BF16 = "F32", "BF16"
_PRIME = 2**127 - 1


def whole_tensors(indices: list[FileIndex]) -> dict[str, list[tuple[StoredBox, str]]]:
    """The boxes of each tensor, by name, with their files. BrokenCheckpointError if the boxes do not tile a tensor."""
    tensors: dict[str, list[tuple[StoredBox, str]]] = {}
    for index in indices:
        for stored in index.boxes:
            tensors.setdefault(stored.name, []).append((stored, index.file))
    for name, boxes in tensors.items():
        first = boxes[0][0]
        if any((stored.full_shape, stored.dtype) != (first.full_shape, first.dtype) for stored, _ in boxes):
            raise BrokenCheckpointError(say("{name} has another shape or number type in another file", name=name))
        if not tile([stored.box for stored, _ in boxes], first.full_shape):
            raise BrokenCheckpointError(
                say("{name} {shape} is not all there, each element once", name=name, shape=list(first.full_shape))
            )
    return tensors


def tile(boxes: Sequence[Box], full_shape: tuple[int, ...]) -> bool:
    """True if every element of a tensor lies in exactly one of the boxes. No box may reach outside the tensor."""
    full_box: Box = tuple((0, size) for size in full_shape)
    if len(boxes) == 1 or sum(map(num_elements_of, boxes)) != num_elements_of(full_box):
        return list(boxes) == [full_box]
    point = [2 + randbelow(_PRIME - 2) for _ in full_shape]
    return sum(_terms(box, point) for box in boxes) % _PRIME == _terms(full_box, point)


def _terms(box: Box, point: Sequence[int]) -> int:
    """The sum of a box's terms at a point, times a factor that is equal for all boxes."""
    total = 1
    for (start, stop), x in zip(box, point, strict=True):
        total = total * (pow(x, stop, _PRIME) - pow(x, start, _PRIME)) % _PRIME
    return total


def check_kinds(indices: list[FileIndex], optimizer_steps: int, optimizer: OptimizerSpec = ADAMW) -> None:
    """Check that the tensors are those that a run writes: the weights and, once the optimizer has done a step, its
    state of each weight; all in float32, or weights and moments in bf16. Raises BrokenCheckpointError."""
    tensors = {stored.name: stored for index in indices for stored in index.boxes}
    prefix = f"{_WEIGHTS}."
    weights = {name.removeprefix(prefix): stored for name, stored in tensors.items() if name.startswith(prefix)}
    for name, stored in tensors.items():
        kind, _, parameter = name.partition(".")
        if kind in STATES and parameter not in weights:
            raise BrokenCheckpointError(
                say("it has {name}, and no {weights}.{parameter}", name=name, weights=_WEIGHTS, parameter=parameter)
            )
        if kind in (_WEIGHTS, *STATES, "float8", "compression"):
            dtypes = (_FLOAT32, _BF16) if kind in (_WEIGHTS, *STATES) and kind not in FACTORS else (_FLOAT32,)
            if stored.dtype not in dtypes:
                raise BrokenCheckpointError(
                    say(
                        "{name} is of number type {dtype}, and is written as {dtypes}",
                        name=name,
                        dtype=stored.dtype,
                        dtypes=any_of(dtypes),
                    )
                )
        if kind == "float8" and not (len(stored.full_shape) == 1 and 0 < stored.full_shape[0] <= largest.HISTORY + 1):
            raise BrokenCheckpointError(
                say("{name} is {shape}, and no history of amaxes", name=name, shape=list(stored.full_shape))
            )
    for parameter, stored in sorted(weights.items()):
        expected = states_of(optimizer, parameter, stored.full_shape) if optimizer_steps else ()
        for state in STATES:
            if (f"{state}.{parameter}" in tensors) != (state in expected):
                name = f"{state}.{parameter}"
                fault = say(
                    "its optimizer, {optimizer}, has done {steps:,} steps, and it has {name}",
                    optimizer=optimizer.name,
                    steps=optimizer_steps,
                    name=name,
                )
                if state in expected:
                    fault = say(
                        "its optimizer, {optimizer}, has done {steps:,} steps, and it has no {name}",
                        optimizer=optimizer.name,
                        steps=optimizer_steps,
                        name=name,
                    )
                raise BrokenCheckpointError(fault)
