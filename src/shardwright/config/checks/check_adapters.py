"""Check that what surrounds adapters can have them: the model, the plan, the optimizer, number types and software."""

from collections.abc import Iterator

from shardwright.config.divisors import all_divisors
from shardwright.config.job import JobSpec
from shardwright.config.nf4_rows import BLOCK
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software import software_of

_WITHOUT = "or train all weights: leave model.adapter out"


def adapter_faults(job: JobSpec) -> list[str]:
    """Faults of a job with adapters, each with a way out; none for a job without."""
    if not job.model.is_adapted:
        return []
    return [*_model_faults(job), *_base_faults(job), *_update_faults(job), *_software_faults(job)]


def _base_faults(job: JobSpec) -> Iterator[str]:
    """Faults of matrices in NF4 whose rows, or parts of rows on ranks of tp, are no whole blocks."""
    model, tp = job.model, job.plan.tp
    if not model.adapter.row_format or model.moe.experts or model.is_latent:
        return
    shares = f"share a scale in NF4 by {BLOCK} of a row"
    widths = (("hidden", model.hidden), ("heads x head size", model.heads * model.head_size), ("ffn", model.ffn_size))
    for name, width in widths:
        if width % BLOCK:
            yield (
                f"model.adapter.base is 'nf4', whose elements {shares}, and {name} {width} is no multiple "
                f"({width} / {BLOCK} = {width / BLOCK:.2f}); leave base out"
            )
        elif name != "hidden" and width % tp == 0 and width // tp % BLOCK:
            yield (
                f"plan.tp {tp} cuts rows of {width} elements ({name}) within blocks, which {shares} "
                f"({width} / {tp} / {BLOCK} = {width / tp / BLOCK:.2f}); use {all_divisors(width // BLOCK)}, or leave "
                "model.adapter.base out"
            )


def _model_faults(job: JobSpec) -> Iterator[str]:
    """Faults of models whose maps have no adapters here."""
    model = job.model
    for setting, is_there in (
        ("model.moe", model.moe.experts),
        ("model.latent", model.is_latent),
        ("model.mtp_layers", model.mtp_layers),
        ("model.parallel_block", model.parallel_block != "none"),
    ):
        if is_there:
            yield f"model.adapter is for maps of dense layers, and {setting} is set; leave one of them out"
    if not model.gated_mlp and set(model.adapter.targets) == {"gate"}:
        yield (
            "model.adapter.targets names gate alone, and model.gated_mlp is false, so no layer has one; "
            'use "up", or more targets'
        )
    if model.adapter.weights and not model.weights:
        yield (
            "model.adapter.weights is an adapter of a released model, and model.weights names none; set it to the "
            "folder of that model"
        )
    if len(set(model.adapter.targets)) < len(model.adapter.targets):
        yield "model.adapter.targets names a map twice; name each once"


def _update_faults(job: JobSpec) -> Iterator[str]:
    """Faults of the plan and the optimizer: what they do to weights is not done to weights that are frozen."""
    if job.precision.float8 != "none":
        yield (
            f"precision.float8 {job.precision.float8!r} is for products whose weights are trained, and model.adapter "
            f'freezes them; use precision.float8 = "none", {_WITHOUT}'
        )
    if job.plan.compress != "none":
        yield (
            f"plan.compress {job.plan.compress!r} is for gradients of large matrices, and adapters are small; "
            f'use plan.compress = "none", {_WITHOUT}'
        )
    if job.optimizer.facts.matrix_update != "none":
        yield (
            f"optimizer.name {job.optimizer.name!r} updates whole matrices of the model, and model.adapter freezes "
            f"them; use adamw, {_WITHOUT}"
        )
    if not SCHEDULES[job.plan.schedule].drains:
        yield (
            f"schedule {job.plan.schedule!r} keeps several versions of all weights, and model.adapter freezes them; "
            f"use a schedule that drains, such as 1f1b, {_WITHOUT}"
        )


def _software_faults(job: JobSpec) -> Iterator[str]:
    """A fault of software whose adapters are not described."""
    if not software_of(job.cluster.software).is_own:
        yield (
            f"cluster.software is {job.cluster.software!r}, and what it keeps and computes for adapters is not "
            f'described here; use cluster.software = "shardwright", {_WITHOUT}'
        )
