"""The learning rate of each step: a linear warm-up to the peak, then the schedule (config/rate_schedules.py)."""

from shardwright.config.optimizer import OptimizerSpec
from shardwright.config.rate_schedules import RAMP_UP_RULES, RATE_SCHEDULES


def learning_rate(spec: OptimizerSpec, step: int, batch_share: float = 1.0, left_out: int = 0) -> float:
    """The learning rate of step 0, 1, ..., of a batch that is so large a share of the full one.

    `left_out` are the steps before it that changed no weight: the schedule is that of a job without them, whose warm-up
    they do not use up, and which ends where this one does. Megatron-LM's schedule and PyTorch's GradScaler count
    updates in the same way, but leave the end of a decay undone by as many steps.
    """
    if left_out:
        spec, step = spec.model_copy(update={"steps": spec.steps - left_out}), step - left_out
    factor = RAMP_UP_RULES[spec.batch_rule].factor(batch_share)
    if step < spec.warmup_steps:
        return factor * spec.learning_rate * (step + 1) / spec.warmup_steps
    return factor * spec.learning_rate * RATE_SCHEDULES[spec.schedule].peak_fraction(spec, step)
