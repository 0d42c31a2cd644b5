"""The cost of a batch that grows: its first steps do less work but cost the same overhead.

The time of a step is linear in the number of microbatches, since the pipeline's bubble, the reduction and the update do
not depend on it. So the step is priced at the first size and at the last.
"""

from shardwright.config.job import JobSpec
from shardwright.cost.calibration import shipped
from shardwright.simulate.full_step import simulated_step


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
