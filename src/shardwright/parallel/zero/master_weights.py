"""The weights of one shard that the optimizer updates; on the device, on the host, or partly on each.

Updates are far smaller than the weights, and 16 bits would round them away. So if the model computes in 16 bits, the
optimizer has a float32 copy of its own (Micikevicius et al. 2018, arXiv 1710.03740, section 3.1). If it computes in
float32, or a job wants no copy (precision.master), the values themselves are updated.

Weights on the host are updated there, by the CPU (Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840, section 4.1):
gradients are copied to the host, and new values back. On a GPU the copies of one unit overlap with the CPU's update of
another: the next unit's gradients and the last unit's values are copied meanwhile (parallel/zero/host_link.py).

Some optimizers update whole matrices, whose rows lie on several ranks. Such an optimizer first applies its rule for
each element, which transforms the gradients in place, on the host or the device. Then all ranks together make steps
from the transformed gradients, on the device, and the steps are subtracted from the weights.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardwright.parallel.device_streams import Event
from shardwright.parallel.optimizers.elementwise import ElementwiseOptimizer
from shardwright.parallel.zero.host_link import HostLink


class MakeOptimizer(Protocol):
    """Makes an optimizer of two lists of flat tensors: weights with decay, and weights without. If `by_matrix`, it only
    applies the rule that precedes steps of whole matrices."""

    def __call__(
        self, decayed: list[Tensor], plain: list[Tensor], *, by_matrix: bool = False
    ) -> ElementwiseOptimizer: ...


class MatrixSteps(Protocol):
    """Makes steps of whole matrices in place, from the transformed gradients of shards (`Masters.step_buffer`): a step
    times the learning rate is what an update subtracts from the weights."""

    def __call__(self, master_weights: Sequence["Masters"], scratch: Tensor) -> None: ...

    def memory(self) -> list[Tensor]:
        """The state on the device."""
        ...

    def go_on_after(self, number: int, device: torch.device) -> None:
        """Continue as after `number` steps: with no state after 0 steps, else with memory for the state."""


@dataclass(frozen=True)
class ShardPiece:
    """The elements [start, stop) of a shard; `decays` if they have weight decay, `on_host` if the host holds their
    state."""

    start: int
    stop: int
    decays: bool
    on_host: bool


def on_host(size: int, dtype: torch.dtype, device: torch.device, link: HostLink | None) -> Tensor:
    """Zeros in host memory, pinned if there is a link to the device; without memory in a dry run."""
    if link is not None:
        return link.empty((size,), dtype).zero_()
    return torch.zeros(size, dtype=dtype, device=device if device.type == "meta" else None)


class Masters:
    """The weights of a shard that are updated, and their optimizer."""

    def __init__(
        self,
        pieces: list[ShardPiece],
        values: Tensor,
        device: torch.device,
        link: HostLink | None = None,
        number: torch.dtype = torch.float32,
    ) -> None:
        """`values` is the shard that the model computes with, and `number` the number type of what is updated. There is
        a `link` if host and device have separate memory."""
        self._pieces = pieces
        self._device, self._link, self._number = device, link, number
        is_master, values_on_host = values.dtype == number, link is not None and link.is_on_host(values)
        # On a CPU host and device share memory, but offloaded weights are copied all the same.
        self._are_values = [is_master and piece.on_host == values_on_host for piece in pieces]
        self.tensors = [
            values[piece.start : piece.stop].detach() if same else self._empty(piece)
            for piece, same in zip(pieces, self._are_values, strict=True)
        ]
        self._host_gradients = {
            i: on_host(piece.stop - piece.start, torch.float32, device, link)
            for i, piece in enumerate(pieces)
            if piece.on_host
        }
        self.optimizer: ElementwiseOptimizer | None = None
        self.steps: MatrixSteps | None = None
        # Of the step under way, on the device: transformed gradients, then the steps that are made from them.
        self.step_buffer = torch.empty(0)
        self._sent_ahead: Event | None = None  # the end of the copy of gradients that were sent ahead

    def _empty(self, piece: ShardPiece) -> Tensor:
        size = piece.stop - piece.start
        if piece.on_host:
            return on_host(size, self._number, self._device, self._link)
        return torch.zeros(size, dtype=self._number, device=self._device)

    def make_optimizer(self, make: MakeOptimizer, by_matrix: bool = False, steps: MatrixSteps | None = None) -> None:
        """Make the optimizer; if ranks make `steps` together, its rule precedes them."""
        self.steps = steps
        decayed = [tensor for piece, tensor in zip(self._pieces, self.tensors, strict=True) if piece.decays]
        plain = [tensor for piece, tensor in zip(self._pieces, self.tensors, strict=True) if not piece.decays]
        self.optimizer = make(decayed, plain, by_matrix=by_matrix)

    def fill(self, start: int, stop: int, write: Callable[[int, Tensor], None]) -> None:
        """Set the elements [start, stop): `write` is given the index of a first element and the memory from it on."""
        for tensor, first, part in self._pieces_in_range(start, stop):
            write(first, tensor[part])

    def _pieces_in_range(self, start: int, stop: int) -> Iterator[tuple[Tensor, int, slice]]:
        """The tensors of the pieces that have some of the elements [start, stop), with the first of these and their
        range in the tensor."""
        for piece, tensor in zip(self._pieces, self.tensors, strict=True):
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                yield tensor, first, slice(first - piece.start, last - piece.start)

    # The state for a checkpoint: by name, "weights" or a name of the optimizer's, a flat tensor as long as the shard.

    def state_names(self) -> list[str]:
        """The names of the state: "weights", and the optimizer's moments once it has done a step."""
        return ["weights", *(self.moment_names() if self.num_steps() else ())]

    def moment_names(self) -> tuple[str, ...]:
        """The names of the optimizer's moments, which it keeps for each element."""
        assert self.optimizer is not None
        return self.optimizer.names

    def num_steps(self) -> int:
        """The number of steps that the optimizer has done."""
        assert self.optimizer is not None
        return self.optimizer.num_steps

    def copy_out(self, name: str, start: int, stop: int) -> Tensor:
        """A copy, in host memory, of elements [start, stop) of a state. On CUDA it is complete once the current stream
        has done its work so far."""
        make = torch.empty if self._link is None else self._link.empty
        out = make((stop - start,), dtype=self._dtype_of(name))
        for tensor, first, part in self._pieces_in_range(start, stop):
            values = self._state(name, tensor)[part]
            out[first - start :][: len(values)].copy_(values, non_blocking=True)
        return out

    def copy_in(self, name: str, start: int, values: Tensor) -> None:
        """Set the elements of a state from `start` on, rounded to its number type. The state exists from now on."""
        for tensor, first, part in self._pieces_in_range(start, start + values.numel()):
            target = self._state(name, tensor)[part]
            target.copy_(values[first - start :][: len(target)])

    def set_num_steps(self, number: int) -> None:
        """Let the optimizer continue as after `number` steps; after 0 steps it has no state. Elements of the state that
        were not copied in, such as padding, are zeros."""
        assert self.optimizer is not None
        self.optimizer.go_on_after(number)
        if self.steps is not None:
            self.steps.go_on_after(number, self._device)

    def count_after(self, start: int, stop: int, number: int) -> None:
        """Let the optimizer count the steps of elements [start, stop) from after step `number`: they were not trained
        before."""
        assert self.optimizer is not None and self.steps is None, "whole matrices have one count of steps"
        for tensor, _, part in self._pieces_in_range(start, stop):
            self.optimizer.count_after(tensor, part.start, part.stop, number)

    def _state(self, name: str, tensor: Tensor) -> Tensor:
        assert self.optimizer is not None
        return tensor if name == "weights" else self.optimizer.moment(tensor, name)

    def _dtype_of(self, name: str) -> torch.dtype:
        """The number type of a state."""
        assert self.optimizer is not None
        return self._number if name == "weights" else self.optimizer.moments

    def write_to(self, values: Tensor) -> None:
        """Let updates write to other values, with which the model computes from now on."""
        for piece, tensor, same in zip(self._pieces, self.tensors, self._are_values, strict=True):
            if same:
                tensor.data = values[piece.start : piece.stop]

    def step(self, gradients: Tensor, factor: float, rate: float) -> None:
        """Update this shard, each element by itself, on the host or device where it lies."""
        assert self.steps is None
        self.begin_step(gradients, factor, rate)
        self.end_step()

    def send_ahead(self, gradients: Tensor, factor: float) -> None:
        """Begin to copy float32 gradients, times `factor`, to the host, for the step that begins next."""
        if self._host_gradients and self._link is not None:
            self._sent_ahead = self._send(gradients if factor == 1.0 else gradients.mul_(factor))

    def begin_step(self, gradients: Tensor, factor: float, rate: float, exact: Tensor | None = None) -> None:
        """Update with `gradients` times `factor`, or transform them for matrix steps. If the gradients are not float32,
        the product is written to `exact`. The gradients may be overwritten."""
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if exact is not None:
            gradients = torch.mul(gradients, factor, out=exact)
        elif factor != 1.0 and self._sent_ahead is None:
            gradients.mul_(factor)
        self._assign_gradients(gradients)
        self.optimizer.step()
        if self.steps is not None:
            self._bring_back(gradients)
            self.step_buffer = gradients

    def end_step(self) -> None:
        """Apply the matrix steps, if there are any, and drop the gradients."""
        if self.steps is not None:
            self._assign_gradients(self.step_buffer)
            self._apply_steps()
            self.step_buffer = torch.empty(0)
        for tensor in self.tensors:
            tensor.grad = None

    def _assign_gradients(self, gradients: Tensor) -> None:
        """Give each piece its gradients, on the host or on the device."""
        for i, (piece, tensor) in enumerate(zip(self._pieces, self.tensors, strict=True)):
            tensor.grad = self._host_gradients[i] if piece.on_host else gradients[piece.start : piece.stop]
        if not self._host_gradients:
            return
        copy_end = self._sent_ahead or self._send(gradients)
        self._sent_ahead = None
        if copy_end is not None and self._link is not None:
            self._link.wait_for(copy_end)  # the CPU reads the copies

    def _send(self, gradients: Tensor) -> Event | None:
        """Copy gradients to the pieces on the host. Returns the event of the last copy's end, if they come from a
        device."""
        copy_end = None
        for i, host_gradient in self._host_gradients.items():
            gradient = gradients[self._pieces[i].start : self._pieces[i].stop]
            if self._link is not None:
                copy_end = self._link.send(host_gradient, gradient)
            else:
                host_gradient.copy_(gradient)
        return copy_end

    def _bring_back(self, gradients: Tensor) -> None:
        """Copy the gradients that the host has transformed back to the device."""
        for i, gradient in self._host_gradients.items():
            gradients[self._pieces[i].start : self._pieces[i].stop].copy_(gradient, non_blocking=True)

    @torch.no_grad()
    def _apply_steps(self) -> None:
        """Decay the weights, and subtract the steps that `_assign_gradients` gave them."""
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            for tensor in group["params"]:
                tensor.mul_(1.0 - group["lr"] * group["weight_decay"]).sub_(tensor.grad, alpha=group["lr"])

    def squares(self, start: int, stop: int) -> Tensor:
        """The sum of the squares of weights [start, stop), on the device."""
        total = torch.zeros((), device=self._device)
        for tensor, _, part in self._pieces_in_range(start, stop):
            total += torch.linalg.vector_norm(tensor[part], dtype=torch.float32).square().to(self._device)
        return total

    def write_values(self, values: Tensor) -> None:
        """Give the model the new weights, rounded to its number type."""
        for piece, tensor, same in zip(self._pieces, self.tensors, self._are_values, strict=True):
            if not same and piece.on_host and self._link is not None and not self._link.is_on_host(values):
                self._link.bring(values[piece.start : piece.stop], tensor)
            elif not same:
                values[piece.start : piece.stop].copy_(tensor, non_blocking=True)

    def memory(self, on_host: bool) -> list[Tensor]:
        """The optimizer's tensors on the host or on the device: weights and moments, and on the host gradients too."""
        weights = [tensor for piece, tensor in zip(self._pieces, self.tensors, strict=True) if piece.on_host == on_host]
        states = [self.optimizer.state.get(tensor, {}) for tensor in weights] if self.optimizer is not None else []
        moments = [t for state in states for t in state.values() if torch.is_tensor(t) and t.numel() > 1]
        factors = self.steps.memory() if self.steps is not None and not on_host else []
        return [*weights, *moments, *factors, *(self._host_gradients.values() if on_host else ())]
