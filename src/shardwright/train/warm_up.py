"""The warm-up before the first step on CUDA: all ranks compile their kernels at the same time, and connect to each
other.

A kernel is compiled at its first call, which takes many seconds. NCCL makes a communicator at its first use, at which
its ranks wait for each other. Without the warm-up each stage would start to compile in the first step only after the
stage before it: p stages would take p times as long, longer than the timeout of the waiting ranks. Here all ranks
compile at the same time, then meet, and then use each communicator once, in the same order on all ranks.

The calls to compile are the calls of a dry step (train/dry_steps.py). On a CPU nothing is compiled, and process groups
connect when they are made.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.units import counted_phrase
from shardwright.parallel.comm.first_contact import make_contact
from shardwright.parallel.comm.hang_watch import meet
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.schedule.job_program import plan_faults
from shardwright.schedule.schedule import Program
from shardwright.train.dry_steps import DrySteps

_NAMESPACE = "shardwright"  # of compiled operators (precision/fused_operator.py)
_MOST_S = 1800.0  # within which all ranks must have compiled


@dataclass(frozen=True)
class BareTensor:
    """The layout of a tensor, without values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class KernelCall:
    """A call of a compiled operator: its name, its arguments with layouts instead of tensors, and if gradients are on:
    a kernel is compiled separately for that."""

    operator: str
    arguments: tuple[Any, ...]
    has_gradients: bool

    def make(self, device: torch.device) -> None:
        """Call the operator with tensors of zeros, since integers may be indices of other tensors."""
        arguments = [_with_memory(argument, device) for argument in self.arguments]
        with torch.set_grad_enabled(self.has_gradients):
            getattr(getattr(torch.ops, _NAMESPACE), self.operator)(*arguments)


def _with_memory(argument: Any, device: torch.device) -> Any:
    """The argument, or a tensor of zeros for a layout."""
    if not isinstance(argument, BareTensor):
        return argument
    return torch.empty_strided(argument.shape, argument.stride, dtype=argument.dtype, device=device).zero_()


class KernelCalls(TorchDispatchMode):
    """Records each distinct call of a compiled operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[KernelCall, None] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace == _NAMESPACE:
            layouts = (
                BareTensor(tuple(arg.shape), arg.stride(), arg.dtype) if isinstance(arg, Tensor) else arg
                for arg in args
            )
            name = operator.overloadpacket.__name__
            self.calls[KernelCall(name, tuple(layouts), torch.is_grad_enabled())] = None
        return operator(*args, **(kwargs or {}))


def kernel_calls(job: JobSpec, rank: int) -> list[KernelCall]:
    """The distinct calls of compiled operators that a rank makes in a step on CUDA."""
    steps = DrySteps(_with_few_microbatches(job), rank, "cuda")
    with KernelCalls() as recorder:
        steps.run()
    return list(recorder.calls)


def _with_few_microbatches(job: JobSpec) -> JobSpec:
    """The job with a small batch that its schedule allows: each microbatch makes the same calls."""
    job = job.grown()
    for number in (1, job.plan.pp, 2 * job.plan.pp):
        batch = job.batch.with_size(number * job.plan.dp * job.plan.microbatch_size)
        smaller_job = job.model_copy(update={"batch": batch})
        if number < job.num_microbatches and not plan_faults(smaller_job):
            return smaller_job
    return job


def warm_up(job: JobSpec, mesh: Mesh, program: Program, tell: Callable[[str], None]) -> None:
    """Compile the kernels that this rank will call, connect it to the ranks with which it communicates in the program,
    and `tell` so. Without CUDA do nothing. Every rank calls this."""
    if mesh.ledger.kind != "cuda":
        return
    tell(say("warm-up: every rank compiles its kernels, which takes a minute where none is kept from before"))
    if mesh.watch is not None:
        mesh.watch.doing(say("the warm-up"))
    began_s = time.monotonic()
    calls = kernel_calls(job, mesh.rank)
    for call in calls:
        call.make(mesh.device)
    meet(mesh.watch, mesh.rank, mesh.world.size, say("the warm-up"), _MOST_S)
    compiled_s = time.monotonic() - began_s
    num_met = make_contact(mesh, program)
    met_s = time.monotonic() - began_s - compiled_s
    kernels = say(
        "{kernels} compiled in {compiled_s:.1f} s",
        kernels=counted_phrase(len({call.operator for call in calls}), "kernel"),
        compiled_s=compiled_s,
    )
    contacts = counted_phrase(num_met, "first contact")
    tell(say("warm-up: {kernels}, {contacts} made in {met_s:.1f} s", kernels=kernels, contacts=contacts, met_s=met_s))
