"""Check that what surrounds adapters can have them: the model, the plan, the optimizer, number types and software."""

from collections.abc import Iterator
from math import gcd

from shardwright.config.divisors import all_divisors
from shardwright.config.job import JobSpec
from shardwright.config.nf4_rows import BLOCK
from shardwright.config.phrase import say
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software import software_of

_WITHOUT = say("or train all weights: leave model.adapter out")


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
    shares = say("share a scale in NF4 by {block} of a row", block=BLOCK)
    widths = (("hidden", model.hidden), ("heads x head size", model.heads * model.head_size), ("ffn", model.ffn_size))
    for name, width in widths:
        if width % BLOCK:
            yield say(
                "model.adapter.base is 'nf4', whose elements {shares}, and {name} {width} is no multiple ({width} / "
                "{block} = {quotient:.2f}); leave base out",
                shares=shares,
                name=name,
                width=width,
                block=BLOCK,
                quotient=width / BLOCK,
            )
        elif name != "hidden" and width % tp == 0 and width // tp % BLOCK:
            yield say(
                "plan.tp {tp} cuts rows of {width} elements ({name}) within blocks, which {shares} ({width} / {tp} / "
                "{block} = {quotient:.2f}); use {choices}, or leave model.adapter.base out",
                tp=tp,
                width=width,
                name=name,
                shares=shares,
                block=BLOCK,
                quotient=width / tp / BLOCK,
                choices=all_divisors(gcd(*(each // BLOCK for _, each in widths[1:]), model.num_kv_heads)),
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
            yield say(
                "model.adapter is for maps of dense layers, and {setting} is set; leave one of them out",
                setting=setting,
            )
    if not model.gated_mlp and set(model.adapter.targets) == {"gate"}:
        yield (
            say(
                "model.adapter.targets names gate alone, and model.gated_mlp is false, so no layer has one; use "
                '"up", or more targets'
            )
        )
    if model.adapter.weights and not model.weights:
        yield (
            say(
                "model.adapter.weights is an adapter of a released model, and model.weights names none; set it to "
                "the folder of that model"
            )
        )
    if len(set(model.adapter.targets)) < len(model.adapter.targets):
        yield say("model.adapter.targets names a map twice; name each once")


def _update_faults(job: JobSpec) -> Iterator[str]:
    """Faults of the plan and the optimizer: what they do to weights is not done to weights that are frozen."""
    if job.precision.float8 != "none":
        yield (
            say(
                "precision.float8 {float8} is for products whose weights are trained, and model.adapter freezes "
                'them; use precision.float8 = "none", {way_out}',
                float8=repr(job.precision.float8),
                way_out=_WITHOUT,
            )
        )
    if job.plan.compress != "none":
        yield (
            say(
                "plan.compress {compress} is for gradients of large matrices, and adapters are small; use "
                'plan.compress = "none", {way_out}',
                compress=repr(job.plan.compress),
                way_out=_WITHOUT,
            )
        )
    if job.optimizer.facts.matrix_update != "none":
        yield (
            say(
                "optimizer.name {name} updates whole matrices of the model, and model.adapter freezes them; use "
                "adamw, {way_out}",
                name=repr(job.optimizer.name),
                way_out=_WITHOUT,
            )
        )
    if not SCHEDULES[job.plan.schedule].drains:
        yield (
            say(
                "schedule {schedule} keeps several versions of all weights, and model.adapter freezes them; use a "
                "schedule that drains, such as 1f1b, {way_out}",
                schedule=repr(job.plan.schedule),
                way_out=_WITHOUT,
            )
        )


def _software_faults(job: JobSpec) -> Iterator[str]:
    """A fault of software whose adapters are not described."""
    if not software_of(job.cluster.software).is_own:
        yield (
            say(
                "cluster.software is {software}, and what it keeps and computes for adapters is not described here; "
                'use cluster.software = "shardwright", {way_out}',
                software=repr(job.cluster.software),
                way_out=_WITHOUT,
            )
        )
