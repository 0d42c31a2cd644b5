"""A unit: parameters that are gathered, reduced and updated together, as flat buffers.

Every parameter and every gradient is a view of its unit's buffers, so one collective moves them all, straight into
and out of the memory that the layers compute with. Which buffers a rank holds whole and of which only its shard is
what the stages of ZeRO differ in (Rajbhandari et al. 2020, arXiv 1910.02054, section 5):

    stage   values           gradients                         optimizer state
    0       whole            whole                             whole
    1       whole            whole, its shard is reduced       shard
    2       whole            shard; whole while they arrive    shard
    3       shard; whole while they are used, by layer         shard
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor

from shardwright.parallel.comm.collectives import (
    Axis,
    Pending,
    all_reduce,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from shardwright.parallel.compress.compressor import Compressor
from shardwright.parallel.compress.pack import pack, unpack
from shardwright.parallel.compress.reduction import Reduction
from shardwright.parallel.tensor.parameter import Initial, PlacedParameter, no_memory
from shardwright.parallel.zero.buffers import BufferPool
from shardwright.parallel.zero.master_weights import Masters, ShardPiece, on_host
from shardwright.sharding.buckets import in_unit_order, num_hosted, unit_layout
from shardwright.sharding.flat_buffer import rows_of


@dataclass(frozen=True)
class Sharding:
    """How the replicas of a stage share its state.

    `zero` is the stage of ZeRO. Shards lie on the ranks of `shards`; each shard is held alike by the ranks of
    `copies`, which is of size 1 unless sharding is hybrid. `tp` sums the gradients that its ranks each see a part of.
    """

    zero: int
    shards: Axis
    copies: Axis
    tp: Axis
    compute: torch.dtype = torch.float32
    gradients: torch.dtype = torch.float32  # in which they add up
    reduce: torch.dtype = torch.float32  # in which they travel
    host_share: float = 0.0  # of the optimizer state and float32 weights that is in host memory
    host_values: bool = False  # whether the shards of the values are in host memory (stage 3)

    @property
    def num_shards(self) -> int:
        """Shards of the optimizer state: 1 where every replica holds all of it."""
        return self.shards.size if self.zero else 1


class Unit:
    """The flat buffers of some parameters, and what moves them."""

    def __init__(
        self,
        parameters: Sequence[PlacedParameter],
        sharding: Sharding,
        pool: BufferPool,
        initial: Initial,
        make_compressor: Callable[[], Compressor] | None = None,
    ) -> None:
        """Gives the parameters their initial values, of which only what this rank holds is kept."""
        self.parameters = in_unit_order(parameters, lambda p: p.place)
        self.sharding = sharding
        self._pool = pool
        self.holds = 0  # how many stages want the values kept
        self.missing = 0  # parameters whose gradient of the running backward has not arrived
        self.layout = unit_layout([p.place for p in self.parameters], sharding.num_shards)
        self._offset = dict(zip(self.parameters, self.layout.offsets, strict=True))
        first = (sharding.shards.index if sharding.zero else 0) * self.layout.shard_size
        self._mine = slice(first, first + self.layout.shard_size)
        self._followers: list[tuple[PlacedParameter, PlacedParameter]] = []
        self._gathering: Pending | None = None
        self._reducing: tuple[Pending | Reduction, Tensor, Tensor] | None = None
        self._compressor = make_compressor() if make_compressor is not None else None
        self._has_sum = False
        self._make_buffers(initial)

    def _make_buffers(self, initial: Initial) -> None:
        sharding, size, shard_size = self.sharding, self.layout.size, self.layout.shard_size
        device = self.parameters[0].device
        self._values: Tensor | None = None
        if sharding.zero < 3:
            self._values = torch.zeros(size, dtype=sharding.compute, device=device)
            self.value_shard = self._values[self._mine]
        elif sharding.host_values:
            self.value_shard = on_host(shard_size, sharding.compute, device)
        else:
            self.value_shard = torch.zeros(shard_size, dtype=sharding.compute, device=device)
        self.masters = Masters(self._pieces(), self.value_shard, device)
        self._gradients: Tensor | None = None
        self._gradient_shard: Tensor | None = None
        if sharding.zero < 2:
            self._set_gradients(torch.zeros(size, dtype=sharding.gradients, device=device))
        else:
            self._gradient_shard = torch.zeros(shard_size, dtype=sharding.gradients, device=device)
        for parameter in self.parameters:
            values = initial(parameter.place, device).view(-1)
            offset = self._offset[parameter]
            if self._values is not None:
                self._values[offset : offset + parameter.numel()] = values
            start, stop = self._overlap(parameter, self._mine)
            self.masters.set(start - self._mine.start, values[start - offset : stop - offset])
        self.masters.write_values(self.value_shard)
        self._show()

    def _pieces(self) -> list[ShardPiece]:
        """The shard in pieces that the optimizer treats alike: with decay or without, on the host or the device."""
        shard_size = self.layout.shard_size
        last = max((i for i, p in enumerate(self.parameters) if p.place.init == "normal"), default=-1)
        end_of_decay = self.layout.offsets[last] + self.parameters[last].numel() if last >= 0 else 0
        decayed = min(max(end_of_decay - self._mine.start, 0), shard_size)
        hosted = num_hosted(self.sharding.host_share, shard_size)
        edges = sorted({0, decayed, hosted, shard_size})
        return [ShardPiece(start, stop, stop <= decayed, stop <= hosted) for start, stop in pairwise(edges)]

    def _overlap(self, parameter: PlacedParameter, within: slice) -> tuple[int, int]:
        """The range of the buffer that holds this parameter and lies in `within`; empty if start == stop."""
        offset = self._offset[parameter]
        start = min(max(offset, within.start), within.stop)
        return start, max(start, min(offset + parameter.numel(), within.stop))

    # Values.

    def follow(self, follower: PlacedParameter, leader: PlacedParameter) -> None:
        """`follower` is another use of `leader`, which is in this unit: it shows the same memory."""
        self._followers.append((follower, leader))
        self._show()

    def _show(self) -> None:
        """Make the parameters views of the values; or views of nothing, where these are not here."""
        for parameter in self.parameters:
            if self._values is None:
                parameter.data = no_memory(parameter.shape, parameter.device, self.value_shard.dtype)
                if parameter.float8 is not None:
                    parameter.float8.drop_weight()
            else:
                parameter.data = self._view(self._values, parameter)
        for follower, leader in self._followers:
            follower.data = leader.data

    def _view(self, buffer: Tensor, parameter: PlacedParameter) -> Tensor:
        offset = self._offset[parameter]
        return buffer[offset : offset + parameter.numel()].view(parameter.shape)

    def start_gather(self) -> None:
        """Begin to gather the values, if they are not here or on their way. Moves one all-gather over the shards."""
        if self._values is None and self._gathering is None:
            self._arriving = self._pool.borrow(self.layout.size, self.value_shard.dtype)
            mine = self.value_shard
            if self.sharding.host_values:
                mine = self._arriving[self._mine].copy_(mine, non_blocking=True)
            self._gathering = start_all_gather(self._arriving, mine, self.sharding.shards)

    def finish_gather(self) -> None:
        """Wait until the values are here."""
        if self._gathering is not None:
            self._gathering.wait()
            self._values, self._gathering = self._arriving, None
            self._show()

    def release(self) -> None:
        """Let gathered values go. What is not sharded stays, and what a stage holds."""
        if self.sharding.zero < 3 or self.holds:
            return
        self.finish_gather()
        if self._values is not None:
            gathered, self._values = self._values, None
            self._show()
            self._pool.give_back(gathered)

    # Versions of the values, for pipelines that update without draining. Only without ZeRO.

    def values(self) -> Tensor:
        """The values that the parameters show."""
        assert self._values is not None
        return self._values

    def show(self, values: Tensor) -> None:
        """Let the parameters show another version."""
        self._values = values
        self._show()
        for parameter in self.parameters:
            if parameter.float8 is not None:
                parameter.float8.weight_version += 1  # cast anew: only one version's cast is kept

    def write_to(self, values: Tensor) -> None:
        """Let the next update leave its result in this version."""
        self.masters.write_to(values)
        self.value_shard = values

    # Gradients.

    def _set_gradients(self, gradients: Tensor | None) -> None:
        """Make the parameters' gradients views of this memory, which holds none yet."""
        self._gradients = gradients
        end = 0
        for parameter in self.parameters:
            offset = self._offset[parameter]
            parameter.has_gradient = False
            parameter.gradient = None
            if gradients is not None:
                parameter.gradient = self._view(gradients, parameter)
                gradients[end:offset].zero_()  # padding is summed and updated like the rest: it has to be a number
            end = offset + parameter.numel()
        if gradients is not None:
            gradients[end:].zero_()

    def open(self) -> None:
        """Have memory for gradients that is not just being summed."""
        if self._reducing is not None and self.sharding.zero >= 2:
            self.finish_reduce()
        if self._gradients is None:
            self._set_gradients(self._pool.borrow(self.layout.size, self.sharding.gradients))

    def zero(self) -> None:
        """Begin a step: there are no gradients yet."""
        self._has_sum = False
        for parameter in self.parameters:
            parameter.has_gradient = False

    def start_reduce(self) -> None:
        """Begin to sum the gradients over the replicas.

        Moves one all-reduce without ZeRO, else one reduce-scatter over the shards, or what a compressor makes of it;
        before, where ranks of tp each saw a part of the tokens, an all-reduce of those gradients over tp.
        """
        self.finish_reduce()
        self.open()
        gradients, sharding = self._gradients, self.sharding
        assert gradients is not None
        assert sharding.zero >= 2 or not self._has_sum, "a second reduction in place would count the first sum again"
        for parameter in self.parameters:
            if not parameter.has_gradient:
                assert parameter.gradient is not None
                parameter.gradient.zero_()
        for parts in self._partial_sums():
            self._sum_over_tp(parts)
        source = gradients
        if sharding.reduce != gradients.dtype:
            source = self._pool.borrow(gradients.numel(), sharding.reduce).copy_(gradients)
        out = source if sharding.zero == 0 else self._place_of_sum(source)
        tensors = [self._view(source, parameter) for parameter in self.parameters]
        pending: Pending | Reduction
        if self._compressor is not None and sharding.zero == 0:
            pending = self._compressor.start(source, tensors, sharding.shards)
        elif self._compressor is not None:
            pending = self._compressor.start_scatter(source, tensors, sharding.shards, out)
        elif sharding.zero == 0:
            pending = start_all_reduce(source, sharding.shards)
        else:
            pending = start_reduce_scatter(out, source, sharding.shards)
        self._reducing = pending, source, out

    def _place_of_sum(self, source: Tensor) -> Tensor:
        """Where the sum of this rank's shard is to arrive: where it stays, or aside if it is to be added or rounded."""
        if source is self._gradients and not (self._gradient_shard is not None and self._has_sum):
            return self.summed_gradients()
        return self._pool.borrow(self.layout.shard_size, source.dtype)

    def _partial_sums(self) -> list[list[PlacedParameter]]:
        """Parameters whose gradients are partial sums over tp, neighbours in the buffer together."""
        runs = groupby(self.parameters, lambda p: bool(p.place.summed_over))
        return [list(run) for is_partial, run in runs if is_partial]

    def _sum_over_tp(self, parameters: list[PlacedParameter]) -> None:
        """Sum the gradients of neighbours. Moves one all-reduce of as many elements on every rank of tp."""
        assert self._gradients is not None
        start, last = self._offset[parameters[0]], parameters[-1]
        whole = self._gradients[start : self._offset[last] + last.numel()]
        if len(whole) == sum(p.numel() for p in parameters):
            all_reduce(whole, self.sharding.tp)
            return
        # A shard ends between them, where another rank's does not, for what else they hold is of another size.
        views = [self._view(self._gradients, p) for p in parameters]
        packed = pack(views, whole.dtype)
        all_reduce(packed, self.sharding.tp)
        unpack(packed, views)

    def finish_reduce(self) -> None:
        """Wait until the sum is there. Moves, if sharding is hybrid, an all-reduce of the shard over its copies."""
        if self._reducing is None:
            return
        pending, source, out = self._reducing
        self._reducing = None
        pending.wait()
        all_reduce(out, self.sharding.copies)
        gradients, summed = self._gradients, self.summed_gradients()
        assert gradients is not None
        if out.data_ptr() != summed.data_ptr():
            if self._has_sum:
                summed.add_(out)
            else:
                summed.copy_(out)
            if out is not source:
                self._pool.give_back(out)
        if source is not gradients:
            self._pool.give_back(source)
        if self._gradient_shard is not None:
            self._pool.give_back(gradients)
            self._set_gradients(None)
        self._has_sum = True

    def summed_gradients(self) -> Tensor:
        """This rank's shard of the sum, after `finish_reduce`."""
        if self._gradient_shard is not None:
            return self._gradient_shard
        assert self._gradients is not None
        return self._gradients[self._mine]

    def rows_of_gradient(self, parameter: PlacedParameter) -> Tensor:
        """The rows of a parameter's summed gradient that this rank holds, [rows, row]; there may be none."""
        start, stop = self._overlap(parameter, self._mine)
        shard = self.summed_gradients()[start - self._mine.start : stop - self._mine.start]
        return shard.view(-1, rows_of(parameter.shape)[1])

    @property
    def compression_bytes_saved(self) -> float:
        """This rank's part of what compression kept off the wire so far; the ranks of the axis sum to all of it."""
        return self._compressor.bytes_saved / self.sharding.shards.size if self._compressor is not None else 0.0

    # What is allocated.

    def parameter_memory(self) -> list[Tensor]:
        """Tensors whose memory holds values for good: gathered ones are the pool's."""
        values = [self._values] if self._values is not None and self.sharding.zero < 3 else []
        return [self.value_shard, *values]

    def gradient_memory(self) -> list[Tensor]:
        """Tensors whose memory holds gradients for good: where shards are kept, whole ones are the pool's."""
        held = self._gradients if self._gradient_shard is None else self._gradient_shard
        return [held] if held is not None else []

    def kept_memory(self) -> list[Tensor]:
        """Tensors that stay from step to step beside the state: casts of weights, errors of compression."""
        casts = [tensor for p in self.parameters if p.float8 is not None for tensor in p.float8.memory()]
        return casts + (self._compressor.memory() if self._compressor is not None else [])

    # Update.

    def update(self, factor: float, rate: float) -> None:
        """Step with the summed gradients times `factor`, and begin to gather what the other replicas updated.

        Moves, in stages 1 and 2, one all-gather over the shards.
        """
        self.masters.step(self.summed_gradients(), factor, rate, self._pool)
        self.masters.write_values(self.value_shard)
        if self.sharding.zero in (1, 2):
            assert self._values is not None
            self._arriving = self._values
            self._gathering = start_all_gather(self._values, self.value_shard, self.sharding.shards)
