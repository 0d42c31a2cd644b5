"""Does a plan compute what one rank would have computed? Run both on the same data, and compare everything."""

import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from shardwright.parallel.mesh import Mesh
from shardwright.parallel.parameter import placed_parameters
from shardwright.spec.job import JobSpec
from shardwright.spec.place import Place
from shardwright.train.build import build
from shardwright.train.data import prepare_tokens
from shardwright.train.launch import launch
from shardwright.train.step import StepResult, refuse_asynchronous, train_step
from shardwright.train.trainer import my_share


@dataclass(frozen=True)
class Record:
    """What one rank did: its steps, and its boxes of the parameters afterwards."""

    steps: list[StepResult]
    boxes: list[tuple[Place, Tensor]]


@dataclass(frozen=True)
class Verdict:
    """The largest differences between a plan and one rank.

    Losses differ in nats a token. A gradient norm differs relative to the one rank's; so does a parameter, by the
    norm of the difference over the norm of the whole tensor. `bitwise` says that nothing differs at all.
    """

    steps: int
    world: int
    max_loss_difference: float
    max_grad_norm_relative_difference: float
    max_parameter_relative_difference: float
    bitwise: bool

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        return asdict(self)

    def within(self, tolerance: float) -> bool:
        """Whether no difference is larger than `tolerance`."""
        largest = (
            self.max_loss_difference,
            self.max_grad_norm_relative_difference,
            self.max_parameter_relative_difference,
        )
        return all(difference <= tolerance for difference in largest)


def record_steps(num_steps: int, data_folder: Path, job: JobSpec, mesh: Mesh, folder: Path) -> None:
    """Do the job's first steps on this rank and leave a Record in `folder`."""
    samples = prepare_tokens(job.data, job.model, job.run.seed, data_folder).train_samples()
    replica = build(job, mesh)
    steps = [
        train_step(job, replica, mesh, step, my_share(samples, step * job.batch.global_batch_size, job, mesh))
        for step in range(num_steps)
    ]
    with replica.gathered():
        parameters = [p for stage in replica.stages.values() for p in placed_parameters(stage).values()]
        # Copies, for a view would be saved with the whole buffer that it lies in.
        boxes = [(p.place, p.detach().clone()) for p in parameters]
    torch.save((steps, boxes), folder / f"rank{mesh.rank}.pt")


def verify(job: JobSpec, num_steps: int) -> Verdict:
    """Run the job's first steps under its plan and on one rank, one thread a rank, and compare.

    Every parameter of every rank is compared, copies included. Raises PlanError and RunError as `launch` does.
    """
    refuse_asynchronous(job, "verify")
    with tempfile.TemporaryDirectory(prefix="shardwright-verify-") as scratch:
        data_folder, plan_folder, one_folder = (Path(scratch, name) for name in ("data", "plan", "one"))
        prepare_tokens(job.data, job.model, job.run.seed, data_folder)  # what is wrong with the data shows here
        work = partial(record_steps, num_steps, data_folder)
        launch(work, job, plan_folder, num_threads=1)
        launch(work, job.as_one_rank(), one_folder, num_threads=1)
        ranks = [_read(plan_folder / f"rank{rank}.pt") for rank in range(job.plan.world)]
        return compare(ranks, _read(one_folder / "rank0.pt"))


def _read(path: Path) -> Record:
    steps, boxes = torch.load(path, weights_only=False)  # our own file, written a moment ago
    return Record(steps, boxes)


def compare(ranks: list[Record], one: Record) -> Verdict:
    """The largest differences between the ranks of a plan and one rank."""
    full = {place.name: tensor for place, tensor in one.boxes}
    bitwise = all(rank.steps == one.steps for rank in ranks)
    worst = 0.0
    for rank in ranks:
        for place, box in rank.boxes:
            wanted = full[place.name][place.slices]
            bitwise = bitwise and torch.equal(box, wanted)
            worst = max(worst, _relative(box, wanted, full[place.name]))
    pairs = [(a, b) for rank in ranks for a, b in zip(rank.steps, one.steps, strict=True)]
    norms = [(a.grad_norm, b.grad_norm) for a, b in pairs if a.grad_norm is not None and b.grad_norm is not None]
    return Verdict(
        steps=len(one.steps),
        world=len(ranks),
        max_loss_difference=max(abs(a.loss - b.loss) for a, b in pairs),
        max_grad_norm_relative_difference=max(abs(a - b) / b for a, b in norms),
        max_parameter_relative_difference=worst,
        bitwise=bitwise,
    )


def _relative(box: Tensor, wanted: Tensor, full: Tensor) -> float:
    """Norm of the difference over the norm of the tensor, for a box as if the whole tensor differed like it."""
    difference = torch.linalg.vector_norm(box.double() - wanted.double()).item()
    scale = torch.linalg.vector_norm(full.double()).item() * (box.numel() / full.numel()) ** 0.5
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0 else float("inf")
