"""A data-parallel training step of ours against the same model under torch's DistributedDataParallel.

    .venv/bin/python benchmarks/data_parallel.py

A step is forward and backward of 1 or 4 microbatches, gradient reduction, clipping by the global norm, fused AdamW
and the mean loss over the replicas. The baseline wraps the same model, as one rank holds it, in
DistributedDataParallel (gradients as views of buckets of the same size, `no_sync` for all but the last microbatch),
and clips with torch's clip_grad_norm_. Losses and norms of the first steps are checked equal before anything is timed.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from alternate import RATIO_HEADER, alternate, plain_stage, print_row, resized, run_two_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwright.model.decoder import DecoderStage
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.parameter import placed_parameters
from shardwright.spec.job import JobSpec
from shardwright.train.build import build
from shardwright.train.optimizer import learning_rate, make_adamw
from shardwright.train.step import StepResult, train_step

MODELS = {
    "small": {"layers": 2, "hidden": 128, "heads": 4, "ffn": 352, "vocab": 512, "sequence": 64},
    "larger": {"layers": 4, "hidden": 256, "heads": 8, "ffn": 704, "vocab": 2048, "sequence": 64},
}
MICROBATCHES = (1, 4)
MICROBATCH_SIZE = 2
CHECKED_STEPS = 3
MOST_ROUNDS, MOST_S = 60, 16.0


class WithLoss(nn.Module):
    """The whole decoder with its loss inside, for DistributedDataParallel reduces what `forward` used."""

    def __init__(self, decoder: DecoderStage) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """The mean loss of tokens [B, S + 1]."""
        return self.decoder(tokens_BS[:, :-1], tokens_BS[:, 1:]).mean()


def torch_step(job: JobSpec, mesh: Mesh) -> Callable[[int, Tensor], StepResult]:
    """The baseline's step."""
    decoder = plain_stage(job)
    optimizer = make_adamw(job.optimizer, list(placed_parameters(decoder).values()))
    model = DistributedDataParallel(
        WithLoss(decoder), process_group=mesh.dp.group, bucket_cap_mb=job.plan.bucket_mib, forward_sync_buffers=False,
        gradient_as_bucket_view=True,
    )  # fmt: skip

    def step(number: int, tokens_BS: Tensor) -> StepResult:
        rate = learning_rate(job.optimizer, number)
        parts = tokens_BS.split(job.plan.microbatch_size)
        total = torch.zeros((), dtype=torch.float64)
        optimizer.zero_grad(set_to_none=True)
        for index, part in enumerate(parts):
            with nullcontext() if index == len(parts) - 1 else model.no_sync():
                loss = model(part)
                (loss / len(parts)).backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), job.optimizer.clip_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        dist.all_reduce(total, group=mesh.dp.group)
        return StepResult(total.item() / (len(parts) * mesh.dp.size), norm.item(), rate)

    return step


def compare(mesh: Mesh, job: JobSpec) -> list[str]:
    """Check and time one job; the row of the table after its name."""
    replica = build(job, mesh)
    generator = torch.Generator().manual_seed(mesh.rank)
    shape = (job.batch.global_batch_size // mesh.dp.size, job.model.sequence + 1)
    tokens_BS = torch.randint(job.model.vocab, shape, generator=generator)
    step = torch_step(job, mesh)

    for number in range(CHECKED_STEPS):
        ours, theirs = train_step(job, replica, mesh, number, tokens_BS), step(number, tokens_BS)
        for name in ("loss", "grad_norm"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert abs(a - b) <= 1e-4 * abs(b), f"{name} of step {number} is {a}, the baseline's is {b}"

    ratio = alternate(
        lambda: train_step(job, replica, mesh, CHECKED_STEPS, tokens_BS), lambda: step(CHECKED_STEPS, tokens_BS),
        MOST_ROUNDS, MOST_S,
    )  # fmt: skip
    return ratio.cells()


def benchmark(mesh: Mesh, job: JobSpec) -> None:
    """All variants on this rank."""
    print_row(["training step", *RATIO_HEADER], is_header=True)
    for size, model in MODELS.items():
        for count in MICROBATCHES:
            batch = count * MICROBATCH_SIZE * mesh.dp.size
            variant = resized(job, model=model, batch={"global_batch_size": batch})
            name = f"{size}, dp 2, {count} microbatch{'' if count == 1 else 'es'}"
            print_row([name, *compare(mesh, variant)])


if __name__ == "__main__":
    run_two_ranks(benchmark, {"plan": {"dp": 2, "microbatch_size": MICROBATCH_SIZE}})
