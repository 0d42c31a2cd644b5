"""The simulated step against the executed one: measure the costs of the stages, simulate with them, run, compare.

Costs are measured on all ranks at once, as the pipeline runs them: on one machine the ranks share memory and caches,
and a stage alone would look faster than it is.
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

from shardwright.config.job import JobSpec
from shardwright.measure.machine_memory import refuse_small_machine
from shardwright.model.decoder import DecoderStage
from shardwright.parallel.comm.collectives import barrier, start_recv, start_send
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.pipeline.action_times import Performed, times_of_step
from shardwright.parallel.pipeline.pipeline_stage import Microbatch
from shardwright.schedule.job_program import job_program
from shardwright.schedule.timing import Costs, Times, play
from shardwright.train.build import Replica, build
from shardwright.train.data.progress import tell_aside
from shardwright.train.launch.launch import launch
from shardwright.train.launch.this_machine import on_this_machine
from shardwright.train.train_step import refuse_asynchronous, train_step

ROUNDS = 9  # the median of all but the first counts, which is a warm-up


@dataclass(frozen=True)
class RankTimes:
    """The measured seconds of one rank; by stage (forward, input gradient, weight gradient, whole backward)."""

    stages: dict[int, tuple[float, ...]]
    message_s: float
    update_s: float
    steps_s: list[float]
    performed: list[Performed]


@dataclass(frozen=True)
class Comparison:
    """A step as simulated from measured costs, and as executed: the median of several executions."""

    costs: Costs
    simulated: Times
    executed_s: float
    performed: list[list[Performed]]

    @property
    def simulated_s(self) -> float:
        """The simulated seconds."""
        return self.simulated.makespan

    def executed(self) -> Times:
        """The last executed step, in the form of the simulation: times count from the first action's start."""
        return times_of_step(self.performed)

    @property
    def error(self) -> float:
        """The simulation's error relative to the executed time; positive if the simulation is too slow."""
        return self.simulated_s / self.executed_s - 1.0


def compare_step_time(job: JobSpec, folder: Path) -> Comparison:
    """Measure, simulate and run a job's step on this machine. Raises PlanError and RunError as `launch` does."""
    refuse_asynchronous(job, "simulate --execute")
    job = on_this_machine(job, job.plan.world, tell_aside)
    refuse_small_machine(job)
    ranks: list[RankTimes] = launch(measure_rank, job, folder, num_threads=1)
    program = job_program(job)
    costs = measured_costs(job, ranks)
    executed_s = statistics.median(max(times) for times in zip(*(rank.steps_s for rank in ranks), strict=True))
    per_position = job.plan.world // job.plan.pp
    performed = [ranks[position * per_position].performed for position in range(job.plan.pp)]
    return Comparison(costs, play(program, costs), executed_s, performed)


def measured_costs(job: JobSpec, ranks: list[RankTimes]) -> Costs:
    """Costs by stage; those of the slowest rank if several hold a stage."""
    program = job_program(job)
    by_stage = [
        tuple(max(rank.stages[stage][part] for rank in ranks if stage in rank.stages) for part in range(4))
        for stage in range(program.num_stages)
    ]
    forward, input_grad, weight_grad, backward = zip(*by_stage, strict=True)
    if not program.split_backwards:
        weight_grad = tuple(max(0.0, both_s - input_s) for both_s, input_s in zip(backward, input_grad, strict=True))
    latency = statistics.median(rank.message_s for rank in ranks)
    return Costs(forward, input_grad, weight_grad, latency=latency, step=max(rank.update_s for rank in ranks))


def measure_rank(job: JobSpec, mesh: Mesh, folder: Path) -> RankTimes:
    """Time a whole step, each stage, a message and the update, in turn. Every rank of the job calls this.

    The rounds interleave them, so that a machine that is slow for a while is slow for all of them.
    """
    job = job.grown()
    replica = build(job, mesh)
    share = job.batch.global_batch_size // job.plan.dp
    generator = torch.Generator().manual_seed(mesh.dp.index)
    shape = (share, job.model.sequence + 1)
    tokens_BS = torch.randint(job.model.vocab, shape, generator=generator).to(mesh.device)
    microbatch_BS = tokens_BS[: job.plan.microbatch_size]
    steps_s, messages_s, updates_s = [], [], []
    stages: dict[int, list[tuple[float, ...]]] = {stage: [] for stage in replica.stages}
    performed: list[Performed] = []
    for _ in range(ROUNDS):
        steps_s.append(_timed(lambda: train_step(replica, 0, tokens_BS), mesh))
        performed = replica.executor.performed
        for stage, module in replica.stages.items():
            stages[stage].append(_time_stage(module, microbatch_BS, mesh))
        messages_s.append(_time_message(replica))
        updates_s.append(_time_update(replica))
    medians = {
        stage: tuple(statistics.median(column[1:]) for column in zip(*rounds, strict=True))
        for stage, rounds in stages.items()
    }
    message_s, update_s = statistics.median(messages_s[1:]), statistics.median(updates_s[1:])
    return RankTimes(medians, message_s, update_s, steps_s[1:], performed=performed)


def _timed(work: Callable[[], object], mesh: Mesh) -> float:
    barrier(mesh.world)
    start_s = time.perf_counter()
    work()
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    return time.perf_counter() - start_s


def _time_stage(stage: DecoderStage, tokens_BS: Tensor, mesh: Mesh) -> tuple[float, float, float, float]:
    """Seconds of F, I, W and B of one stage, once."""
    times_s = []
    microbatch = Microbatch(seed=0, step=0, first_sample=0)  # as in training: with dropout, if the model has some
    for split in (True, False):
        x = tokens_BS[:, :-1] if stage.span.is_first else stage.empty_hidden(len(tokens_BS)).normal_().requires_grad_()
        outputs: list[Tensor] = []

        def forward(x: Tensor = x, outputs: list[Tensor] = outputs) -> None:
            if stage.span.is_last:
                outputs.append(stage(x, tokens_BS[:, 1:], microbatch).mean())
            else:
                outputs.append(stage(x, microbatch=microbatch))

        def backward(split: bool = split, outputs: list[Tensor] = outputs) -> None:
            with stage.deferred.keeping(0) if split else nullcontext():
                torch.autograd.backward(get_gradient_edge(outputs[0]), torch.ones_like(outputs[0]))

        times_s += [_timed(forward, mesh), _timed(backward, mesh)]
        if split:
            times_s.append(_timed(lambda: stage.deferred.compute(0), mesh))
    forward_1_s, input_grad_s, weight_grad_s, forward_2_s, backward_s = times_s
    return (forward_1_s + forward_2_s) / 2, input_grad_s, weight_grad_s, backward_s


def _time_message(replica: Replica) -> float:
    """Half the time of a hidden state that goes to a pipeline neighbour and comes back."""
    mesh, pp = replica.mesh, replica.mesh.pp
    if pp.size == 1:
        return 0.0
    message = next(iter(replica.stages.values())).empty_hidden(replica.job.plan.microbatch_size).zero_()
    neighbour = pp.index ^ 1
    if neighbour >= pp.size:  # the last rank of an odd number has no partner, but takes part in the barrier
        return _timed(lambda: None, mesh)

    def there_and_back() -> None:
        for sends in (pp.index < neighbour, pp.index > neighbour):
            if sends:
                start_send(message, pp, neighbour, tag=0).wait()
            else:
                start_recv(message, pp, neighbour, tag=0).wait()

    return _timed(there_and_back, mesh) / 2


def _time_update(replica: Replica) -> float:
    """The optimizer's part of a step: norm, scaling and update."""

    def update() -> None:
        replica.gradient_norm()
        for shards in replica.shards.values():
            shards.update(1.0, 1e-4)
            shards.clear_gradients()

    return _timed(update, replica.mesh)
