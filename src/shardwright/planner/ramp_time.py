"""The cost of a batch that grows: its first steps do less work but cost the same overhead.

A step of a plan takes a time that grows evenly with its microbatches, for the pipeline's bubble, the reduction and the
update take as long however many there are. So it is priced at the first size and at the last.
"""

from shardwright.config.job import JobSpec
from shardwright.cost.calibration import shipped
from shardwright.simulate.full_step import simulated_step


def ramp_extra_s(job: JobSpec, full_s: float, steps: int | None = None) -> float:
    """Seconds that the sequences of steps whose batch is still growing take more than as many in full batches, which
    take `full_s` each; of the first `steps`, or of all."""
    batch = job.batch
    if not batch.grows:
        return 0.0
    first, full = batch.ramp.start, batch.global_batch_size
    first_s = float(simulated_step(job.at_batch(first), shipped()).total)
    by_size = batch.steps_by_size(batch.num_growing if steps is None else steps)
    return sum(
        number * (first_s + (full_s - first_s) * (size - first) / (full - first) - full_s * size / full)
        for size, number in by_size.items()
    )
