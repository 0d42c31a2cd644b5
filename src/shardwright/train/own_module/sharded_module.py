"""A user's module under data parallel and ZeRO: it is called as before, and its optimizer step is made here."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.config.base import PlanError, RunError, shortened
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.plain_values import GivenOptions
from shardwright.model.router_state import RouterState
from shardwright.parallel.comm.collectives import Axis, all_reduce, broadcast
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.parallel.zero.held_memory import measured_memory
from shardwright.parallel.zero.host_link import HostLink
from shardwright.parallel.zero.module_stage import ROOT, ModuleStage, gather_around, map_tensors, watch_gradient
from shardwright.parallel.zero.module_units import ModuleUnits, place_parameters, values_of
from shardwright.parallel.zero.sharded_stage import ShardedStage
from shardwright.parallel.zero.tied_embedding import TiedEmbedding
from shardwright.parallel.zero.unit_setting import Sharding, StageSharding, UnitSetting, dtype_of, tensor_pool
from shardwright.precision.float8_linear import Float8Linear
from shardwright.precision.loss_scale import LossScale
from shardwright.sharding.flat_buffer import rows_of
from shardwright.sharding.memory_account import RankMemory
from shardwright.train.gradient_norm import GradientNorm, clip_factor
from shardwright.train.own_module.module_checkpoint import load_module, save_module
from shardwright.train.train_step import learning_rate


@dataclass(frozen=True)
class ModuleStep:
    """The result of a step: its number, from 1; the norm of the gradient before clipping; the learning rate; and the
    number of targets of all ranks, if `backward` was given them. A step without targets is `skipped`: weights and the
    number of steps stay as they are."""

    number: int
    grad_norm: float
    learning_rate: float
    num_targets: int | None = None
    skipped: bool = False


@dataclass(frozen=True)
class ModuleReplica:
    """The state of a module on one rank, for checkpoints and accounts of memory. `trained_after` holds, by parameter,
    the number of steps done before it was first trained; parameters trained from the first step are not in it."""

    shards: dict[int, ShardedStage]
    tied: TiedEmbedding
    module: nn.Module
    trained_after: dict[str, int] = field(default_factory=dict)
    float8_states: tuple[Float8Linear, ...] = ()
    loss_scale: LossScale | None = None

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The module's current buffers by name, without empty ones and those that are not in its state dict. Complex
        numbers are pairs of real ones."""
        persistent = self.module.state_dict().keys()
        buffers = {name: buffer for name, buffer in self.module.named_buffers() if name in persistent}
        return {name: _as_reals(buffer) for name, buffer in buffers.items() if buffer.numel()}

    @property
    def frozen(self) -> dict[str, Tensor]:
        """Parameters that are not trained, by name; every rank has all of them. Complex numbers are pairs of real
        ones."""
        parameters = dict(self.module.named_parameters())
        return {
            name: _as_reals(parameter.detach())
            for name, parameter in parameters.items()
            if parameter.numel() and not isinstance(parameter, PlacedParameter)
        }

    def routers(self, stage: int) -> Mapping[int, RouterState]:
        """Empty: routers of a user's module are not known."""
        return {}


def _state_faults(state: Mapping[str, Any], module_state: Mapping[str, Any], strict: bool) -> list[str]:
    """Faults of a state that a module with `module_state` can't load."""
    faults = list[str]()
    if strict:
        faults += [say("it has no {name}", name=name) for name in module_state if name not in state]
    faults += [
        say("it has {name}, and the module has none", name=name)
        for name in state
        if strict and name not in module_state
    ]
    for name, expected in module_state.items():
        value = state.get(name)
        if name not in state or not isinstance(expected, Tensor):
            continue
        if not isinstance(value, Tensor):
            faults.append(
                say(
                    "{name} is of type {kind} in it, and a tensor {wanted} here",
                    name=name,
                    kind=type(value).__name__,
                    wanted=list(expected.shape),
                )
            )
        elif value.shape != expected.shape:
            faults.append(
                say(
                    "{name} is {shape} in it, and {wanted} here",
                    name=name,
                    shape=list(value.shape),
                    wanted=list(expected.shape),
                )
            )
    return faults


def _as_reals(values: Tensor) -> Tensor:
    return torch.view_as_real(values) if values.is_complex() else values


class ShardedModule(nn.Module):
    """A module whose replicas share its state by ZeRO.

    For a step, call the module and `backward` with the loss (or the loss's own backward) `accumulate` times, then
    `step`. The gradient is the mean over replicas and passes; or, if `backward` gets the number of targets in a loss,
    the gradient of the mean over all targets. Each rank has its own buffers, such as running statistics.
    """

    def __init__(self, module: nn.Module, units: ModuleUnits, job: JobSpec, mesh: Mesh, accumulate: int) -> None:
        super().__init__()
        self._copy_rank_0(module, mesh.world)
        values = {name: parameter.detach() for parameter, name in units.names.items()}
        self.module = module
        self.job, self.mesh, self.num_steps = job, mesh, 0
        compute = dtype_of(job.precision.compute)
        placed = place_parameters(module, units, compute)
        self._pool = tensor_pool(mesh.device, mesh.streams)
        sharding = Sharding.of(job, mesh, 0, is_expert=False, link=HostLink(mesh.streams) if mesh.streams else None)
        regions = {name: [placed[p] for p in region] for name, region in units.regions.items()}
        self._stage = ModuleStage(
            regions, [], StageSharding(sharding, sharding), UnitSetting(job, self._pool, values_of(values))
        )
        self._stage.passes_of_step = accumulate
        self._stage.make_optimizers()
        self._placed: dict[str, PlacedParameter] = {parameter.place.name: parameter for parameter in placed.values()}
        self._is_sharded = sharding.zero == 3
        for name, unit in units.units.items() if self._is_sharded else ():
            gather_around(unit, name, self._stage)
        shards: dict[int, ShardedStage] = {0: self._stage}
        self._norm = GradientNorm({0: (self._stage, list(self._placed.values()))}, [len(self._placed)], mesh)
        tied = TiedEmbedding(None, None, mesh.ends)
        self.replica = ModuleReplica(shards, tied, module)
        self._autocast = compute if compute != torch.float32 else None
        self._num_targets: list[int] = []  # as given to `backward` since the last step
        self._stage.begin()

    @staticmethod
    def _copy_rank_0(module: nn.Module, world: Axis) -> None:
        """Copy the values of rank 0, since replicas may have drawn other random numbers. Costs a broadcast of each
        tensor."""
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                if tensor.numel() and world.size > 1:
                    values = tensor.detach().clone(memory_format=torch.contiguous_format)
                    broadcast(values.view(-1).view(torch.uint8), world, 0)  # as bytes, for every number type
                    tensor.copy_(values)

    # A step.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module. With 16-bit parameters it runs under autocast, and floats of the output are float32."""
        self._note("a forward")
        if self._is_sharded:
            self._stage.enter_forward(ROOT)
        with self._autocast_context():
            output = self.module(*args, **kwargs)
        if self._autocast is not None:
            output = map_tensors(lambda x: x.float() if x.is_floating_point() else x, output)
        if self._is_sharded:
            on_backward = partial(self._stage.enter_backward, ROOT)
            has_backward = torch.is_grad_enabled() and watch_gradient(output, on_backward)
            self._stage.leave_forward(ROOT, has_backward)
        return output

    def _autocast_context(self) -> Any:
        if self._autocast is None or self.mesh.device.type == "meta":  # tensors without memory have no autocast
            return nullcontext()
        return torch.autocast(self.mesh.device.type, dtype=self._autocast)

    def _note(self, activity: str) -> None:
        """Tell the watch what this rank is doing, for the messages of ranks that wait for it."""
        if self.mesh.watch is not None:
            self.mesh.watch.step(self.num_steps + 1)
            self.mesh.watch.doing(activity)

    def backward(self, loss: Tensor, num_targets: int | None = None) -> None:
        """Run the loss's backward. Gradients are accumulated, and reduced while it runs.

        Without `num_targets` a loss is a mean, and a step's gradient is the mean over backwards and ranks: all have the
        same weight, however many targets each had. With `num_targets` a loss is the sum over so many targets of this
        rank, possibly 0, and a step's gradient is the gradient of the mean over the targets of all ranks and backwards.
        All backwards of a step give it, or none. Raises PlanError if it is not a whole number from 0.
        """
        if num_targets is not None:
            options = GivenOptions()
            num_targets = options.whole("num_targets", num_targets, least=0)
            options.check("backward")
        self._note("a backward")
        loss.backward()
        if num_targets is not None:
            self._num_targets.append(num_targets)

    def step(self) -> ModuleStep:
        """Sum the gradients over the replicas, clip them, and update the weights. Every rank calls this. A step with no
        targets at all has no mean, and is skipped. Raises RunError if only some backwards gave `num_targets`, or if the
        gradient is not finite: then nothing was updated, and the step may be repeated."""
        stage, optimizer = self._stage, self.job.optimizer
        self._note(say("the end of a step"))
        stage.finish()
        local_targets, self._num_targets = self._num_targets, []
        sums = (float(len(local_targets)), float(sum(local_targets)))
        norm, (num_with_targets, num_targets) = self._norm.with_sums(sums)
        rate = learning_rate(optimizer, self.num_steps)
        num_passes = self.mesh.world.size * stage.passes_of_step
        if num_with_targets not in (0.0, num_passes):
            stage.begin()
            raise RunError(
                say(
                    "{num_with_targets:.0f} of the {num_passes} backwards of step {step} on all ranks said "
                    "num_targets; call backward(loss, num_targets=...) for each of them, with a loss that is a sum, "
                    "or for none",
                    num_with_targets=num_with_targets,
                    num_passes=num_passes,
                    step=self.num_steps + 1,
                )
            )
        if num_with_targets and not num_targets:
            stage.begin()
            return ModuleStep(self.num_steps, 0.0, rate, 0, skipped=True)
        mean = 1.0 / (num_targets if num_with_targets else num_passes)
        norm *= mean
        if not math.isfinite(norm):
            stage.begin()
            raise RunError(
                say(
                    "the norm of the gradient of step {step} is {norm}: some loss or input is not finite, the "
                    "learning rate is too high, or a parameter was read outside of its module while it was sharded",
                    step=self.num_steps + 1,
                    norm=norm,
                )
            )
        stage.update(clip_factor(optimizer.clip_grad_norm, norm) * mean, rate)
        stage.begin()
        self.num_steps += 1
        return ModuleStep(self.num_steps, norm, rate, int(num_targets) if num_with_targets else None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of backwards since the last step. Every rank calls this."""
        self._num_targets = []
        self._stage.forget()

    # The module's state.

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The module with all of its values, in the compute type, to read during the block. Every rank calls this."""
        self._stage.gather()
        self._stage.finish_gather()
        try:
            yield self.module
        finally:
            self._stage.release()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state of the full module, on every rank: trained parameters in float32, frozen ones and buffers as they
        are, with the names that they have in the module. Every rank calls this. Raises PlanError for any argument:
        PyTorch's prefix and keep_vars are not supported."""
        if args or kwargs:
            arguments = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
            fault = say(
                "{arguments} is given, and the whole module's state has its own names; call it with nothing",
                arguments=shortened(arguments),
            )
            raise PlanError("state_dict", [fault])
        state: dict[str, Any] = self.module.state_dict()
        with torch.no_grad():
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                if isinstance(parameter, PlacedParameter):
                    state[name] = self._full_weights(parameter)
        return state

    def _full_weights(self, parameter: PlacedParameter) -> Tensor:
        """The float32 weights of a parameter, of its shape. Costs an all-reduce over the shards."""
        unit = self._stage.unit_of(parameter)
        weights = torch.zeros(parameter.shape, dtype=torch.float32, device=self.mesh.device)
        first_row, end_row, start = unit.rows_held(parameter)
        if first_row < end_row:
            flat = weights.view(-1)
            size = rows_of(parameter.shape)[1]
            shard = unit.masters.copy_out("weights", start, start + (end_row - first_row) * size)
            flat[first_row * size : end_row * size] = shard.to(weights.device)
        if unit.sharding.zero:
            all_reduce(weights, unit.sharding.shards)
        return weights

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the values of the full module, which are the same on every rank. The optimizer keeps its state. Raises
        PlanError with every fault."""
        if not isinstance(state, Mapping):
            fault = say(
                "a {kind} is given; give a dictionary of tensors, such as state_dict() returns",
                kind=type(state).__name__,
            )
            raise PlanError("load_state_dict", [fault])
        module_state = self.module.state_dict()
        trained = {
            name: parameter
            for name, parameter in self.module.named_parameters(remove_duplicate=False)
            if isinstance(parameter, PlacedParameter)
        }
        if faults := _state_faults(state, module_state | trained, strict):
            raise PlanError("load_state_dict", faults)
        placed = {name: parameter for name, parameter in trained.items() if name in state}
        unplaced_state = {name: value for name, value in state.items() if name not in placed}
        self.module.load_state_dict(unplaced_state, strict=False)
        for name, parameter in placed.items():
            unit = self._stage.unit_of(parameter)
            first_row, end_row, start = unit.rows_held(parameter)
            size = rows_of(parameter.shape)[1]
            values = state[name].detach().float().reshape(-1)[first_row * size : end_row * size]
            unit.masters.copy_in("weights", start, values)
        for unit in self._stage.units:
            unit.take_up()
        self._stage.begin()

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint, from which any number of ranks can resume, under any plan. Every rank calls this. Raises
        RunError."""
        save_module(self.job, self.replica, self.mesh, str(folder), self.num_steps)

    def load(self, folder: str | Path) -> int:
        """Resume from the newest whole checkpoint that rank 0 sees in a folder. Returns the number of steps done. Every
        rank calls this. Raises, the same on every rank, PlanError if there is no checkpoint, and RunError if it is of
        another module or a rank can't read it."""
        self.num_steps = load_module(self.job, self.replica, self.mesh, str(folder))
        self._stage.begin()
        return self.num_steps

    def memory(self) -> RankMemory:
        """The memory of the module's state on this rank, by kind, without activations."""
        return measured_memory(self.replica.shards, {}, self.replica.tied, self._pool)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise RunError(
            say("a sharded module stays where it is, in the numbers that it has; move or cast it before shard()")
        )
