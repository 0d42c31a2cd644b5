"""Is the simulated step the executed one? Measure what the stages cost here, simulate with that, run, compare.

Costs are measured on all ranks at once, as the pipeline runs them: on one machine they share memory and caches, and
a stage alone would look faster than it is.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from shardwright.model.decoder import DecoderStage
from shardwright.parallel.collectives import barrier, start_recv, start_send
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.pipeline import Performed
from shardwright.schedule.timing import Costs, Times, play
from shardwright.spec.job import JobSpec
from shardwright.train.build import Replica, build, job_program
from shardwright.train.launch import launch
from shardwright.train.step import train_step

ROUNDS = 9  # of which the median counts; the first is a warm-up


@dataclass(frozen=True)
class RankTimes:
    """What one rank measured. Seconds; by stage (forward, input gradient, weight gradient, whole backward)."""

    stages: dict[int, tuple[float, float, float, float]]
    message_s: float
    update_s: float
    steps_s: list[float]
    performed: list[Performed]


@dataclass(frozen=True)
class Comparison:
    """A step as simulated from measured costs, and as executed: the median of several."""

    schedule: str
    costs: Costs
    simulated: Times
    executed_s: float
    performed: list[list[Performed]]

    @property
    def simulated_s(self) -> float:
        """What the simulation says."""
        return self.simulated.makespan

    @property
    def error(self) -> float:
        """Relative to the executed time; positive where the simulation is too slow."""
        return self.simulated_s / self.executed_s - 1.0


def compare_step_time(job: JobSpec, folder: Path) -> Comparison:
    """Measure, simulate and run a job's step on this machine. Raises PlanError and RunError as `launch` does."""
    ranks: list[RankTimes] = launch(measure_rank, job, folder, num_threads=1)
    return compare_measured(job, ranks)


def compare_measured(job: JobSpec, ranks: list[RankTimes]) -> Comparison:
    """From what the ranks measured."""
    program = job_program(job)
    costs = measured_costs(job, ranks)
    executed_s = statistics.median(max(times) for times in zip(*(rank.steps_s for rank in ranks), strict=True))
    per_position = job.plan.world // job.plan.pp
    performed = [ranks[position * per_position].performed for position in range(job.plan.pp)]
    return Comparison(job.plan.schedule, costs, play(program, costs), executed_s, performed)


def measured_costs(job: JobSpec, ranks: list[RankTimes]) -> Costs:
    """Costs by stage, the slowest rank's where several hold a stage."""
    program = job_program(job)
    by_stage = [
        tuple(max(rank.stages[stage][part] for rank in ranks if stage in rank.stages) for part in range(4))
        for stage in range(program.num_stages)
    ]
    split = bool(program.split_backwards)
    return Costs(
        forward=tuple(forward for forward, _, _, _ in by_stage),
        input_grad=tuple(input_grad for _, input_grad, _, _ in by_stage),
        weight_grad=tuple(
            weight_grad if split else max(0.0, backward - input_grad)
            for _, input_grad, weight_grad, backward in by_stage
        ),
        latency=statistics.median(rank.message_s for rank in ranks),
        step=max(rank.update_s for rank in ranks),
    )


def measure_rank(job: JobSpec, mesh: Mesh, folder: Path) -> RankTimes:
    """Every rank of the job calls this: time the stages, a message, the update; then run whole steps."""
    replica = build(job, mesh)
    share = job.batch.global_batch_size // job.plan.dp
    generator = torch.Generator().manual_seed(mesh.dp.index)
    shape = (share, job.model.sequence + 1)
    tokens_BS = torch.randint(job.model.vocab, shape, generator=generator).to(mesh.device)
    steps_s = [_timed(lambda: train_step(job, replica, mesh, 0, tokens_BS), mesh) for _ in range(ROUNDS)]
    performed = replica.executor.performed
    microbatch_BS = tokens_BS[: job.plan.microbatch_size]
    stages = {stage: _time_stage(module, microbatch_BS, mesh) for stage, module in replica.stages.items()}
    return RankTimes(stages, _time_message(job, replica, mesh), _time_update(replica, mesh), steps_s[1:], performed)


def _timed(work: Callable[[], object], mesh: Mesh) -> float:
    barrier(mesh.world)
    start_s = time.perf_counter()
    work()
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    return time.perf_counter() - start_s


def _time_stage(stage: DecoderStage, tokens_BS: Tensor, mesh: Mesh) -> tuple[float, float, float, float]:
    """Medians of F, I, W and B of one stage."""
    rounds = []
    for _ in range(ROUNDS):
        row = []
        for split in (True, False):
            if stage.span.is_first:
                x = tokens_BS[:, :-1]
            else:
                x = torch.randn(stage.hidden_shape(len(tokens_BS)), device=mesh.device, requires_grad=True)
            outputs: list[Tensor] = []

            def forward(x: Tensor = x, outputs: list[Tensor] = outputs) -> None:
                outputs.append(stage(x, tokens_BS[:, 1:]).mean() if stage.span.is_last else stage(x))

            def backward(split: bool = split, outputs: list[Tensor] = outputs) -> None:
                with stage.deferred.keeping(0) if split else nullcontext():
                    torch.autograd.backward(get_gradient_edge(outputs[0]), torch.ones_like(outputs[0]))

            row += [_timed(forward, mesh), _timed(backward, mesh)]
            if split:
                row.append(_timed(lambda: stage.deferred.compute(0), mesh))
        rounds.append(row)
    f_split, i, w, f, b = (statistics.median(column[1:]) for column in zip(*rounds, strict=True))
    return min(f_split, f), i, w, b


def _time_message(job: JobSpec, replica: Replica, mesh: Mesh) -> float:
    """Half the time of a hidden state that goes to a neighbour in the pipeline and comes back."""
    pp = mesh.pp
    if pp.size == 1:
        return 0.0
    shape = next(iter(replica.stages.values())).hidden_shape(job.plan.microbatch_size)
    message = torch.zeros(shape, device=mesh.device)
    neighbour = pp.index ^ 1
    if neighbour >= pp.size:  # the last of an odd number has nobody to play with, but keeps step
        return statistics.median(_timed(lambda: None, mesh) for _ in range(ROUNDS))

    def there_and_back() -> None:
        for sends in (pp.index < neighbour, pp.index > neighbour):
            if sends:
                start_send(message, pp, neighbour, tag=0).wait()
            else:
                start_recv(message, pp, neighbour, tag=0).wait()

    return statistics.median([_timed(there_and_back, mesh) for _ in range(ROUNDS)][1:]) / 2


def _time_update(replica: Replica, mesh: Mesh) -> float:
    """The optimizer's part of a step: norm, scaling, update, and emptying the gradients."""

    def update() -> None:
        replica.gradient_norm()
        for buckets in replica.buckets.values():
            buckets.scale(1.0)
        for optimizer in replica.optimizers.values():
            optimizer.step()
        for buckets in replica.buckets.values():
            buckets.zero()

    return statistics.median([_timed(update, mesh) for _ in range(ROUNDS)][1:])
