"""Joins the ranks of a user's script, as torchrun's environment describes them, and watches them."""

import atexit
import sys
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist

from shardwright.config.base import RunError, error_text
from shardwright.config.job import JobSpec
from shardwright.config.phrase import in_language, language_of_locale, say
from shardwright.parallel.comm.hang_watch import Watch, WatchRules
from shardwright.parallel.comm.process_groups import Mesh, MeshNeeds, make_mesh
from shardwright.sharding.mesh import MeshShape
from shardwright.train.launch.meeting import NotMetError
from shardwright.train.launch.rank_environment import RankEnvironment
from shardwright.train.launch.rank_life import Failure, give_up, join_others

_MOST_CHARACTERS = 400  # of the error with which a rank left


def num_ranks() -> int:
    """The number of ranks: of the process group, if there is one, else of torchrun; 1 without either."""
    if _has_group():
        return dist.get_world_size()
    env = RankEnvironment.from_environment()
    return 1 if env is None else env.world


def joined_mesh(job: JobSpec, device: torch.device, timeout_s: float) -> Mesh:
    """The mesh of the plan. If the script has not made a process group, it is made here, with a watch that ends a rank
    that waits longer than `timeout_s`, and tells for which ranks it waited. Raises RunError."""
    if _has_group():
        return make_mesh(MeshNeeds(job.plan), dist.get_rank(), device, timeout_s)
    env = RankEnvironment.from_environment()
    if env is None or env.world == 1:
        return make_mesh(MeshNeeds(job.plan), 0, device, timeout_s)
    rules = WatchRules(timeout_s, MeshShape.of(job.plan).describe, partial(_end, env.rank), explains_losses=True)
    make = partial(make_mesh, MeshNeeds(job.plan), env.rank, device, timeout_s)
    try:
        mesh, watch = join_others(env, device, rules, make)
    except NotMetError as error:
        raise RunError(error_text(error)) from None
    atexit.register(_leave, watch)
    return mesh


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _leave(watch: Watch) -> None:
    """Tell ranks that wait for this one why it ends."""
    error = getattr(sys, "last_value", None)  # set if an exception ended the script
    reason: str = say("its script is over")
    if error is not None:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:_MOST_CHARACTERS]
    with suppress(RuntimeError):  # the store is gone, and with it the ranks that wait
        watch.leave(reason)


def _end(rank: int, sentence: str) -> None:
    give_up(Failure(rank, "timeout", sentence.replace("run.timeout_s", "timeout_s")), _tell)


def _tell(failure: Failure) -> None:
    print(in_language(failure.message, language_of_locale()), file=sys.stderr, flush=True)
