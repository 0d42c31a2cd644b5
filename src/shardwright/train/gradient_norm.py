"""The global norm of the gradients, for clipping."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shardwright.parallel.comm.collectives import all_reduce
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.parallel.zero.flat_unit import FlatUnit
from shardwright.parallel.zero.sharded_stage import ShardedStage
from shardwright.parallel.zero.unit_setting import Sharding

_EPSILON = 1e-6  # as torch's clip_grad_norm_ adds to a norm, by which it divides


def clip_factor(clip_norm: float, norm: float) -> float:
    """The factor that clips gradients of a `norm` to `clip_norm`; 1 if that is 0, which does not clip."""
    return min(1.0, clip_norm / (norm + _EPSILON)) if clip_norm > 0 else 1.0


class GradientNorm:
    """The norm of the whole model's gradient, over all axes of the mesh.

    Each parameter of the model has a slot, and one rank counts each element: of a shard the first rank that holds it,
    of an unsharded state the first replica, of a tied embedding the first stage. Slots are summed in the order of the
    model, so the norm does not depend on the split into stages, to the last bit. If several tp ranks hold a copy, the
    other ranks add it times 0: that changes nothing, unless a copy is not finite.
    """

    def __init__(
        self,
        counted_parameters: dict[int, tuple[ShardedStage, list[PlacedParameter]]],
        num_parameters: Sequence[int],
        mesh: Mesh,
    ) -> None:
        """`counted_parameters` are, by stage of this rank, the stage's state and its parameters in the order of the
        model. `num_parameters` has the number of parameters of each stage of the model."""
        self._mesh = mesh
        starts = [0, *accumulate(num_parameters)]
        self._num_slots = starts[-1]
        self._slots: list[tuple[int, FlatUnit, PlacedParameter, float]] = [
            (starts[stage] + i, shards.unit_of(parameter), parameter, float(is_first_of_line(parameter, mesh)))
            for stage, (shards, parameters) in counted_parameters.items()
            for i, parameter in enumerate(parameters)
            if not parameter.place.is_frozen and _is_first(shards.unit_of(parameter).sharding)
        ]

    def __call__(self) -> float:
        """The norm of the summed gradients, the same on every rank. Moves one small all-reduce over the world."""
        return self._mesh.to_host(self.on_device())

    def on_device(self) -> Tensor:
        """The norm as a tensor on the device, so that the host does not wait for it."""
        return self._norm_and_sums(())[0]

    def with_sums(self, numbers: Sequence[float]) -> tuple[float, list[float]]:
        """The norm, and the sums of some numbers over all ranks, in the same all-reduce."""
        norm, sums = self._norm_and_sums(numbers)
        norm_and_sums = torch.cat((norm.double()[None], sums))
        host_norm, *host_sums = self._mesh.numbers_or_ones(norm_and_sums)
        # A dry run has no values: its sums are the numbers of this rank alone.
        return host_norm, list(numbers) if norm_and_sums.is_meta else host_sums

    def _norm_and_sums(self, numbers: Sequence[float]) -> tuple[Tensor, Tensor]:
        squares = torch.zeros(self._num_slots + len(numbers), dtype=torch.float64, device=self._mesh.device)
        for number, value in enumerate(numbers):
            squares[self._num_slots + number] = value
        if self._mesh.world.kind == "cuda":
            self._put_squares_at_once(squares)
        else:
            self._put_squares(squares)
        all_reduce(squares, self._mesh.world)
        # In float32, so that the last bits of sums, which depend on their order, do not reach the weights.
        return squares[: self._num_slots].sum().sqrt().float(), squares[self._num_slots :]

    def _put_squares(self, squares: Tensor) -> None:
        """Put the square of this rank's part of each parameter's norm into the parameter's slot."""
        for slot, unit, parameter, weight in self._slots:
            rows = unit.rows_of_gradient(parameter)
            # Norms of rows in float32, their sum in float64: exact enough without a float64 copy of the gradient. Ranks
            # never split a row, so the sharding of the gradient does not change the norms of rows.
            lengths = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)
            squares[slot] = torch.linalg.vector_norm(lengths, dtype=torch.float64).square() * weight

    def _put_squares_at_once(self, squares: Tensor) -> None:
        """Put the same squares with few kernels: five kernels for each parameter took longer to launch than to run."""
        blocks = [(slot, unit.rows_of_gradient(parameter), weight) for slot, unit, parameter, weight in self._slots]
        blocks = sorted((block for block in blocks if len(block[1])), key=lambda block: _place(block[1]))
        if not blocks:
            return
        slots, weights = [slot for slot, _, _ in blocks], [weight for _, _, weight in blocks]
        lengths: list[Tensor] = []
        for group in _adjacent_groups([rows for _, rows, _ in blocks]):
            first, num_rows = group[0], [len(rows) for rows in group]
            joined = first.as_strided((sum(num_rows), first.shape[1]), (first.shape[1], 1))
            lengths += torch.linalg.vector_norm(joined, dim=-1, dtype=torch.float32).split(num_rows)
        norms = torch.stack(torch._foreach_norm(lengths, 2, dtype=torch.float64))
        # CUDA copies unpinned memory at once, so the host does not wait for the launched kernels.
        slot, weight = torch.tensor([slots, weights], dtype=torch.float64).to(squares.device, non_blocking=True)
        squares.index_copy_(0, slot.long(), norms.square() * weight)


def _place(rows: Tensor) -> tuple[int, int]:
    """The place of rows in memory: their storage, and their first element in it."""
    return rows.untyped_storage()._cdata, int(rows.storage_offset())


def _adjacent_groups(blocks: Sequence[Tensor]) -> list[list[Tensor]]:
    """Blocks of rows in groups: the blocks of a group follow each other in one storage and have rows of one width."""
    groups: list[list[Tensor]] = []
    for rows in blocks:
        last = groups[-1][-1] if groups else None
        if (
            last is not None
            and last.shape[1] == rows.shape[1]
            and _place(rows) == (_place(last)[0], last.storage_offset() + last.numel())
        ):
            groups[-1].append(rows)
        else:
            groups.append([rows])
    return groups


def _is_first(sharding: Sharding) -> bool:
    """True if this rank is the first of the ranks that hold the same part of the state."""
    return sharding.copies.index == 0 and (sharding.num_shards > 1 or sharding.shards.index == 0)


def is_first_of_line(parameter: PlacedParameter, mesh: Mesh) -> bool:
    """True if this rank holds its own tensor-parallel part of the parameter, or is the first tp rank with a copy."""
    tp = mesh.expert_tp if parameter.place.is_expert else mesh.tp
    return tp.index == 0 or tp.name in parameter.place.sharded_over
