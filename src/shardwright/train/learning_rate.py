"""The learning rate of each step: a linear warm-up to the peak, and then what the schedule says."""

import math

from shardwright.config.optimizer import OptimizerSpec


def learning_rate(spec: OptimizerSpec, step: int, batch_share: float = 1.0, left_out: int = 0) -> float:
    """The learning rate of step 0, 1, ..., of a batch that is so large a share of the full one.

    `left_out` are the steps before it that changed no weight: the schedule is that of a job without them, whose warm-up
    they do not use up, and which ends where this one does. Megatron-LM's schedule and PyTorch's GradScaler count
    updates in the same way, but leave the end of a decay undone by as many steps.
    """
    if left_out:
        spec, step = spec.model_copy(update={"steps": spec.steps - left_out}), step - left_out
    followed = {"none": 1.0, "sqrt": math.sqrt(batch_share), "linear": batch_share}[spec.batch_rule]
    if step < spec.warmup_steps:
        return followed * spec.learning_rate * (step + 1) / spec.warmup_steps
    return followed * spec.learning_rate * _share_of_peak(spec, step)


def _share_of_peak(spec: OptimizerSpec, step: int) -> float:
    """What is left of the peak after the warm-up, not less than the floor."""
    floor = spec.min_learning_rate_ratio
    if spec.schedule == "constant":
        return 1.0
    if spec.schedule == "inverse-sqrt":  # Vaswani et al. 2017 (arXiv 1706.03762, section 5.3)
        return max(floor, math.sqrt(max(1, spec.warmup_steps) / (step + 1)))
    first, shape = spec.warmup_steps, str(spec.schedule)
    if shape == "wsd":  # Hu et al. 2024 (arXiv 2404.06395, section 4.2)
        first, shape = max(first, spec.steps - spec.decay_steps), str(spec.decay_shape)
    done = min(1.0, max(0.0, (step - first) / max(1, spec.steps - first)))
    return floor + (1.0 - floor) * _left(shape, done)


def _left(shape: str, done: float) -> float:
    """How much of a decay is still to come, from 1 to 0."""
    if shape == "cosine":  # Loshchilov and Hutter 2017 (arXiv 1608.03983)
        return 0.5 * (1.0 + math.cos(math.pi * done))
    return 1.0 - (math.sqrt(done) if shape == "sqrt" else done)  # sqrt: Hägele et al. 2024 (arXiv 2405.18392)
