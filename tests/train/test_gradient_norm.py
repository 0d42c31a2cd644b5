"""The norm of the gradients with few kernels, as on CUDA: that of the many, and the host waits for it once."""

from typing import Any

import pytest
import torch

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.build import build
from shardwright.train.dry_steps import DrySteps
from shardwright.train.train_step import train_step
from support.cases import made_up_tokens, small_job
from support.kernel_traffic import KernelTraffic
from support.ranks import leaves_nothing, run_on_mesh

PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "tied": {"kind": "gpt-tied", "dp": 2},
    "zero 2": {"dp": 2, "zero": 2},
    "zero 3, small units": {"dp": 2, "zero": 3, "bucket_mib": 0.001},
    "tp in a pipeline": {"tp": 2, "pp": 2},
    "experts": {"kind": "mixtral", "dp": 2, "ep": 2},
}


@leaves_nothing
def squares_both_ways(mesh: Mesh, job: JobSpec) -> tuple[torch.Tensor, torch.Tensor]:
    replica = build(job, mesh)
    share = job.batch.global_batch_size // job.plan.dp
    train_step(replica, 0, made_up_tokens(job, 0)[mesh.dp.index * share :][:share])
    norm = replica.gradient_norm
    one_by_one, at_once = (torch.full((norm._num_slots + 1,), -1.0, dtype=torch.float64) for _ in range(2))
    norm._put_squares(one_by_one)
    norm._put_squares_at_once(at_once)
    return one_by_one, at_once


@pytest.mark.parametrize("plan", PLANS)
def test_few_kernels_find_the_same(plan: str) -> None:
    job = small_job(**PLANS[plan])
    results = run_on_mesh(job, squares_both_ways, job)
    assert any((one_by_one > 0).any() for one_by_one, _ in results)
    for one_by_one, at_once in results:
        # A parameter that lies elsewhere is 0 in the one, and left as it was in the other.
        here = at_once >= 0
        torch.testing.assert_close(at_once[here], one_by_one[here], rtol=1e-12, atol=0)
        assert (one_by_one[~here] <= 0).all()


def test_a_device_launches_few() -> None:
    counts = {}
    for device in ("cpu", "cuda"):
        steps = DrySteps(small_job(layers=8), 0, device)
        with KernelTraffic() as traffic:
            steps.run()
        of_norm = [(kernel, n) for kernel, n in traffic.kernels.items() if kernel.file == "train/gradient_norm.py"]
        counts[device] = sum(n for _, n in of_norm)
    num_parameters = steps.replica.gradient_norm._num_slots
    assert counts["cpu"] > 3 * num_parameters
    assert counts["cuda"] < num_parameters
