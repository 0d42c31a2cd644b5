"""Check that fields about fp8 have an effect, that moments in bf16 can follow their decay, and that an update without
master weights is one that the runtime has.

Rounding to 8 bits loses small changes: bf16 numbers between 2^e and 2^(e+1) are 2^(e-7) apart, so a change of less than
2^(e-8) is lost. Without a gradient, a step reduces a moment by its share (1 - beta). That is smallest relative to half
the distance for the second number of the range, 2^e (1 + 2^-7): it decreases if (1 - beta) (1 + 2^-7) >= 2^-8, so if 1
- beta >= 1/258. Below the first number, 2^e, distances are half as wide. With 1 - beta < 2^-9 no number decreases at
all.
"""

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say

MOST_BETA = 1 - 1 / 258
_SUGGESTED_BETA = 0.996  # below MOST_BETA, with few digits


def moment_faults(job: JobSpec) -> list[str]:
    """A fault for each decay that moments in bf16 can't follow."""
    optimizer = job.optimizer
    if job.precision.moments == "float32":
        return []
    if optimizer.facts.matrix_update == "factored":
        return [
            say(
                "optimizer.name {name} takes t^-0.8 of its second moment off in step t, less and less, and "
                "precision.moments 'bf16' rounds to 8 bits, which loses changes of less than 1/258 = {bound:.2g} of "
                'some; its state is small already: use precision.moments = "float32"',
                name=repr(optimizer.name),
                bound=1 / 258,
            )
        ]
    return [
        say(
            "optimizer.{name} {beta} takes {share:.2g} of a moment off in a step without a gradient, and "
            "precision.moments 'bf16' rounds to 8 bits, which loses changes of less than 1/258 = {bound:.2g} of "
            "some: they would stand still for ever; use optimizer.{name} = {suggested} or smaller, or "
            'precision.moments = "float32"',
            name=name,
            beta=beta,
            share=1 - beta,
            bound=1 / 258,
            suggested=_SUGGESTED_BETA,
        )
        for name, beta in ((name, getattr(optimizer, name)) for name in optimizer.facts.decays)
        if beta > MOST_BETA
    ]


def master_faults(job: JobSpec) -> list[str]:
    """Faults of an update without master weights."""
    if job.precision.master != "none" or job.precision.compute == "float32":
        return []
    faults, plan = list[str](), job.plan
    with_masters = say('or keep masters: precision.master = "float32"')
    if job.precision.compute == "fp16":
        faults.append(
            say(
                "precision.master 'none' rounds weights to precision.compute after each step, and the smallest "
                "numbers of fp16 are 6e-8, above most steps of a weight: use precision.compute = bf16, {with_masters}",
                with_masters=with_masters,
            )
        )
    if job.precision.gradient_number != job.precision.compute:
        faults.append(
            say(
                "precision.gradients 'float32' is for the update of float32 weights, and precision.master is 'none': "
                "use precision.gradients = compute, {with_masters}",
                with_masters=with_masters,
            )
        )
    if job.optimizer.facts.matrix_update != "none":
        faults.append(
            say(
                "optimizer.name {name} updates whole matrices of float32 master weights, and precision.master is "
                "'none': use adamw, {with_masters}",
                name=repr(job.optimizer.name),
                with_masters=with_masters,
            )
        )
    faults += [
        say(
            "plan.{name} is for the float32 master weights that the host updates, and precision.master is 'none': "
            "leave it out, {with_masters}",
            name=name,
            with_masters=with_masters,
        )
        for name in ("offload_optimizer", "offload_parameters")
        if getattr(plan, name)
    ]
    return faults


def float8_faults(job: JobSpec) -> list[str]:
    """Faults of fields that would have no effect, each with a way out."""
    precision, faults = job.precision, list[str]()
    if precision.float8_weight_gradients and precision.float8 == "none":
        faults.append(
            say(
                "precision.float8_weight_gradients is for products in fp8, and precision.float8 is 'none'; set "
                "precision.float8 to a recipe such as blockwise, or leave it out"
            )
        )
    if precision.float8_dispatch and not job.model.moe.experts:
        faults.append(
            say(
                "precision.float8_dispatch is for tokens on their way to experts, and model.moe.experts is 0; leave "
                "it out, or say how many experts"
            )
        )
    return faults
