"""What the stages of a job cost relative to each other.

Until a calibration says how fast a device is, a stage costs what its FLOPs say: 1 is the forward of one microbatch
through the mean rank, and input and weight gradients take as long as the forward. That is enough to see the bubble,
which stage the others wait for, and what memory each rank keeps; it is not enough for seconds.
"""

from shardwright.schedule.timing import Costs
from shardwright.spec.job import JobSpec
from shardwright.workload.stage_flops import stage_flops


def relative_costs(job: JobSpec, latency: float = 0.0) -> Costs:
    """By FLOPs, with the forward of the mean rank as the unit; `latency` of a message in that unit too."""
    plan = job.plan
    flops = stage_flops(job.model, plan.stage_layers(job.model.layers), plan.microbatch_size)
    mean = sum(flops) / plan.pp
    forward = tuple(of_stage / mean for of_stage in flops)
    return Costs(forward, forward, forward, latency=latency)
