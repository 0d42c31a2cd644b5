"""A check that computes a step twice: the gradients of each rank must be equal, bit for bit.

If they differ, a rank sometimes computes wrongly (silent data corruption), or uses a kernel that is not deterministic.
Each rank hashes its own gradients, unit by unit, before they are summed over ranks: so the check names the rank whose
gradient differs, and not the ranks that its gradient is added to. But messages along tp, cp, pp and ep carry a wrong
number to other ranks earlier, within the same pass.

On CUDA both passes use kernels that add in a fixed order, which other steps do not (precision/fixed_order.py).

The additional pass does not change the state of the run. Dropout is a function of the step and the sample, the weights
are not updated, and the counts of routers and the amaxes for fp8 scales are discarded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from shardwright.config.phrase import each, say
from shardwright.config.units import counted_phrase
from shardwright.parallel.comm.collectives import all_gather
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.zero.flat_unit import FlatUnit
from shardwright.precision.fixed_order import in_fixed_order
from shardwright.schedule.action import Action
from shardwright.train.build import Replica
from shardwright.train.train_step import counted_shares, run_step

# A function that is called with a unit and this rank's gradients of it, before they are summed over ranks.
GradientObserver = Callable[[FlatUnit, Tensor], None]


@contextmanager
def observed_gradients(replica: Replica, observer: GradientObserver) -> Iterator[None]:
    """A context in which `observer` is called with the gradients of each unit before they are summed over ranks;
    several times per step if each microbatch is summed by itself."""
    units = [unit for shards in replica.shards.values() for unit in shards.units]
    for unit in units:
        unit.look = partial(observer, unit)
    try:
        yield
    finally:
        for unit in units:
            unit.look = None


def compute_without_update(replica: Replica, step: int, tokens_BS: Tensor) -> None:
    """Compute the forward and backward of a step, counted from 0, without an update, and discard all that it changes.
    Not for compressed gradients, whose errors it would change."""
    job = replica.job
    assert job.plan.compress == "none", "an error of compression would be used up"

    def forget(_: Action) -> None:
        replica.finish_gradients()

    run_step(replica, step, tokens_BS, counted_shares(job, replica.mesh, tokens_BS), forget)
    for stage in replica.stages.values():
        for router in stage.routers().values():
            router.take_seen()
    for state in replica.float8_states:
        state.forget_now()
        state.weight_changed()  # the step itself casts its weights again, with the same collectives


class GradientHashes:
    """Hashes of the gradients of a pass, with the names of their units, in the order in which they were complete."""

    def __init__(self) -> None:
        self._hashes: list[tuple[str, Tensor]] = []

    def __call__(self, unit: FlatUnit, gradients: Tensor) -> None:
        """Hash the gradients of a unit."""
        self._hashes.append((unit.name, content_hash(gradients)))

    def first_difference(self, other: "GradientHashes", mesh: Mesh) -> str | None:
        """The first unit, in the order of the backward, whose gradients differ; None if none differ. The host waits for
        both passes."""
        hashes, other_hashes = (
            torch.stack([value for _, value in owner._hashes]) if owner._hashes else None for owner in (self, other)
        )
        if hashes is None or other_hashes is None or hashes.shape != other_hashes.shape:
            return None if hashes is other_hashes else "all"
        differs = mesh.numbers(hashes != other_hashes)
        return self._hashes[differs.index(1.0)][0] if any(differs) else None


class RepeatedStep:
    """Compares every n-th step with an additional pass that computes it in advance."""

    def __init__(self, every: int) -> None:
        self._every_steps = every
        self._first_pass: GradientHashes | None = None
        self.num_repeated = 0
        self.num_different = 0

    def is_due(self, step: int) -> bool:
        """True if a step, counted from 0, is computed twice."""
        return self._every_steps > 0 and (step + 1) % self._every_steps == 0

    def compute_first_pass(self, replica: Replica, step: int, tokens_BS: Tensor) -> None:
        """Compute the step in advance, without an update, and hash its gradients."""
        self._first_pass = GradientHashes()
        with observed_gradients(replica, self._first_pass), in_fixed_order(replica.mesh.device):
            compute_without_update(replica, step, tokens_BS)

    def compare(self, step: int, mesh: Mesh, second_pass: GradientHashes) -> str:
        """A sentence that names the ranks whose gradients differ between the passes, "" if none do. Moves an all-gather
        of one number per rank over the world, and if some differ, another one of names."""
        assert self._first_pass is not None, "the step was computed before"
        unit_name, self._first_pass = self._first_pass.first_difference(second_pass, mesh), None
        self.num_repeated += 1
        differs = torch.tensor([unit_name is not None], dtype=torch.int64, device=mesh.device)
        differing = [rank for rank, flag in enumerate(mesh.numbers(all_gather(differs, mesh.world))) if flag]
        if not differing:
            return ""
        self.num_different += 1
        names = gather_texts(unit_name or "", mesh)
        ranks = each(
            [say("{rank}: first in {name}", rank=mesh.shape.describe(rank), name=names[rank]) for rank in differing[:8]]
        )
        return say(
            "step {step} was computed twice from the same weights and samples, and gradients differ on {count} "
            "({ranks}); {cause}",
            step=step + 1,
            count=counted_phrase(len(differing), "rank"),
            ranks=ranks,
            cause=_CAUSES[mesh.device.type],
        )


# The end of that sentence: on a CPU a kernel may be the cause; on CUDA all kernels of both passes add in a fixed order.
_CAUSES = {
    "cpu": say("a rank that computes wrongly now and then, or a kernel that adds in no fixed order"),
    "cuda": say("a rank that computes wrongly now and then: both passes took kernels that add in a fixed order"),
}
_MOST_TEXT_BYTES = 120  # bytes of a text that are gathered


def gather_texts(text: str, mesh: Mesh) -> list[str]:
    """The short text of every rank, by rank. Moves an all-gather over the world."""
    padded = text.encode()[:_MOST_TEXT_BYTES].ljust(_MOST_TEXT_BYTES, b"\0")
    own_bytes = torch.tensor(list(padded), dtype=torch.uint8, device=mesh.device)
    gathered = mesh.on_host(all_gather(own_bytes, mesh.world)).view(-1, _MOST_TEXT_BYTES)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in gathered.tolist()]


# Elements at a time. Working memory is 16 bytes per element: 1 MiB on a CPU, which stays in a cache, 64 MiB on a GPU.
_CHUNKS = {"cpu": 1 << 16, "cuda": 1 << 22}


_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio, as an int64: spreads neighbouring positions


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def content_hash(x: Tensor, first: int = 0) -> Tensor:
    """A 64-bit hash of the contents of a contiguous tensor whose first element has position `first`: an int64 [] on its
    device.

    Each element, read as an integer, is multiplied by an odd factor that depends on its position, and the products are
    summed modulo 2^64. Such a sum does not depend on its order, so threads and devices agree. An odd factor loses no
    bit: if one element differs, the hash always differs. The hashes of the parts of a tensor add up to its hash.
    """
    words = x.detach().reshape(-1).view(_WORDS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    size = _CHUNKS[x.device.type]
    for start in range(0, words.numel(), size):
        chunk = words[start : start + size].to(torch.int64)
        begin = first + start
        factors = torch.arange(begin, begin + chunk.numel(), dtype=torch.int64, device=x.device)
        factors.mul_(_GOLDEN).bitwise_or_(1)
        # Products and sums of int64 wrap around, so they are modulo 2^64.
        total += factors.mul_(chunk).sum()
    return total


def wrapped(number: int) -> int:
    """A sum of hashes, modulo 2^64, in the range of an int64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
