"""The origin of a number that is not finite: the rank, and the parameter or the loss.

The search begins after a step that was not finite. Its gradients are sums over ranks by then, and a sum does not show
whose part was bad. So the step is computed once more, without an update, and each rank checks its own gradients before
they are summed. If the fault occurs again, the rank and the parameter are named. If it does not, the machine was at
fault, and only the losses of the step give a hint.

A backward goes from the head to the embedding, and passes on values that are not finite. So among the parameters with a
bad gradient, the last one in the model is nearest to the origin.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from shardwright.config.model import ModelSpec
from shardwright.config.phrase import say
from shardwright.parallel.comm.collectives import all_gather
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.zero.flat_unit import FlatUnit
from shardwright.sharding.stage_parameters import model_parameters
from shardwright.train.build import Replica
from shardwright.train.health.repeated_step import compute_without_update, gather_texts, observed_gradients


class LastBadGradient:
    """The last parameter in the model whose gradient of a pass is not finite."""

    def __init__(self, model: ModelSpec, mesh: Mesh) -> None:
        self._mesh = mesh
        self._order = {place.name: i for i, place in enumerate(model_parameters(model))}
        self.position = -1  # of the parameter in the model; -1 if all gradients are finite
        self.name = ""

    def __call__(self, unit: FlatUnit, gradients: Tensor) -> None:
        """Check the gradients of a unit."""
        if self._is_finite(gradients):
            return
        for parameter in unit.parameters:
            position, gradient = self._order[parameter.place.name], parameter.gradient
            if position > self.position and gradient is not None and not self._is_finite(gradient):
                self.position, self.name = position, parameter.place.name

    def _is_finite(self, values: Tensor) -> bool:
        return bool(self._mesh.to_host(all_finite([values], self._mesh)))


def where_not_finite(replica: Replica, step: int, tokens_BS: Tensor) -> str:
    """A sentence that names the ranks whose losses or gradients were the first that are not finite, and how sure that
    is.

    All ranks call it, after a step that was not finite, and before any update. It computes the step again, unless
    gradients are compressed, and moves small all-gathers over the world.
    """
    job, mesh = replica.job, replica.mesh
    bad_ranks = [rank for rank, is_bad in enumerate(_gathered(_has_bad_loss(replica), mesh)) if is_bad]
    if job.plan.compress != "none":
        return say(
            "{origin}; compressed gradients can't be computed again to find more", origin=_by_losses(bad_ranks, mesh)
        )
    bad_gradient = LastBadGradient(job.model, mesh)
    with observed_gradients(replica, bad_gradient):
        compute_without_update(replica, step, tokens_BS)
    bad_again = [rank for rank, is_bad in enumerate(_gathered(_has_bad_loss(replica), mesh)) if is_bad]
    positions = _gathered(bad_gradient.position, mesh)
    names = gather_texts(bad_gradient.name, mesh)
    if bad_again:
        return say("{origin}; so it was when the step was computed again", origin=_by_losses(bad_again, mesh))
    last = max(positions)
    if last >= 0:
        ranks = [mesh.shape.describe(rank) for rank, position in enumerate(positions) if position == last]
        return say(
            "computed again, the first gradient that is not finite is that of {name} on {ranks}",
            name=names[positions.index(last)],
            ranks=tuple(ranks[:4]),
        )
    return say(
        "{origin}; computed again, the step was finite on every rank: a fault of the machine, not of the numbers, "
        "and which rank had it can't be told from what is left",
        origin=_by_losses(bad_ranks, mesh),
    )


def gives_no_number(replica: Replica, step: int, tokens_BS: Tensor) -> bool:
    """True if the current weights give a loss or a gradient that is not finite for a batch, on any rank. With a scaled
    loss the gradient may overflow, and is not checked. All ranks call it. Not for compressed gradients."""
    compute_without_update(replica, step, tokens_BS)
    has_bad_norm = replica.loss_scale is None and not math.isfinite(replica.gradient_norm())
    return any(_gathered(_has_bad_loss(replica), replica.mesh)) or has_bad_norm


def weights_not_finite(replica: Replica) -> str:
    """A sentence that names the ranks with weights that are not finite, "" if all are finite. Moves a small all-gather
    over the world."""
    mesh = replica.mesh
    values_of_units = [unit.value_shard for stage in replica.shards.values() for unit in stage.units]
    are_finite = all_gather(all_finite(values_of_units, mesh)[None], mesh.world)
    bad_ranks = [rank for rank, is_finite in enumerate(mesh.numbers_or_ones(are_finite)) if not is_finite]
    if not bad_ranks:
        return ""
    return say("weights of {ranks} are not finite", ranks=tuple(mesh.shape.describe(rank) for rank in bad_ranks[:4]))


def _by_losses(ranks: list[int], mesh: Mesh) -> str:
    """The origin of the fault, as far as the losses that are not finite show it; they are on these ranks."""
    if not ranks:
        return say("the losses of all ranks are finite, so it began in a backward or in a sum of gradients")
    names = tuple(mesh.shape.describe(rank) for rank in ranks[:4])
    if len(ranks) > 1:
        return say("the losses of {names} are not finite, so it began in the forward of each of them", names=names)
    return say("the loss of {names} is not finite, so it began in a forward of that replica", names=names)


def _has_bad_loss(replica: Replica) -> int:
    """1 if this rank has a loss that is not finite, 0 if not."""
    return int(not replica.mesh.to_host(all_finite(replica.executor.losses.values(), replica.mesh)))


def all_finite(tensors: Iterable[Tensor], mesh: Mesh) -> Tensor:
    """1 if all values of some tensors are finite, 0 if not, as a number on the device: the host need not wait."""
    is_finite = torch.ones((), dtype=torch.int64, device=mesh.device)
    for values in tensors:
        is_finite *= values.isfinite().all().to(mesh.device, non_blocking=True)  # values may lie in host memory
    return is_finite


def _gathered(number: int, mesh: Mesh) -> list[int]:
    """The number of every rank, by rank. Moves an all-gather over the world."""
    own_number = torch.tensor([number], dtype=torch.int64, device=mesh.device)
    return [int(n) for n in mesh.on_host(all_gather(own_number, mesh.world)).tolist()]
