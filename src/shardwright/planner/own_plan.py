"""Predicted time, memory, cost, energy and time lost to failures of a job's own plan, if its device is known.

The first steps of a batch that grows do less work but cost the same overhead. The time of a step is linear in the
number of microbatches, since the pipeline's bubble, the reduction and the update do not depend on it. So the step is
priced at the first size and at the last.
"""

from dataclasses import dataclass

from shardwright.config.job import JobSpec
from shardwright.cost import failures
from shardwright.cost.calibration import peak_flops, shipped
from shardwright.cost.from_job import run_of
from shardwright.cost.money import Money, money_gaps, step_money
from shardwright.cost.run_goodput import job_checkpoint_bytes
from shardwright.memory.job_memories import fullest
from shardwright.memory.rank_estimate import Memory
from shardwright.planner.search.objectives import REFERENCE_TOKENS
from shardwright.simulate.closed_form import StepTime
from shardwright.simulate.full_step import simulated_step


@dataclass(frozen=True)
class PricedStep:
    """Predicted time and cost of the job's own plan.

    `step_money` is the cost of a single step; costs of many steps (`cost_of_steps`) include the time lost to failures,
    if known.
    `num_steps_1e12_tokens` is the number of steps to train on 1e12 tokens, and `num_steps_of_run` that of the job's
    run. Both are in units of the time of a full-batch step, because the steps of a batch-size ramp-up are shorter.
    `gaps` are sentences on unknown costs and the fields to set.
    """

    step: StepTime
    peak_flops: float
    tokens_per_s_per_device: float
    num_steps_1e12_tokens: float
    num_steps_of_run: float
    reliability: failures.Reliability | None
    goodput: failures.Goodput | None
    checkpoint_bytes: float
    step_money: Money
    gaps: tuple[str, ...]

    @property
    def effective_step_s(self) -> float:
        """Mean seconds of a step, with failures and checkpoints if they are known."""
        return self.step.total / (float(self.goodput.training) if self.goodput else 1.0)

    def cost_of_steps(self, count: float) -> Money:
        """The cost of `count` steps, with the time lost to failures."""
        return self.step_money.times(count * self.effective_step_s / self.step.total)


@dataclass(frozen=True)
class Estimate(PricedStep):
    """Predicted time, cost and memory of the job's own plan. `memory` is that of the pipeline rank with the highest
    peak, under the cluster's software."""

    memory: Memory


def estimate(job: JobSpec) -> Estimate:
    """Predict the job's plan on its cluster, its step simulated in full.

    KeyError names an unknown number of its device, ValueError a contradiction.
    """
    return Estimate(**vars(priced_step(job, simulated_step(job, shipped()))), memory=fullest(job, shipped()))


def priced_step(job: JobSpec, step: StepTime) -> PricedStep:
    """The time and cost of the job's plan, as `estimate` has them, from its simulated step."""
    run, cluster = run_of(job), job.cluster
    checkpoint_bytes = job_checkpoint_bytes(job)
    reliability = failures.reliability_of(cluster, job.plan.world, checkpoint_bytes)
    steps_of_run = job.tokens_of_run / job.tokens_per_step
    return PricedStep(
        step=step,
        peak_flops=peak_flops(run),
        tokens_per_s_per_device=job.tokens_per_step / step.total / job.plan.world,
        num_steps_1e12_tokens=REFERENCE_TOKENS / job.tokens_per_step + ramp_extra_s(job, step.total) / step.total,
        num_steps_of_run=steps_of_run + ramp_extra_s(job, step.total, job.optimizer.steps) / step.total,
        reliability=reliability,
        goodput=failures.goodput(reliability, failures.best_interval_s(reliability)) if reliability else None,
        checkpoint_bytes=checkpoint_bytes,
        step_money=step_money(cluster, step.total, job.plan.world),
        gaps=(*money_gaps(cluster), *failures.reliability_gaps(cluster)),
    )


def ramp_extra_s(job: JobSpec, full_s: float, steps: int | None = None) -> float:
    """Extra seconds of the first `steps` of a growing batch, or of all its growing steps, over the same number of
    sequences in full batches, which take `full_s` each."""
    batch = job.batch
    if not batch.grows:
        return 0.0
    first_size, full_size = batch.ramp.start, batch.global_batch_size
    first_s = float(simulated_step(job.at_batch(first_size), shipped()).total)
    by_size = batch.steps_by_size(batch.num_growing if steps is None else steps)
    return sum(
        num_steps
        * (first_s + (full_s - first_s) * (size - first_size) / (full_size - first_size) - full_s * size / full_size)
        for size, num_steps in by_size.items()
    )
