"""The pipeline executor: it reads a program and does what it says, action by action.

It knows no schedule. The order of work, sends, receives and reductions is the program's; what was performed is
recorded, so that it can be compared with what was planned and drawn beside what was simulated.

A send keeps its tensor until the other side has it, and never blocks. A receive is posted where the program says, and
waited for by the compute that needs it: that wait is the pipeline's idle time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwright.parallel.collectives import Axis, Pending, start_recv, start_send
from shardwright.parallel.data import GradientBuckets
from shardwright.parallel.mesh import Mesh
from shardwright.schedule.action import Action, Kind
from shardwright.schedule.schedule import Program


class Stage(Protocol):
    """What the executor needs of a stage of the model."""

    def __call__(self, x: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        """Hidden states, or the loss of each token where there are targets."""
        ...

    def hidden_shape(self, batch: int) -> tuple[int, int, int]:
        """Shape of what passes between stages."""
        ...


@dataclass(frozen=True, slots=True)
class Performed:
    """An action that was carried out, and when (seconds of the host's clock)."""

    action: Action
    start_s: float
    end_s: float


@dataclass
class _Step:
    """What one run of a program holds; gone when it ends. Keys are (stage, microbatch)."""

    program: Program
    tokens: Sequence[Tensor]
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # forward done, not yet sent on
    inputs: dict[tuple[int, int], tuple[Tensor, Pending | None]] = field(default_factory=dict)
    gradients: dict[tuple[int, int], tuple[Tensor, Pending | None]] = field(default_factory=dict)
    leaves: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # stage inputs whose gradient is wanted
    edges: dict[tuple[int, int], GradientEdge] = field(default_factory=dict)  # where a backward begins
    input_gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    sends: list[tuple[Tensor, Pending]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)


class PipelineExecutor:
    """Runs programs on this rank's stages.

    A microbatch's loss is the mean over its tokens; gradients add up over microbatches and replicas, and are divided
    by their number once, at the optimizer step.
    """

    def __init__(self, stages: dict[int, Stage], buckets: dict[int, GradientBuckets], mesh: Mesh) -> None:
        self._stages = stages
        self._buckets = buckets
        self._mesh = mesh
        self.performed: list[Performed] = []

    def run(
        self, program: Program, tokens: Sequence[Tensor], optimizer_step: Callable[[], None] | None = None
    ) -> list[Tensor]:
        """Carry out this rank's list. `tokens` are the microbatches, each [B, S + 1].

        Returns the loss of each microbatch on the rank of the last stage, and nothing elsewhere.
        """
        step = _Step(program, tokens)
        row = program.ranks[self._mesh.pp.index]
        last_backward = {
            part.stage: index
            for index, action in enumerate(row)
            for part in action.computes()
            if part.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)
        }
        trains = bool(last_backward)
        self.performed = []
        with torch.set_grad_enabled(trains):
            for index, action in enumerate(row):
                if self._mesh.watch is not None:
                    self._mesh.watch.doing(f"action {index}, {action}")
                if last_backward.get(action.stage) == index:
                    self._buckets[action.stage].arm()
                start_s = time.perf_counter()
                if action.kind is Kind.STEP:
                    assert optimizer_step is not None, "a program that ends in a step needs an optimizer"
                    optimizer_step()
                else:
                    self._do(action, step, trains)
                self.performed.append(Performed(action, start_s, time.perf_counter()))
        for _, pending in step.sends:
            pending.wait()
        return step.losses

    def _do(self, action: Action, step: _Step, trains: bool) -> None:
        match action.kind:
            case Kind.FORWARD:
                self._forward(action, step, trains)
            case Kind.BACKWARD:
                self._backward(action, step)
            case Kind.SEND_FORWARD:
                key = action.stage, action.microbatch
                self._send(step.outputs.pop(key), self._mesh.forward, action, action.stage + 1, step)
            case Kind.SEND_BACKWARD:
                key = action.stage, action.microbatch
                self._send(step.input_gradients.pop(key), self._mesh.backward, action, action.stage - 1, step)
            case Kind.RECV_FORWARD:
                step.inputs[action.stage, action.microbatch] = self._receive(action, self._mesh.forward, step)
            case Kind.RECV_BACKWARD:
                step.gradients[action.stage, action.microbatch] = self._receive(action, self._mesh.backward, step)
            case Kind.REDUCE:
                self._buckets[action.stage].reduce()
            case _:
                raise NotImplementedError(f"the executor can't perform {action} yet")

    def _forward(self, action: Action, step: _Step, trains: bool) -> None:
        key = stage, i = action.stage, action.microbatch
        last = step.program.num_stages - 1
        if stage == 0:
            x = step.tokens[i][:, :-1]
        else:
            x, arrival = step.inputs.pop(key)
            if arrival is not None:
                arrival.wait()
            x.requires_grad_(trains)
            step.leaves[key] = x
        if stage == last:
            loss = self._stages[stage](x, step.tokens[i][:, 1:]).mean()
            step.losses.append(loss.detach())
            output = loss
        else:
            output = self._stages[stage](x)
            if step.program.placement.rank(stage + 1, i) == self._mesh.pp.index:
                step.inputs[stage + 1, i] = output.detach(), None
            else:
                step.outputs[key] = output.detach()
        if trains:
            # The edge alone is kept: the output's memory is free as soon as it is sent.
            step.edges[key] = get_gradient_edge(output)
        else:
            step.leaves.pop(key, None)

    def _backward(self, action: Action, step: _Step) -> None:
        key = stage, i = action.stage, action.microbatch
        if stage == step.program.num_stages - 1:
            gradient = torch.ones((), device=self._mesh.device)
        else:
            gradient, arrival = step.gradients.pop(key)
            if arrival is not None:
                arrival.wait()
        torch.autograd.backward(step.edges.pop(key), gradient)
        if stage > 0:
            dx = step.leaves.pop(key).grad
            assert dx is not None, "the input of a stage has a gradient"
            if step.program.placement.rank(stage - 1, i) == self._mesh.pp.index:
                step.gradients[stage - 1, i] = dx, None
            else:
                step.input_gradients[key] = dx

    def _send(self, tensor: Tensor, axis: Axis, action: Action, to_stage: int, step: _Step) -> None:
        step.sends = [(kept, pending) for kept, pending in step.sends if not pending.is_over()]
        tensor = tensor.contiguous()
        pending = start_send(tensor, axis, action.peer, self._tag(to_stage, action.microbatch, step))
        step.sends.append((tensor, pending))

    def _receive(self, action: Action, axis: Axis, step: _Step) -> tuple[Tensor, Pending]:
        batch = step.tokens[action.microbatch].shape[0]
        buffer = torch.empty(self._stages[action.stage].hidden_shape(batch), device=self._mesh.device)
        return buffer, start_recv(buffer, axis, action.peer, self._tag(action.stage, action.microbatch, step))

    @staticmethod
    def _tag(to_stage: int, microbatch: int, step: _Step) -> int:
        """Names a message between two ranks; forward and backward differ by their receiving stage and sender."""
        return to_stage * step.program.num_microbatches + microbatch
