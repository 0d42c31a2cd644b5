"""The other ranks of a script of the user's own: joined as torchrun's environment says, and watched."""

import atexit
import sys
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist

from shardwright.config.base import RunError
from shardwright.config.job import JobSpec
from shardwright.parallel.comm.hang_watch import Watch
from shardwright.parallel.comm.process_groups import Mesh, make_mesh
from shardwright.sharding.mesh import MeshShape
from shardwright.train.launch.meeting import NotMetError
from shardwright.train.launch.rank_environment import RankEnvironment
from shardwright.train.launch.rank_life import Failure, give_up, join_others

_MOST_TOLD = 400  # letters of the error that a rank left with


def num_ranks() -> int:
    """Ranks that there are: of the process group, if there is one, else of torchrun; 1 without either."""
    if _has_group():
        return dist.get_world_size()
    seat = RankEnvironment.from_environment()
    return 1 if seat is None else seat.world


def joined_mesh(job: JobSpec, device: torch.device, timeout_s: float) -> Mesh:
    """The process groups of the plan. Where the script has made no group of all ranks, it is made here, with a watch
    that ends a rank which waits longer than `timeout_s` and says for whom. Raises RunError."""
    if _has_group():
        return make_mesh(job.plan, dist.get_rank(), device, timeout_s)
    seat = RankEnvironment.from_environment()
    if seat is None or seat.world == 1:
        return make_mesh(job.plan, 0, device, timeout_s)
    shape = MeshShape.of(job.plan)
    try:
        mesh, watch = join_others(
            seat, device, timeout_s, shape.describe, partial(make_mesh, job.plan, seat.rank, device, timeout_s),
            on_timeout=partial(_end, seat.rank), explains_losses=True,
        )  # fmt: skip
    except NotMetError as error:
        raise RunError(str(error)) from None
    atexit.register(_leave, watch)
    return mesh


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _leave(watch: Watch) -> None:
    """Tell ranks that may wait for this one why it ends."""
    error = getattr(sys, "last_value", None)  # of a script that an error ended
    reason = "its script is over"
    if error is not None:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:_MOST_TOLD]
    with suppress(RuntimeError):  # where the store has gone, nobody is left to be told
        watch.leave(reason)


def _end(rank: int, sentence: str) -> None:
    give_up(Failure(rank, "timeout", sentence.replace("run.timeout_s", "timeout_s")), _tell)


def _tell(failure: Failure) -> None:
    print(failure.message, file=sys.stderr, flush=True)
