"""A step that is computed twice: the gradients of each rank must be the same, bit for bit.

Where they are not, a rank computes wrongly now and then (silent corruption), or by design not always alike. Each rank
looks at its own gradients, unit by unit, before they are summed over others: so the first to differ is named, and not
those that it was added to. But what crosses ranks earlier, along tp, cp, pp and ep, carries a wrong number to others
within the same pass.

On CUDA both passes take kernels that add in one order, which the other steps do not (precision/fixed_order.py).

The pass beside the step changes nothing that the run goes on with. Dropout is a function of the step and the sample,
and the weights stay; what routers saw is dropped, and so are the largest values that fp8 scales would come from.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.units import counted
from shardwright.parallel.comm.collectives import all_gather
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.zero.flat_unit import FlatUnit
from shardwright.precision.fixed_order import in_fixed_order
from shardwright.schedule.action import Action
from shardwright.train.build import Replica
from shardwright.train.health.content_hash import content_hash
from shardwright.train.train_step import counted_shares, run_step

Look = Callable[[FlatUnit, Tensor], None]  # sees a unit and its own gradients, before they are summed


@contextmanager
def looking(replica: Replica, look: Look) -> Iterator[None]:
    """While this lasts, `look` sees the gradients of each unit before they are summed over other ranks; several times a
    step where microbatches are summed one by one."""
    units = [unit for shards in replica.shards.values() for unit in shards.units]
    for unit in units:
        unit.look = partial(look, unit)
    try:
        yield
    finally:
        for unit in units:
            unit.look = None


def compute_beside(job: JobSpec, replica: Replica, mesh: Mesh, step: int, tokens_BS: Tensor) -> None:
    """Forward and backward of a step, counted from 0, and no update; nothing of it is remembered. Not for compressed
    gradients, whose errors it would take along."""
    assert job.plan.compress == "none", "an error of compression would be used up"

    job = job.at_step(step)

    def forget(_: Action) -> None:
        replica.finish_gradients()

    run_step(job, replica, mesh, step, tokens_BS, shares=counted_shares(job, mesh, tokens_BS), update=forget)
    for stage in replica.stages.values():
        for router in stage.routers().values():
            router.take_seen()
    for state in replica.float8_states:
        state.forget_now()
        state.weight_changed()  # the step casts its weights itself, and moves what that moves


class GradientHashes:
    """Hashes of the gradients of a pass, by unit and in the order in which they were complete."""

    def __init__(self) -> None:
        self._found: list[tuple[str, Tensor]] = []

    def __call__(self, unit: FlatUnit, gradients: Tensor) -> None:
        """Look at the gradients of a unit."""
        self._found.append((unit.name, content_hash(gradients)))

    def first_difference(self, other: "GradientHashes") -> str | None:
        """The first unit, in the order of the backward, whose gradients differ; None where none do."""
        mine, theirs = (torch.stack([h for _, h in of._found]) if of._found else None for of in (self, other))
        if mine is None or theirs is None or mine.shape != theirs.shape:
            return None if mine is theirs else "all"
        differ = (mine != theirs).nonzero().flatten().tolist()
        return self._found[differ[0]][0] if differ else None


class RepeatedStep:
    """Compares every so-many-th step with a pass that was made before it."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._before: GradientHashes | None = None
        self.num_repeated = 0
        self.num_different = 0

    def is_due(self, step: int) -> bool:
        """True if a step, counted from 0, is computed twice."""
        return self._every > 0 and (step + 1) % self._every == 0

    def before(self, job: JobSpec, replica: Replica, mesh: Mesh, step: int, tokens_BS: Tensor) -> None:
        """Compute the step once, beside the run."""
        self._before = GradientHashes()
        with looking(replica, self._before), in_fixed_order(mesh.device):
            compute_beside(job, replica, mesh, step, tokens_BS)

    def compare(self, step: int, mesh: Mesh, now: GradientHashes) -> str:
        """A sentence that names the ranks whose gradients differ from those before, empty where none do. Moves an
        all-gather of one number over the world, and if some differ another of the names."""
        assert self._before is not None, "the step was computed before"
        where, self._before = self._before.first_difference(now), None
        self.num_repeated += 1
        is_other = torch.tensor([where is not None], dtype=torch.int64, device=mesh.device)
        others = [rank for rank, found in enumerate(all_gather(is_other, mesh.world).tolist()) if found]
        if not others:
            return ""
        self.num_different += 1
        names = gather_texts(where or "", mesh)
        told = "; ".join(f"{mesh.shape.describe(rank)}: first in {names[rank]}" for rank in others[:8])
        return (
            f"step {step + 1} was computed twice from the same weights and samples, and gradients differ on "
            f"{counted(len(others), 'rank')} ({told}); a rank that computes wrongly now and then{_OR[mesh.device.type]}"
        )


# What else it may be: on CUDA all kernels of both passes had one order to add in.
_OR = {
    "cpu": ", or a kernel that adds in no fixed order",
    "cuda": ": both passes took kernels that add in a fixed order",
}
_LONGEST = 120  # bytes of a text that is gathered


def gather_texts(text: str, mesh: Mesh) -> list[str]:
    """A short text of every rank, by rank. Moves an all-gather over the world."""
    held = text.encode()[:_LONGEST].ljust(_LONGEST, b"\0")
    mine = torch.tensor(list(held), dtype=torch.uint8, device=mesh.device)
    gathered = all_gather(mine, mesh.world).view(-1, _LONGEST)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in gathered.cpu().tolist()]
