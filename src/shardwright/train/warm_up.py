"""Before the first step on CUDA: every rank compiles its kernels at once, and meets every rank that it will talk to.

A kernel is compiled at its first call, for many seconds, and NCCL makes a communicator at its first use, for which its
ranks wait for each other. In the first step of a pipeline each stage would begin with that when the stage before has
ended: p stages take p times as long, more than the others' bound on a wait. Here all ranks compile at once, each as
long as it takes, meet, and then use each communicator once, in one order on all of them.

The calls to compile are those of a dry step (train/dry_steps.py). On a CPU nothing is compiled, and connections are
made with the process groups.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.config.job import JobSpec
from shardwright.config.units import counted
from shardwright.parallel.comm.first_contact import make_contact
from shardwright.parallel.comm.hang_watch import meet
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.schedule.job_program import plan_faults
from shardwright.schedule.schedule import Program
from shardwright.train.dry_steps import DrySteps

_NAMESPACE = "shardwright"  # of operators that the compiler makes (precision/fused_operator.py)
_MOST_S = 1800.0  # that all ranks together may take to compile


@dataclass(frozen=True)
class BareTensor:
    """The memory of a tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class KernelCall:
    """A call of an operator that is compiled: its name, its arguments with layouts for tensors, and whether gradients
    are on, for which a kernel is compiled again."""

    operator: str
    arguments: tuple[Any, ...]
    has_gradients: bool

    def make(self, device: torch.device) -> None:
        """Call it, on tensors of zeros: whole numbers may be places in others."""
        tensors = [_tensor(given, device) for given in self.arguments]
        with torch.set_grad_enabled(self.has_gradients):
            getattr(getattr(torch.ops, _NAMESPACE), self.operator)(*tensors)


def _tensor(given: Any, device: torch.device) -> Any:
    if not isinstance(given, BareTensor):
        return given
    return torch.empty_strided(given.shape, given.stride, dtype=given.dtype, device=device).zero_()


class KernelCalls(TorchDispatchMode):
    """Notes each call of a compiled operator once."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[KernelCall, None] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace == _NAMESPACE:
            layouts = (
                BareTensor(tuple(given.shape), given.stride(), given.dtype) if isinstance(given, Tensor) else given
                for given in args
            )
            name = operator.overloadpacket.__name__
            self.calls[KernelCall(name, tuple(layouts), torch.is_grad_enabled())] = None
        return operator(*args, **(kwargs or {}))


def kernel_calls(job: JobSpec, rank: int) -> list[KernelCall]:
    """The calls of compiled operators that a rank makes in a step on CUDA, one of each."""
    steps = DrySteps(_with_few_microbatches(job), rank, "cuda")
    with KernelCalls() as noted:
        steps.run()
    return list(noted.calls)


def _with_few_microbatches(job: JobSpec) -> JobSpec:
    """The job with the smallest batch that its schedule takes: each microbatch makes the same calls."""
    job = job.grown()
    for number in (1, job.plan.pp, 2 * job.plan.pp):
        batch = job.batch.with_size(number * job.plan.dp * job.plan.microbatch_size)
        few = job.model_copy(update={"batch": batch})
        if number < job.num_microbatches and not plan_faults(few):
            return few
    return job


def warm_up(job: JobSpec, mesh: Mesh, program: Program, say: Callable[[str], None]) -> None:
    """Compile what the rank will call and meet those that it will talk to in a program, and `say` so. Where there is
    nothing to be warmed up, nothing is done or said. Every rank calls this."""
    if mesh.ledger.kind != "cuda":
        return
    say("warm-up: every rank compiles its kernels, which takes a minute where none is kept from before")
    if mesh.watch is not None:
        mesh.watch.doing("the warm-up")
    began_s = time.monotonic()
    calls = kernel_calls(job, mesh.rank)
    for call in calls:
        call.make(mesh.device)
    meet(mesh.watch, mesh.rank, mesh.world.size, "the warm-up", _MOST_S)
    compiled_s = time.monotonic() - began_s
    num_met = make_contact(mesh, program)
    met_s = time.monotonic() - began_s - compiled_s
    kernels = f"{counted(len({call.operator for call in calls}), 'kernel')} compiled in {compiled_s:.1f} s"
    say(f"warm-up: {kernels}, {counted(num_met, 'first contact')} made in {met_s:.1f} s")
