"""The global norm of the gradients, which clips them."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shardwright.parallel.comm.collectives import all_reduce
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.parallel.zero.flat_unit import FlatUnit, Sharding
from shardwright.parallel.zero.sharded_stage import ShardedStage


class GradientNorm:
    """The norm of the whole model's gradient, right across all axes.

    Each parameter of the model has a slot, and each element is counted by one rank: shards by the first rank that holds
    them, what is whole by the first replica, a tied embedding by the first stage. The slots are summed in the order of
    the model, so the norm does not depend on how the pipeline is cut, to the last bit. What other ranks of a tp line
    hold as well is looked at too, and counts as 0 times what it is: nothing, unless it is not finite.
    """

    def __init__(
        self, counted: dict[int, tuple[ShardedStage, list[PlacedParameter]]], num_parameters: Sequence[int], mesh: Mesh
    ) -> None:
        """`counted`: by stage, the parameters that this rank counts its part of, in order of the model.

        `num_parameters` are those of each stage of the model.
        """
        self._mesh = mesh
        starts = [0, *accumulate(num_parameters)]
        self._num_slots = starts[-1]
        self._slots: list[tuple[int, FlatUnit, PlacedParameter, float]] = [
            (starts[stage] + i, shards.unit_of(parameter), parameter, float(is_first_of_line(parameter, mesh)))
            for stage, (shards, parameters) in counted.items()
            for i, parameter in enumerate(parameters)
            if _is_first(shards.unit_of(parameter).sharding)
        ]

    def __call__(self) -> float:
        """The norm of the summed gradients, the same on every rank. Moves one small all-reduce over the world."""
        return self._mesh.to_host(self.on_device())

    def on_device(self) -> Tensor:
        """The norm, as `__call__` gives it, where the host need not wait for it yet."""
        return self._summed(())[0]

    def with_sums(self, numbers: Sequence[float]) -> tuple[float, list[float]]:
        """The norm, and the sums over all ranks of some numbers, which go along."""
        norm, sums = self._summed(numbers)
        summed = torch.cat((norm.double()[None], sums))
        first, *others = self._mesh.numbers_or_ones(summed)
        return first, list(numbers) if summed.is_meta else others  # without values: as if no other rank had any

    def _summed(self, numbers: Sequence[float]) -> tuple[Tensor, Tensor]:
        squares = torch.zeros(self._num_slots + len(numbers), dtype=torch.float64, device=self._mesh.device)
        for number, value in enumerate(numbers):
            squares[self._num_slots + number] = value
        if self._mesh.world.kind == "cuda":
            self._put_squares_at_once(squares)
        else:
            self._put_squares(squares)
        all_reduce(squares, self._mesh.world)
        # In float32, so that the last bits of sums in another order do not reach the weights.
        return squares[: self._num_slots].sum().sqrt().float(), squares[self._num_slots :]

    def _put_squares(self, squares: Tensor) -> None:
        """The squares of this rank's part of each parameter's norm."""
        for slot, unit, parameter, weight in self._slots:
            rows = unit.rows_of_gradient(parameter)
            # Rows in float32, then their norms in float64: exact enough, and no float64 copy of the gradient is made.
            # Rows are never split over ranks, so how the gradient is sharded makes no difference to their norms.
            lengths = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)
            squares[slot] = torch.linalg.vector_norm(lengths, dtype=torch.float64).square() * weight

    def _put_squares_at_once(self, squares: Tensor) -> None:
        """Put those squares with few kernels: five a parameter took longer to launch than to run."""
        held = [(slot, unit.rows_of_gradient(parameter), weight) for slot, unit, parameter, weight in self._slots]
        held = sorted(((slot, rows, weight) for slot, rows, weight in held if len(rows)), key=lambda of: _place(of[1]))
        if not held:
            return
        slots, weights = [slot for slot, _, _ in held], [weight for _, _, weight in held]
        lengths: list[Tensor] = []
        for neighbours in _neighbours([rows for _, rows, _ in held]):
            first, num_rows = neighbours[0], [len(rows) for rows in neighbours]
            together = first.as_strided((sum(num_rows), first.shape[1]), (first.shape[1], 1))
            lengths += torch.linalg.vector_norm(together, dim=-1, dtype=torch.float32).split(num_rows)
        norms = torch.stack(torch._foreach_norm(lengths, 2, dtype=torch.float64))
        # From memory that is not pinned CUDA takes a copy at once, and the host does not wait for what was launched.
        slot, weight = torch.tensor([slots, weights], dtype=torch.float64).to(squares.device, non_blocking=True)
        squares.index_copy_(0, slot.long(), norms.square() * weight)


def _place(rows: Tensor) -> tuple[int, int]:
    """Where rows lie: in which memory, and from which element on."""
    return rows.untyped_storage()._cdata, int(rows.storage_offset())


def _neighbours(blocks: Sequence[Tensor]) -> list[list[Tensor]]:
    """Blocks of rows, those together that follow each other in one memory and have rows of one width."""
    found: list[list[Tensor]] = []
    for rows in blocks:
        last = found[-1][-1] if found else None
        if (
            last is not None
            and last.shape[1] == rows.shape[1]
            and _place(rows) == (_place(last)[0], last.storage_offset() + last.numel())
        ):
            found[-1].append(rows)
        else:
            found.append([rows])
    return found


def _is_first(sharding: Sharding) -> bool:
    """True if this rank is the first of those that hold the same part of the state."""
    return sharding.copies.index == 0 and (sharding.num_shards > 1 or sharding.shards.index == 0)


def is_first_of_line(parameter: PlacedParameter, mesh: Mesh) -> bool:
    """True if this rank holds a part of its own of what tensor parallel cuts, or is the first that holds it whole."""
    tp = mesh.expert_tp if parameter.place.is_expert else mesh.tp
    return tp.index == 0 or tp.name in parameter.place.sharded_over
