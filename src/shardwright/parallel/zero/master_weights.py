"""The weights that the optimizer updates, in float32, of one shard; on the device, on the host, or some of each.

Updates are far smaller than the weights, and 16 bits would round them away: where the model computes in 16 bits, the
optimizer has a float32 copy of its own (Micikevicius et al. 2018, arXiv 1710.03740, section 3.1). Where it computes
in float32, the values themselves are updated, and there is no copy.

What is on the host is updated there, by the CPU (Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840, section 4.1): its
gradients go over, its new values come back. On a GPU the copies of one unit run while the CPU updates another: of the
next one gradients are on their way, and of the last one values (parallel/zero/host_link.py).

Some optimizers look at whole matrices, whose rows lie on several ranks. What they do with each element is done first,
wherever it lies, and turns the gradients; these come back to the device, where all ranks make steps of them together;
and the steps go to the weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardwright.parallel.device_streams import Event
from shardwright.parallel.optimizers.elementwise import ElementwiseOptimizer
from shardwright.parallel.zero.host_link import HostLink


class MakeOptimizer(Protocol):
    """Makes an optimizer of two lists of flat tensors: weights that decay, and weights that do not. It is what goes
    before steps of whole matrices, if it is `by_matrix`."""

    def __call__(
        self, decayed: list[Tensor], plain: list[Tensor], *, by_matrix: bool = False
    ) -> ElementwiseOptimizer: ...


class MatrixSteps(Protocol):
    """A maker of steps of whole matrices: from the gradients that shards have turned, in place, to the difference of
    their weights, but for the learning rate."""

    def __call__(self, shards: Sequence["Masters"], scratch: Tensor) -> None: ...

    def memory(self) -> list[Tensor]:
        """The state on the device."""
        ...

    def go_on_after(self, number: int, device: torch.device) -> None:
        """Continue as after so many steps: after none with nothing remembered, else with memory for it."""


@dataclass(frozen=True)
class ShardPiece:
    """The elements [start, stop) of a shard: whether their weights decay, and whether the host holds their state."""

    start: int
    stop: int
    decays: bool
    on_host: bool


def on_host(size: int, dtype: torch.dtype, device: torch.device, link: HostLink | None) -> Tensor:
    """Zeros in host memory, pinned where there is a link to the device; without memory in a dry run."""
    if link is not None:
        return link.empty((size,), dtype).zero_()
    return torch.zeros(size, dtype=dtype, device=device if device.type == "meta" else None)


class Masters:
    """Float32 weights of a shard and their optimizer."""

    def __init__(
        self, pieces: list[ShardPiece], values: Tensor, device: torch.device, link: HostLink | None = None
    ) -> None:
        """`values` is the shard that the model computes with; there is a `link` where the host has memory of its
        own."""
        self._pieces = pieces
        self._device, self._link = device, link
        is_exact, values_on_host = values.dtype == torch.float32, link is not None and link.is_on_host(values)
        # On a CPU one memory is host and device: what is offloaded there is copied all the same.
        self._are_values = [is_exact and piece.on_host == values_on_host for piece in pieces]
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
        self.turned = torch.empty(0)  # gradients of the step under way, on the device
        self._sent: Event | None = None  # when gradients that were sent ahead are there

    def _empty(self, piece: ShardPiece) -> Tensor:
        size = piece.stop - piece.start
        if piece.on_host:
            return on_host(size, torch.float32, self._device, self._link)
        return torch.zeros(size, dtype=torch.float32, device=self._device)

    def make_optimizer(self, make: MakeOptimizer, by_matrix: bool = False, steps: MatrixSteps | None = None) -> None:
        """Let `make` make the optimizer; where there are `steps` that ranks make together, it goes before them."""
        self.steps = steps
        decayed = [tensor for piece, tensor in zip(self._pieces, self.tensors, strict=True) if piece.decays]
        plain = [tensor for piece, tensor in zip(self._pieces, self.tensors, strict=True) if not piece.decays]
        self.optimizer = make(decayed, plain, by_matrix=by_matrix)

    def fill(self, start: int, stop: int, write: Callable[[int, Tensor], None]) -> None:
        """Set the elements [start, stop): `write` is given the number of one and the memory from there on."""
        for piece, tensor in zip(self._pieces, self.tensors, strict=True):
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                write(first, tensor[first - piece.start : last - piece.start])

    # What a checkpoint is made of: by name, "weights" or as the optimizer calls it, a flat tensor as long as the shard.

    def state_names(self) -> list[str]:
        """The name "weights", and those of what the optimizer remembers of each element, once it has done a step."""
        return ["weights", *(self.moment_names() if self.num_steps() else ())]

    def moment_names(self) -> tuple[str, ...]:
        """The names of what the optimizer remembers of each element."""
        assert self.optimizer is not None
        return self.optimizer.names

    def num_steps(self) -> int:
        """Steps that the optimizer has done."""
        assert self.optimizer is not None
        return self.optimizer.num_steps

    def copy_out(self, name: str, start: int, stop: int) -> Tensor:
        """A copy, in host memory, of elements [start, stop); on CUDA it is there once the stream has come so far."""
        make = torch.empty if self._link is None else self._link.empty
        out = make((stop - start,), dtype=self._number_of(name))
        for piece, tensor in zip(self._pieces, self.tensors, strict=True):
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                values = self._state(name, tensor)[first - piece.start : last - piece.start]
                out[first - start : last - start].copy_(values, non_blocking=True)
        return out

    def copy_in(self, name: str, start: int, values: Tensor) -> None:
        """Set the elements from `start` on, rounded to the optimizer's numbers. It has what it calls so from now on."""
        for piece, tensor in zip(self._pieces, self.tensors, strict=True):
            first, last = max(start, piece.start), min(start + values.numel(), piece.stop)
            if first < last:
                into = self._state(name, tensor)[first - piece.start : last - piece.start]
                into.copy_(values[first - start : last - start])

    def set_num_steps(self, number: int) -> None:
        """Let the optimizer go on as after so many steps. What nothing was copied into is zeros: there is padding.
        After no step it begins without any."""
        assert self.optimizer is not None
        self.optimizer.go_on_after(number)
        if self.steps is not None:
            self.steps.go_on_after(number, self._device)

    def count_after(self, start: int, stop: int, number: int) -> None:
        """Let the optimizer count its steps with the elements [start, stop) from behind step `number` on: they were not
        trained before."""
        assert self.optimizer is not None and self.steps is None, "whole matrices have one count of steps"
        for piece, tensor in zip(self._pieces, self.tensors, strict=True):
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                self.optimizer.count_after(tensor, first - piece.start, last - piece.start, number)

    def _state(self, name: str, tensor: Tensor) -> Tensor:
        assert self.optimizer is not None
        return tensor if name == "weights" else self.optimizer.moment(tensor, name)

    def _number_of(self, name: str) -> torch.dtype:
        """The number type of a state."""
        assert self.optimizer is not None
        return torch.float32 if name == "weights" else self.optimizer.moments

    def write_to(self, values: Tensor) -> None:
        """From now on these are the values that the model computes with."""
        for piece, tensor, same in zip(self._pieces, self.tensors, self._are_values, strict=True):
            if same:
                tensor.data = values[piece.start : piece.stop]

    def step(self, gradients: Tensor, factor: float, rate: float) -> None:
        """Update this shard by itself, where each element is."""
        assert self.steps is None
        self.begin_step(gradients, factor, rate)
        self.end_step()

    def send_ahead(self, gradients: Tensor, factor: float) -> None:
        """Begin to bring float32 gradients, times `factor`, to the host, for the step that begins next."""
        if self._host_gradients and self._link is not None:
            self._sent = self._send(gradients if factor == 1.0 else gradients.mul_(factor))

    def begin_step(self, gradients: Tensor, factor: float, rate: float, exact: Tensor | None = None) -> None:
        """Update with `gradients` times `factor`, or turn them into what steps are made of; where they are not float32,
        the product is put in `exact`. The gradients may be overwritten."""
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if exact is not None:
            gradients = torch.mul(gradients, factor, out=exact)
        elif factor != 1.0 and self._sent is None:
            gradients.mul_(factor)
        self._hand_out(gradients)
        self.optimizer.step()
        if self.steps is not None:
            self._take_back(gradients)
            self.turned = gradients

    def end_step(self) -> None:
        """Take the steps that were made of what this shard has turned off the weights."""
        if self.steps is not None:
            self._hand_out(self.turned)
            self._take_off()
            self.turned = torch.empty(0)
        for tensor in self.tensors:
            tensor.grad = None

    def _hand_out(self, gradients: Tensor) -> None:
        """Give each piece its gradients, where it lies."""
        for i, (piece, tensor) in enumerate(zip(self._pieces, self.tensors, strict=True)):
            tensor.grad = self._host_gradients[i] if piece.on_host else gradients[piece.start : piece.stop]
        if not self._host_gradients:
            return
        sent = self._sent or self._send(gradients)
        self._sent = None
        if sent is not None:
            sent.synchronize()  # the CPU reads what was copied

    def _send(self, gradients: Tensor) -> Event | None:
        """Copy gradients to the pieces on the host. Returns when those of a device are there."""
        sent = None
        for i, into in self._host_gradients.items():
            gradient = gradients[self._pieces[i].start : self._pieces[i].stop]
            if self._link is not None:
                sent = self._link.send(into, gradient)
            else:
                into.copy_(gradient)
        return sent

    def _take_back(self, gradients: Tensor) -> None:
        """Bring what the host made of its gradients to the device."""
        for i, gradient in self._host_gradients.items():
            gradients[self._pieces[i].start : self._pieces[i].stop].copy_(gradient, non_blocking=True)

    @torch.no_grad()
    def _take_off(self) -> None:
        """Take the steps that were handed out off the weights, which decay by themselves."""
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            for tensor in group["params"]:
                tensor.mul_(1.0 - group["lr"] * group["weight_decay"]).sub_(tensor.grad, alpha=group["lr"])

    def squares(self, start: int, stop: int) -> Tensor:
        """The sum of the squares of weights [start, stop), on the device."""
        total = torch.zeros((), device=self._device)
        for piece, tensor in zip(self._pieces, self.tensors, strict=True):
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                part = tensor[first - piece.start : last - piece.start]
                total += torch.linalg.vector_norm(part).square().to(self._device)
        return total

    def write_values(self, values: Tensor) -> None:
        """Give the model the new weights, rounded to its number type."""
        for piece, tensor, same in zip(self._pieces, self.tensors, self._are_values, strict=True):
            if not same and piece.on_host and self._link is not None and not self._link.is_on_host(values):
                self._link.bring(values[piece.start : piece.stop], tensor)
            elif not same:
                values[piece.start : piece.stop].copy_(tensor, non_blocking=True)

    def memory(self, on_host: bool) -> list[Tensor]:
        """Tensors whose memory, on host or device, is the optimizer's: weights, moments, on the host gradients too."""
        weights = [tensor for piece, tensor in zip(self._pieces, self.tensors, strict=True) if piece.on_host == on_host]
        states = [self.optimizer.state.get(tensor, {}) for tensor in weights] if self.optimizer is not None else []
        moments = [t for state in states for t in state.values() if torch.is_tensor(t) and t.numel() > 1]
        factors = self.steps.memory() if self.steps is not None and not on_host else []
        return [*weights, *moments, *factors, *(self._host_gradients.values() if on_host else ())]
