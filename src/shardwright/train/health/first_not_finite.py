"""Where a number came up that is not finite: rank, and parameter or loss.

It is asked only once it has happened. Then the gradients are sums over ranks, and a sum does not say whose part was
bad. So the step is computed once more, beside the run, and each rank looks at its own gradients before they are summed.
If the number comes up again, the rank and the unit of parameters are named. A fault that does not come up again was one
of the machine, and the losses of the step say what is left to say.

A backward goes from the head to the embedding and carries what is not finite along: of the parameters with a bad
gradient, the one that is last in the model is nearest to where it began.
"""

import math

import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.model import ModelSpec
from shardwright.parallel.comm.collectives import all_gather
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.zero.flat_unit import FlatUnit
from shardwright.sharding.stage_parameters import model_parameters
from shardwright.train.build import Replica
from shardwright.train.health.repeated_step import compute_beside, gather_texts, looking


class LastBadGradient:
    """The parameter of a pass that is last in the model among those with a gradient that is not finite."""

    def __init__(self, model: ModelSpec) -> None:
        self._order = {place.name: i for i, place in enumerate(model_parameters(model))}
        self.position = -1  # in the model; -1 where all are finite
        self.name = ""

    def __call__(self, unit: FlatUnit, gradients: Tensor) -> None:
        """Look at the gradients of a unit."""
        if bool(gradients.isfinite().all()):
            return
        for parameter in unit.parameters:
            position, gradient = self._order[parameter.place.name], parameter.gradient
            if position > self.position and gradient is not None and not bool(gradient.isfinite().all()):
                self.position, self.name = position, parameter.place.name


def where_not_finite(job: JobSpec, replica: Replica, mesh: Mesh, step: int, tokens_BS: Tensor) -> str:
    """A sentence: which ranks' losses or gradients are the first that are not finite, and how sure that is.

    All ranks call it, after a step that was not finite and was not updated with. It computes the step again, unless
    gradients are compressed, and moves small all-gathers over the world.
    """
    first = [rank for rank, is_bad in enumerate(_gathered(_has_bad_loss(replica), mesh)) if is_bad]
    if job.plan.compress != "none":
        return _by_losses(first, mesh) + "; compressed gradients can't be computed again to find more"
    bad = LastBadGradient(job.model)
    with looking(replica, bad):
        compute_beside(job, replica, mesh, step, tokens_BS)
    losses = [rank for rank, is_bad in enumerate(_gathered(_has_bad_loss(replica), mesh)) if is_bad]
    positions = _gathered(bad.position, mesh)
    names = gather_texts(bad.name, mesh)
    if losses:
        return f"{_by_losses(losses, mesh)}; so it was when the step was computed again"
    last = max(positions)
    if last >= 0:
        told = [mesh.shape.describe(rank) for rank, at in enumerate(positions) if at == last]
        return (
            f"computed again, the first gradient that is not finite is that of {names[positions.index(last)]} on "
            f"{', '.join(told[:4])}"
        )
    return (
        f"{_by_losses(first, mesh)}; computed again, the step was finite on every rank: a fault of the machine, not of "
        f"the numbers, and which rank had it can't be told from what is left"
    )


def gives_no_number(job: JobSpec, replica: Replica, mesh: Mesh, step: int, tokens_BS: Tensor) -> bool:
    """True if the weights as they are give a loss or a gradient that is not finite for a batch, on any rank; of a loss
    that is scaled the gradient may overflow, and does not count. All ranks call it. Not for compressed gradients."""
    compute_beside(job, replica, mesh, step, tokens_BS)
    has_bad_norm = replica.loss_scale is None and not math.isfinite(replica.gradient_norm())
    return any(_gathered(_has_bad_loss(replica), mesh)) or has_bad_norm


def weights_not_finite(replica: Replica, mesh: Mesh) -> str:
    """A sentence: which ranks' weights are not finite, empty where all are. Moves a small all-gather over the world."""
    shards = [unit.value_shard for held in replica.shards.values() for unit in held.units]
    is_bad = any(not bool(values.isfinite().all()) for values in shards)
    bad = [rank for rank, found in enumerate(_gathered(int(is_bad), mesh)) if found]
    return f"weights of {', '.join(mesh.shape.describe(rank) for rank in bad[:4])} are not finite" if bad else ""


def _by_losses(ranks: list[int], mesh: Mesh) -> str:
    if not ranks:
        return "the losses of all ranks are finite, so it began in a backward or in a sum of gradients"
    told = ", ".join(mesh.shape.describe(rank) for rank in ranks[:4])
    if len(ranks) > 1:
        return f"the losses of {told} are not finite, so it began in the forward of each of them"
    return f"the loss of {told} is not finite, so it began in a forward of that replica"


def _has_bad_loss(replica: Replica) -> int:
    return int(any(not bool(loss.isfinite().all()) for loss in replica.executor.losses.values()))


def _gathered(number: int, mesh: Mesh) -> list[int]:
    mine = torch.tensor([number], dtype=torch.int64, device=mesh.device)
    return [int(n) for n in all_gather(mine, mesh.world).tolist()]
