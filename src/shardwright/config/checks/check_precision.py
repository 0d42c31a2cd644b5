"""Check that fields about fp8 have an effect, and that moments in bf16 can follow their decay.

Rounding to 8 bits loses small changes: bf16 numbers between 2^e and 2^(e+1) are 2^(e-7) apart, so a change of less than
2^(e-8) is lost. Without a gradient, a step reduces a moment by its share (1 - beta). That is smallest relative to half
the distance for the second number of the range, 2^e (1 + 2^-7): it decreases if (1 - beta) (1 + 2^-7) >= 2^-8, so if 1
- beta >= 1/258. Below the first number, 2^e, distances are half as wide. With 1 - beta < 2^-9 no number decreases at
all.
"""

from shardwright.config.job import JobSpec

MOST_BETA = 1 - 1 / 258
_SUGGESTED_BETA = 0.996  # below MOST_BETA, with few digits


def moment_faults(job: JobSpec) -> list[str]:
    """A fault for each decay that moments in bf16 can't follow."""
    optimizer = job.optimizer
    if job.precision.moments == "float32":
        return []
    if optimizer.facts.matrix_update == "factored":
        return [
            f"optimizer.name {optimizer.name!r} takes t^-0.8 of its second moment off in step t, less and less, and "
            f"precision.moments 'bf16' rounds to 8 bits, which loses changes of less than 1/258 = {1 / 258:.2g} of "
            'some; its state is small already: use precision.moments = "float32"'
        ]
    return [
        f"optimizer.{name} {beta} takes {1 - beta:.2g} of a moment off in a step without a gradient, and "
        f"precision.moments 'bf16' rounds to 8 bits, which loses changes of less than 1/258 = {1 / 258:.2g} of some: "
        f"they would stand still for ever; use optimizer.{name} = {_SUGGESTED_BETA} or smaller, or "
        'precision.moments = "float32"'
        for name, beta in ((name, getattr(optimizer, name)) for name in optimizer.facts.decays)
        if beta > MOST_BETA
    ]


def float8_faults(job: JobSpec) -> list[str]:
    """Faults of fields that would have no effect, each with a way out."""
    precision, faults = job.precision, []
    if precision.float8_weight_gradients and precision.float8 == "none":
        faults.append(
            "precision.float8_weight_gradients is for products in fp8, and precision.float8 is 'none'; set "
            "precision.float8 to a recipe such as blockwise, or leave it out"
        )
    if precision.float8_dispatch and not job.model.moe.experts:
        faults.append(
            "precision.float8_dispatch is for tokens on their way to experts, and model.moe.experts is 0; leave it "
            "out, or say how many experts"
        )
    return faults
