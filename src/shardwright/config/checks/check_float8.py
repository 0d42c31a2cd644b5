"""Check that the fields about fp8 have an effect."""

from shardwright.config.job import JobSpec


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
