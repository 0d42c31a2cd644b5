"""A unit: parameters that are gathered, reduced and updated together, as flat buffers.

Every parameter and every gradient is a view of its unit's buffers, so one collective moves them all, directly into and
out of the memory that the layers compute with. sharding/zero_events.py says when that happens, and which buffers a rank
holds unsharded; this file says what each event does to tensors.
"""

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise

import torch
from torch import Tensor

from shardwright.parallel.comm.collectives import (
    Pending,
    all_reduce,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from shardwright.parallel.compress.bucket import Bucket
from shardwright.parallel.compress.compressor import Reduction
from shardwright.parallel.compress.wire import pack, unpack
from shardwright.parallel.tensor.initial_values import Initial, in_nf4
from shardwright.parallel.tensor.parameter import PlacedParameter, no_memory
from shardwright.parallel.zero.master_weights import Masters, ShardPiece, on_host
from shardwright.parallel.zero.unit_setting import Sharding, UnitSetting, lent
from shardwright.sharding.buckets import in_unit_order, num_hosted, unit_layout
from shardwright.sharding.buffer_pool import Loan
from shardwright.sharding.flat_buffer import rows_of
from shardwright.sharding.unit_sizes import UnitSizes
from shardwright.sharding.zero_events import UnitEvents


class FlatUnit(UnitEvents[Tensor]):
    """The flat buffers of some parameters, and the effects of ZeRO's events on them."""

    def __init__(
        self,
        parameters: Sequence[PlacedParameter],
        sharding: Sharding,
        setting: UnitSetting,
    ) -> None:
        """Gives the parameters their initial values; only this rank's part of them is kept. All parameters of a unit
        have the same kind of update."""
        self.parameters = in_unit_order(parameters, lambda p: p.place)
        self.sharding = sharding
        places = [parameter.place for parameter in self.parameters]
        self.layout = unit_layout(places, sharding.num_shards)
        self.by_matrix = setting.updates.is_by_matrix(places[0])
        sizes = UnitSizes(
            zero=sharding.zero,
            size=self.layout.size,
            shard_size=self.layout.shard_size,
            compute_bytes=sharding.compute.itemsize,
            gradient_bytes=sharding.gradients.itemsize,
            reduce_bytes=sharding.reduce.itemsize,
            master_bytes=sharding.master.itemsize,
            num_parameters=len(self.parameters),
            num_put_off=sum(parameter.place.is_put_off for parameter in self.parameters),
            is_frozen=places[0].is_frozen,
        )
        super().__init__(sizes, setting.pool)
        self._offset = dict(zip(self.parameters, self.layout.offsets, strict=True))
        first = (sharding.shards.index if sharding.zero else 0) * self.layout.shard_size
        self._shard = slice(first, first + self.layout.shard_size)
        self._followers: list[tuple[PlacedParameter, PlacedParameter]] = []
        self._gathering: tuple[Pending, Tensor] | None = None  # and the memory of the values
        # With the memory of the sum, if the sum is to be moved on from there.
        self._reduction: tuple[Pending | Reduction, Tensor | None] | None = None
        self.compressor = setting.compressor(places)
        self.updated_next: FlatUnit | None = None
        self.look: Callable[[Tensor], None] | None = None  # sees this rank's gradients before they are summed
        self._make_buffers(setting.initial)

    @property
    def name(self) -> str:
        """The names of its first and its last parameter."""
        first, last = self.parameters[0].place.name, self.parameters[-1].place.name
        return first if first == last else f"{first} to {last}"

    @property
    def is_frozen(self) -> bool:
        """True if it has values alone, which no step changes."""
        return self.sizes.is_frozen

    def _make_buffers(self, initial: Initial) -> None:
        sharding, size, shard_size = self.sharding, self.layout.size, self.layout.shard_size
        device = self.parameters[0].device
        self._full_values: Tensor | None = None  # of which the parameters are views
        if sharding.zero < 3:
            self._full_values = torch.zeros(size, dtype=sharding.compute, device=device)
            self.value_shard = self._full_values[self._shard]
        elif sharding.host_values:
            self.value_shard = on_host(shard_size, sharding.compute, device, sharding.link)
        else:
            self.value_shard = torch.zeros(shard_size, dtype=sharding.compute, device=device)
        self.masters = Masters(self._pieces(), self.value_shard, device, sharding.link, sharding.master)
        self._full_gradients: Tensor | None = None  # of which the parameters' gradients are views
        self._gradient_shard: Tensor | None = None
        if self.is_frozen:
            pass
        elif sharding.zero < 2:
            self._accumulate_in(torch.zeros(size, dtype=sharding.gradients, device=device))
        else:
            self._gradient_shard = torch.zeros(shard_size, dtype=sharding.gradients, device=device)
        stored = in_nf4(initial) if self.parameters[0].place.row_format else initial
        for parameter in self.parameters:
            self._write_initial(parameter, stored)
        self.masters.write_values(self.value_shard)
        self._show()

    def _write_initial(self, parameter: PlacedParameter, initial: Initial) -> None:
        """Write the initial values of a parameter: its part in this rank's shard, in float32, and, if this rank holds
        all values, the rest of it."""
        place, offset, first = parameter.place, self._offset[parameter], self._shard.start
        start, stop = self._overlap(parameter, self._shard)
        if start < stop and self.is_frozen:
            initial(place, start - offset, self.value_shard[start - first : stop - first])
        elif start < stop:
            self.masters.fill(start - first, stop - first, lambda i, out: initial(place, first + i - offset, out))
        end = offset + parameter.numel()
        outside_shard = ((offset, min(start, end)), (max(stop, offset), end)) if self._full_values is not None else ()
        for low, high in outside_shard:
            if self._full_values is not None and low < high:
                initial(place, low - offset, self._full_values[low:high])

    def _pieces(self) -> list[ShardPiece]:
        """The pieces of the shard that are updated: each with or without weight decay as a whole, on the host or on the
        device."""
        if self.is_frozen:
            return []
        shard_size = self.layout.shard_size
        last = max((i for i, p in enumerate(self.parameters) if p.place.init == "normal"), default=-1)
        end_of_decay = self.layout.offsets[last] + self.parameters[last].numel() if last >= 0 else 0
        decayed = min(max(end_of_decay - self._shard.start, 0), shard_size)
        hosted = num_hosted(self.sharding.host_share, shard_size)
        edges = sorted({0, decayed, hosted, shard_size})
        return [ShardPiece(start, stop, stop <= decayed, stop <= hosted) for start, stop in pairwise(edges)]

    def _overlap(self, parameter: PlacedParameter, span: slice) -> tuple[int, int]:
        """The part of this parameter's range in the buffer that lies in `span`; empty if start == stop."""
        offset = self._offset[parameter]
        start = min(max(offset, span.start), span.stop)
        return start, max(start, min(offset + parameter.numel(), span.stop))

    def rows_held(self, parameter: PlacedParameter) -> tuple[int, int, int]:
        """The rows [first, end) of a parameter that lie in this rank's shard, and the position in the shard of the
        first one. There may be none."""
        start, stop = self._overlap(parameter, self._shard)
        offset, row_size = self._offset[parameter], rows_of(parameter.shape)[1]
        return (start - offset) // row_size, (stop - offset) // row_size, start - self._shard.start

    def take_up(self) -> None:
        """Compute with the float32 weights, which were set. Moves an all-gather over the shards in ZeRO 1 and 2."""
        self.masters.write_values(self.value_shard)
        if self.sharding.zero in (1, 2):
            self._start_gather(None)
            self._finish_gather()

    # Values.

    def follow(self, follower: PlacedParameter, leader: PlacedParameter) -> None:
        """Make `follower` share the memory of `leader`, which is in this unit: it is another use of the same values."""
        self._followers.append((follower, leader))
        self._show()

    def _show(self) -> None:
        """Make the parameters views of the values; or without memory, if the values are not here now."""
        for parameter in self.parameters:
            if self._full_values is None:
                parameter.data = no_memory(parameter.shape, parameter.device, self.value_shard.dtype)
                if parameter.float8 is not None:
                    parameter.float8.drop_weight()
            else:
                parameter.data = self._view(self._full_values, parameter)
        for follower, leader in self._followers:
            follower.data = leader.data

    def _view(self, buffer: Tensor, parameter: PlacedParameter) -> Tensor:
        offset = self._offset[parameter]
        return buffer[offset : offset + parameter.numel()].view(parameter.shape)

    def _start_gather(self, values: Loan[Tensor] | None) -> None:
        shard, full = self.value_shard, self._full_values
        if values is not None:
            full = lent(values, self.layout.size, shard.dtype)
            if self.sharding.host_values:
                shard = full[self._shard].copy_(shard, non_blocking=True)
        assert full is not None
        self._gathering = start_all_gather(full, shard, self.sharding.shards), full

    def _finish_gather(self) -> None:
        assert self._gathering is not None
        pending, self._full_values = self._gathering
        self._gathering = None
        pending.wait()
        self._show()

    def _drop_values(self) -> None:
        self._full_values = None
        self._show()

    # Versions of the values, for pipelines that update without draining; only without ZeRO.

    def values(self) -> Tensor:
        """The values of which the parameters are views."""
        assert self._full_values is not None
        return self._full_values

    def show(self, values: Tensor) -> None:
        """Make the parameters views of another version."""
        self._full_values = values
        self._show()
        for parameter in self.parameters:
            if parameter.float8 is not None:
                parameter.float8.weight_changed()  # to be cast again: only one version's cast is kept

    def write_to(self, values: Tensor) -> None:
        """Let the next update write its result to this version."""
        self.masters.write_to(values)
        self.value_shard = values

    # Gradients.

    def _accumulate_in(self, gradients: Tensor | None) -> None:
        """Make the parameters' gradients views of this memory, which holds no gradients yet."""
        self._full_gradients = gradients
        end = 0
        for parameter in self.parameters:
            offset = self._offset[parameter]
            parameter.has_gradient = False
            parameter.gradient = None
            if gradients is not None:
                parameter.gradient = self._view(gradients, parameter)
                gradients[end:offset].zero_()  # padding: it is summed and updated too, so it must be finite
            end = offset + parameter.numel()
        if gradients is not None:
            gradients[end:].zero_()

    def _open_gradients(self, gradients: Loan[Tensor]) -> None:
        self._accumulate_in(lent(gradients, self.layout.size, self.sharding.gradients))

    def clear_gradients(self) -> None:
        """Begin a step: there are no gradients yet."""
        super().clear_gradients()
        for parameter in self.parameters:
            parameter.has_gradient = False

    def _start_reduce(self, cast: Loan[Tensor] | None, aside: Loan[Tensor] | None) -> None:
        """Begin to sum the gradients over the replicas.

        Moves one all-reduce without ZeRO, else one reduce-scatter over the shards, or the messages of a compressor;
        and before, for gradients of which ranks of tp each saw a part of the tokens, an all-reduce over tp.
        """
        gradients, sharding = self._full_gradients, self.sharding
        assert gradients is not None
        for parameter in self.parameters:
            if not parameter.has_gradient:
                assert parameter.gradient is not None
                parameter.gradient.zero_()
        if self.look is not None:
            self.look(gradients)
        for parts in self._partial_sums():
            self._sum_over_tp(parts)
        source = gradients
        if cast is not None:
            source = lent(cast, self.layout.size, sharding.reduce).copy_(gradients)
        out = source if sharding.zero == 0 else self.summed_gradients()
        if aside is not None:
            out = lent(aside, self.layout.shard_size, sharding.reduce)
        tensors = [self._view(source, parameter) for parameter in self.parameters]
        pending: Pending | Reduction
        if self.compressor is not None and sharding.zero == 0:
            pending = self.compressor.start(source, tensors, sharding.shards)
        elif self.compressor is not None:
            pending = self.compressor.start_scatter(source, tensors, sharding.shards, out)
        elif sharding.zero == 0:
            pending = start_all_reduce(source, sharding.shards)
        else:
            pending = start_reduce_scatter(out, source, sharding.shards)
        stays = (cast if sharding.zero == 0 else aside) is None
        self._reduction = pending, None if stays else out

    def _partial_sums(self) -> list[list[PlacedParameter]]:
        """Parameters whose gradients are partial sums over tp, grouped into neighbours in the buffer."""
        runs = groupby(self.parameters, lambda p: bool(p.place.summed_over))
        return [list(run) for is_partial, run in runs if is_partial]

    def _sum_over_tp(self, parameters: list[PlacedParameter]) -> None:
        """Sum the gradients of neighbours over tp. Moves one all-reduce, of the same size on every rank of tp."""
        assert self._full_gradients is not None
        start, last = self._offset[parameters[0]], parameters[-1]
        gradients = self._full_gradients[start : self._offset[last] + last.numel()]
        if len(gradients) == sum(p.numel() for p in parameters):
            all_reduce(gradients, self.sharding.tp)
            return
        # There is padding at a shard's end between them, which other ranks, whose units differ in size, may not have.
        views = [self._view(self._full_gradients, p) for p in parameters]
        packed = pack(views, gradients.dtype)
        all_reduce(packed, self.sharding.tp)
        unpack(packed, views)

    def _finish_reduce(self, has_sum: bool) -> None:
        assert self._reduction is not None
        (pending, out), summed = self._reduction, self.summed_gradients()
        self._reduction = None
        pending.wait()
        all_reduce(summed if out is None else out, self.sharding.copies)
        if out is not None:
            summed.add_(out) if has_sum else summed.copy_(out)

    def _drop_gradients(self) -> None:
        self._accumulate_in(None)

    def summed_gradients(self) -> Tensor:
        """This rank's shard of the summed gradients, after `finish_reduce`."""
        if self._gradient_shard is not None:
            return self._gradient_shard
        assert self._full_gradients is not None
        return self._full_gradients[self._shard]

    def rows_of_gradient(self, parameter: PlacedParameter) -> Tensor:
        """The rows of a parameter's summed gradient that this rank holds, [rows, row]; there may be none."""
        start, stop = self._overlap(parameter, self._shard)
        shard = self.summed_gradients()[start - self._shard.start : stop - self._shard.start]
        return shard.view(-1, rows_of(parameter.shape)[1])

    def held_values(self, parameter: PlacedParameter) -> tuple[int, Tensor]:
        """The values of a parameter that this rank holds permanently: the index of the first, and all, flat."""
        if self._full_values is not None and self.sharding.zero < 3:
            return 0, parameter.data.reshape(-1)
        start, stop = self._overlap(parameter, self._shard)
        return start - self._offset[parameter], self.value_shard[start - self._shard.start : stop - self._shard.start]

    def bucket(self) -> Bucket:
        """The layout of its parameters in the buffer that the replicas sum."""
        offsets, lengths = self.layout.offsets, tuple(p.numel() for p in self.parameters)
        shards, is_scattered = self.sharding.shards, self.sharding.zero > 0
        return Bucket(self.layout.size, tuple(offsets), lengths, shards.size, shards.index, is_scattered)

    @property
    def compression_bytes_saved(self) -> float:
        """This rank's part of the bytes that compression saved on the wire; the parts of the axis add up to all."""
        return self.compressor.bytes_saved / self.sharding.shards.size if self.compressor is not None else 0.0

    def rescale_errors(self, factor: float) -> None:
        """Multiply the errors of compression: the next gradients are scaled by so much more than the last ones."""
        if self.compressor is not None:
            self.compressor.rescale_errors(self.bucket(), self.parameters[0].device, factor)

    # Memory.

    def parameter_memory(self) -> list[Tensor]:
        """Tensors whose memory holds values permanently. The memory of gathered values belongs to the pool."""
        values = [self._full_values] if self._full_values is not None and self.sharding.zero < 3 else []
        return [self.value_shard, *values]

    def gradient_memory(self) -> list[Tensor]:
        """Tensors whose memory holds gradients permanently. If shards are kept, full gradients belong to the pool."""
        gradients = self._full_gradients if self._gradient_shard is None else self._gradient_shard
        return [gradients] if gradients is not None else []

    def kept_memory(self) -> list[Tensor]:
        """Tensors that stay from step to step besides the state: casts of weights, errors of compression."""
        casts = [tensor for p in self.parameters if p.float8 is not None for tensor in p.float8.memory()]
        return casts + (self.compressor.method.state_tensors() if self.compressor is not None else [])

    # Update.

    def _begin_update(self, gradients: Loan[Tensor] | None, factor: float, rate: float) -> None:
        exact = None if gradients is None else lent(gradients, self.layout.shard_size, torch.float32)
        if (following := self.updated_next) is not None and gradients is None:
            following.masters.send_ahead(following.summed_gradients(), factor)
        self.masters.begin_step(self.summed_gradients(), factor, rate, exact)

    def _end_update(self) -> None:
        self.masters.end_step()
        self.masters.write_values(self.value_shard)
