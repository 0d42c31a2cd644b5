"""A router whose ranks hold parts of every sequence decides as one that has all of it."""

import pytest
import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.model.forward_pass import ForwardPass
from shardwright.model.position_tables import positions_tensor
from shardwright.model.router import Router
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.pipeline.pipeline_stage import Microbatch
from shardwright.parallel.tensor.initial_values import materialise
from shardwright.parallel.tensor.linear import LayerSharding
from support.cases import EXPERTS, small_job
from support.ranks import run_on_mesh

FACTOR = 0.25
CPU = torch.device("cpu")


def route(mesh: Mesh, job: JobSpec, cp: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions here, weights by expert of these tokens, gradient of the router's weight, counts of choices."""
    cut = LayerSharding(mesh.tp, mesh.dp if cp > 1 else mesh.tp.alone("cp"), mesh.ep, mesh.expert_tp)
    router = Router(job.model, 1, cut)
    materialise(router, 3, CPU)
    router.state.shares_E.copy_(torch.linspace(0.0, 1.0, job.model.moe.experts))  # as if a step had gone before
    positions_s = positions_tensor(cut.held(job.model.sequence), CPU)
    assert (positions_s.diff() != 1).any() == (cp > 1 and cut.cp.index == 0)  # zig-zag: the first rank's lie apart
    x_SBH = torch.randn(job.model.sequence, 2, job.model.hidden, generator=torch.Generator().manual_seed(1)) * 5
    microbatch = Microbatch(1, 0, 0, FACTOR / cp)
    run = ForwardPass(None, microbatch)
    routing = router(x_SBH[positions_s], run)
    (routing.weights_TK.sum() * 0).backward()  # the gradient of the losses alone
    by_expert_TE = torch.zeros(len(routing.experts_TK), job.model.moe.experts + 1)
    by_expert_TE.scatter_(1, routing.experts_TK % (job.model.moe.experts + 1), routing.weights_TK.detach())
    gradient = router.weight.gradient
    assert gradient is not None
    return positions_s, by_expert_TE[:, :-1].unflatten(0, (-1, 2)), gradient, router.state.seen


@pytest.mark.parametrize("kind", EXPERTS)
def test_zig_zag_parts_decide_as_one(kind: str) -> None:
    one = small_job(kind)
    ((_, expected_SBE, gradient, seen),) = run_on_mesh(one, route, one, 1)
    # The ranks of dp stand for those of cp: a router needs no more of them than their axis.
    job = small_job(kind, dp=2)
    parts = run_on_mesh(job, route, job, 2)
    for positions_s, found_sBE, _, _ in parts:
        torch.testing.assert_close(found_sBE, expected_SBE[positions_s])
    torch.testing.assert_close(sum(part[2] for part in parts), gradient)
    torch.testing.assert_close(sum(part[3] for part in parts), seen)
    assert (gradient.abs().max() > 0) == (one.model.moe.aux_loss != "none")
