"""A module under data parallel and ZeRO: called as before, and stepped here."""

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
from shardwright.config.plain_values import GivenOptions
from shardwright.model.router_state import RouterState
from shardwright.parallel.comm.collectives import Axis, all_reduce, broadcast
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.compress.choose import make_compressor
from shardwright.parallel.optimizers.elementwise import make_optimizer
from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.parallel.zero.flat_unit import Sharding
from shardwright.parallel.zero.held_memory import measured_memory
from shardwright.parallel.zero.host_link import HostLink
from shardwright.parallel.zero.module_stage import ROOT, ModuleStage, gather_around, map_tensors, watch_gradient
from shardwright.parallel.zero.module_units import ModuleUnits, place_parameters, values_of
from shardwright.parallel.zero.sharded_stage import ShardedStage
from shardwright.parallel.zero.tensor_pool import tensor_pool
from shardwright.parallel.zero.tied_embedding import TiedEmbedding
from shardwright.precision.float8_linear import Float8Linear
from shardwright.sharding.flat_buffer import rows_of
from shardwright.sharding.groups import zero_stage
from shardwright.sharding.memory_account import RankMemory
from shardwright.sharding.unit_update import Updates
from shardwright.sharding.zero_events import Reductions
from shardwright.train.build import NUMBERS
from shardwright.train.gradient_norm import GradientNorm
from shardwright.train.learning_rate import learning_rate
from shardwright.train.own_module.module_checkpoint import load_module, save_module


@dataclass(frozen=True)
class ModuleStep:
    """The result of a step: its number, from 1, the norm of the gradient before it was clipped, and the learning rate;
    and the targets of all ranks, if backwards gave theirs. A step without any is `skipped`: it leaves the weights, and
    the number of steps done, as they are."""

    number: int
    grad_norm: float
    learning_rate: float
    num_targets: int | None = None
    skipped: bool = False


@dataclass(frozen=True)
class ModuleReplica:
    """The state of a module on one rank, for checkpoints and accounts of memory. `trained_after` has the steps that
    were done before a parameter was trained, by name; those of others are none."""

    shards: dict[int, ShardedStage]
    tied: TiedEmbedding
    module: nn.Module
    trained_after: dict[str, int] = field(default_factory=dict)
    float8_states: tuple[Float8Linear, ...] = ()

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The module's buffers as they are now, but for empty ones and those that its own state leaves out. Complex
        ones are pairs."""
        kept = self.module.state_dict().keys()
        named = {name: values for name, values in self.module.named_buffers() if name in kept}
        return {name: _in_reals(of) for name, of in named.items() if of.numel()}

    @property
    def frozen(self) -> dict[str, Tensor]:
        """Parameters that are not trained, which every rank has whole. Complex ones as pairs."""
        named = dict(self.module.named_parameters())
        return {
            name: _in_reals(of.detach())
            for name, of in named.items()
            if of.numel() and not isinstance(of, PlacedParameter)
        }

    def routers(self, stage: int) -> Mapping[int, RouterState]:
        """A module of the user's own has none that are known."""
        return {}


def _state_faults(state: Mapping[str, Any], here: Mapping[str, Any], strict: bool) -> list[str]:
    """Faults of a state that a module can't take up; the module has the state `here`."""
    faults = [f"it has no {name}" for name in here if name not in state] if strict else []
    faults += [f"it has {name}, and the module has none" for name in state if strict and name not in here]
    for name, of in here.items():
        given = state.get(name)
        if name not in state or not isinstance(of, Tensor):
            continue
        if not isinstance(given, Tensor):
            faults.append(f"{name} is of type {type(given).__name__} in it, and a tensor {list(of.shape)} here")
        elif given.shape != of.shape:
            faults.append(f"{name} is {list(given.shape)} in it, and {list(of.shape)} here")
    return faults


def _in_reals(values: Tensor) -> Tensor:
    return torch.view_as_real(values) if values.is_complex() else values


class ShardedModule(nn.Module):
    """A module whose replicas share its state.

    In a step: call it, `backward` the loss (or call the loss's own), as often as `accumulate` says, and `step`. The
    gradient is the mean over replicas and passes; or, where `backward` is told of how many targets a loss is the sum,
    that of the mean over all of these. Buffers, such as running statistics, are each rank's own.
    """

    def __init__(self, module: nn.Module, units: ModuleUnits, job: JobSpec, mesh: Mesh, accumulate: int) -> None:
        super().__init__()
        self._from_rank_0(module, mesh.world)
        values = {name: parameter.detach() for parameter, name in units.names.items()}
        self.module = module
        self.job, self.mesh, self.num_steps = job, mesh, 0
        compute = NUMBERS[job.precision.compute]
        placed = place_parameters(module, units, compute)
        self._pool = tensor_pool(mesh.device, mesh.streams)
        sharding = Sharding(
            zero_stage(job.plan), *mesh.replicas.sharing(0, 1), mesh.tp, compute=compute,
            gradients=NUMBERS[job.precision.gradient_number], reduce=NUMBERS[job.precision.reduce_number],
            host_share=job.plan.offload_optimizer, host_values=job.plan.offload_parameters,
            link=HostLink(mesh.streams) if mesh.streams else None,
        )  # fmt: skip
        self._stage = ModuleStage(
            {name: [placed[p] for p in held] for name, held in units.regions.items()}, [], sharding, self._pool,
            bucket_mib=job.plan.bucket_mib, initial=values_of(values), reductions=Reductions(),
            make_compressor=make_compressor(job.plan), updates=Updates(job),
        )  # fmt: skip
        self._stage.passes_of_step = accumulate
        self._stage.make_optimizers(partial(make_optimizer, job.optimizer, moments=NUMBERS[job.precision.moments]))
        self._placed: dict[str, PlacedParameter] = {of.place.name: of for of in placed.values()}
        self._is_sharded = sharding.zero == 3
        for name, unit in units.units.items() if self._is_sharded else ():
            gather_around(unit, name, self._stage)
        shards: dict[int, ShardedStage] = {0: self._stage}
        self._norm = GradientNorm({0: (self._stage, list(self._placed.values()))}, [len(self._placed)], mesh)
        tied = TiedEmbedding(None, None, mesh.ends)
        self.replica = ModuleReplica(shards, tied, module)
        self._autocast = compute if compute != torch.float32 else None
        self._num_targets: list[int] = []  # of the backwards since the last step that said theirs
        self._stage.begin()

    @staticmethod
    def _from_rank_0(module: nn.Module, world: Axis) -> None:
        """Begin as rank 0 does: replicas may have drawn other numbers. Moves a broadcast of each tensor."""
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                if tensor.numel() and world.size > 1:
                    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
                    broadcast(whole.view(-1).view(torch.uint8), world, 0)  # bytes: whatever numbers they are
                    tensor.copy_(whole)

    # A step.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module; with 16-bit parameters under autocast, and floats of the output in float32."""
        self._note("a forward")
        if self._is_sharded:
            self._stage.enter_forward(ROOT)
        with self._numbers():
            output = self.module(*args, **kwargs)
        if self._autocast is not None:
            output = map_tensors(lambda x: x.float() if x.is_floating_point() else x, output)
        if self._is_sharded:
            then = partial(self._stage.enter_backward, ROOT)
            has_backward = torch.is_grad_enabled() and watch_gradient(output, then)
            self._stage.leave_forward(ROOT, has_backward)
        return output

    def _numbers(self) -> Any:
        if self._autocast is None or self.mesh.device.type == "meta":  # tensors without memory have no autocast
            return nullcontext()
        return torch.autocast(self.mesh.device.type, dtype=self._autocast)

    def _note(self, what: str) -> None:
        """Let ranks that will wait for this one know what it is at."""
        if self.mesh.watch is not None:
            self.mesh.watch.step(self.num_steps + 1)
            self.mesh.watch.doing(what)

    def backward(self, loss: Tensor, num_targets: int | None = None) -> None:
        """The loss's own backward: gradients are added up, and reduced while it runs.

        Without `num_targets` a loss is a mean, and so is a step's gradient, over backwards and ranks: all weigh the
        same, however many targets each had. With it the loss is the sum over so many targets of this rank, which may be
        none, and the step's gradient is that of the mean over the targets of all ranks and backwards. All backwards of
        a step say it, or none. Raises PlanError where it is no number of targets.
        """
        if num_targets is not None:
            given = GivenOptions()
            num_targets = given.whole("num_targets", num_targets, least=0)
            given.check("backward")
        self._note("a backward")
        loss.backward()
        if num_targets is not None:
            self._num_targets.append(num_targets)

    def step(self) -> ModuleStep:
        """Sum the gradients over the replicas, clip them, and update. Every rank calls this. Raises RunError; where the
        gradient is not finite nothing was updated, and the step may be begun anew. Of no targets there is no mean: such
        a step is skipped."""
        stage, optimizer = self._stage, self.job.optimizer
        self._note("the end of a step")
        stage.finish()
        mine, self._num_targets = self._num_targets, []
        norm, (told, num_targets) = self._norm.with_sums((float(len(mine)), float(sum(mine))))
        rate = learning_rate(optimizer, self.num_steps)
        num_passes = self.mesh.world.size * stage.passes_of_step
        if told not in (0.0, num_passes):
            stage.begin()
            raise RunError(
                f"{told:.0f} of the {num_passes} backwards of step {self.num_steps + 1} on all ranks said num_targets; "
                "call backward(loss, num_targets=...) for each of them, with a loss that is a sum, or for none"
            )
        if told and not num_targets:
            stage.begin()
            return ModuleStep(self.num_steps, 0.0, rate, 0, skipped=True)
        mean = 1.0 / (num_targets if told else num_passes)
        norm *= mean
        if norm != norm or norm == float("inf"):
            stage.begin()
            raise RunError(
                f"the norm of the gradient of step {self.num_steps + 1} is {norm}: some loss or input is not finite, "
                "the learning rate is too high, or a parameter was read outside of its module while it was sharded"
            )
        clip = optimizer.clip_grad_norm
        clipped = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
        stage.update(clipped * mean, rate)
        stage.begin()
        self.num_steps += 1
        return ModuleStep(self.num_steps, norm, rate, int(num_targets) if told else None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the backwards since the last step, if there were any. Every rank calls this."""
        self._num_targets = []
        self._stage.forget()

    # What it holds.

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The module with all its values, in the numbers that it computes with, to read while this lasts on every
        rank."""
        self._stage.gather()
        self._stage.finish_gather()
        try:
            yield self.module
        finally:
            self._stage.release()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state of the whole module, on every rank: trained parameters in float32, frozen ones and buffers as they
        are, all under the names that they have in the module. Every rank calls this. Raises PlanError for any argument
        of PyTorch's: a prefix, and what keeps gradients, are not known here."""
        if args or kwargs:
            given = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
            fault = f"{shortened(given)} is given, and the whole module's state has its own names; call it with nothing"
            raise PlanError("state_dict", [fault])
        found: dict[str, Any] = self.module.state_dict()
        with torch.no_grad():
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                if isinstance(parameter, PlacedParameter):
                    found[name] = self._whole_weights(parameter)
        return found

    def _whole_weights(self, parameter: PlacedParameter) -> Tensor:
        """The float32 weights of a parameter. Moves an all-reduce over the shards."""
        unit = self._stage.unit_of(parameter)
        whole = torch.zeros(parameter.shape, dtype=torch.float32, device=self.mesh.device)
        first, end, start = unit.rows_held(parameter)
        if first < end:
            flat = whole.view(-1)
            size = rows_of(parameter.shape)[1]
            held = unit.masters.copy_out("weights", start, start + (end - first) * size)
            flat[first * size : end * size] = held.to(whole.device)
        if unit.sharding.zero:
            all_reduce(whole, unit.sharding.shards)
        return whole

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take up the whole module's values, the same on every rank; the optimizer goes on with what it remembers.
        Raises PlanError with every fault."""
        if not isinstance(state, Mapping):
            fault = f"a {type(state).__name__} is given; give a dictionary of tensors, such as state_dict() returns"
            raise PlanError("load_state_dict", [fault])
        here = self.module.state_dict()
        trained = {
            name: of
            for name, of in self.module.named_parameters(remove_duplicate=False)
            if isinstance(of, PlacedParameter)
        }
        if faults := _state_faults(state, here | trained, strict):
            raise PlanError("load_state_dict", faults)
        placed = {name: of for name, of in trained.items() if name in state}
        rest = {name: value for name, value in state.items() if name not in placed}
        self.module.load_state_dict(rest, strict=False)
        for name, parameter in placed.items():
            unit = self._stage.unit_of(parameter)
            first, end, start = unit.rows_held(parameter)
            size = rows_of(parameter.shape)[1]
            values = state[name].detach().float().reshape(-1)[first * size : end * size]
            unit.masters.copy_in("weights", start, values)
        for unit in self._stage.units:
            unit.take_up()
        self._stage.begin()

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint, which any number of ranks goes on from, under any plan. Every rank calls this. Raises
        RunError."""
        save_module(self.job, self.replica, self.mesh, str(folder), self.num_steps)

    def load(self, folder: str | Path) -> int:
        """Go on from the newest whole checkpoint of a folder, as rank 0 sees it. Returns the number of steps done.
        Every rank calls this. Raises, the same on every rank, PlanError where there is none, and RunError where it is
        of another module or some rank can't read it."""
        self.num_steps = load_module(self.job, self.replica, self.mesh, str(folder))
        self._stage.begin()
        return self.num_steps

    def memory(self) -> RankMemory:
        """The memory of the module's state on this rank, by kind; activations are not in it."""
        return measured_memory(self.replica.shards, {}, self.replica.tied, self._pool)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise RunError(
            "a sharded module stays where it is, in the numbers that it has; move or cast it before shard()"
        )  # fmt: skip
