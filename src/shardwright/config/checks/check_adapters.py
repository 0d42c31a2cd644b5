"""Check that what surrounds adapters can have them: the model, the plan, the optimizer, number types and software."""

from collections.abc import Iterator
from math import gcd

from shardwright.config.divisors import all_divisors
from shardwright.config.job import JobSpec
from shardwright.config.model import ModelSpec
from shardwright.config.model_shape import shape_of
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
    model, plan = job.model, job.plan
    if not model.adapter.row_format or model.is_latent:
        return
    shares = say("share a scale in NF4 by {block} of a row", block=BLOCK)
    widths = _row_widths(model)
    for name, width in widths:
        tp = plan.expert_tp_size if name == "model.moe.ffn" else plan.tp
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


def _row_widths(model: ModelSpec) -> tuple[tuple[str, int], ...]:
    """The widths of the rows of the matrices of layers, with their names; the first is of rows that tp does not cut."""
    moe, ffn = model.moe, model.ffn_size
    has_dense = len(model.blocks_with_experts) < model.layers
    return (
        ("hidden", model.hidden),
        ("heads x head size", model.heads * model.head_size),
        *((("ffn", ffn),) if has_dense else ()),
        *((("model.moe.ffn", moe.ffn_size(ffn)),) if moe.experts else ()),
        *((("model.moe.shared_ffn", moe.shared_size(ffn)),) if moe.experts and moe.shared_size(ffn) else ()),
    )


def _model_faults(job: JobSpec) -> Iterator[str]:
    """Faults of models whose maps have no adapters here."""
    model = job.model
    for setting, is_there, maps in (
        ("model.latent", model.is_latent, say("maps of latent attention")),
        ("model.mtp_layers", model.mtp_layers, say("layers for further tokens")),
        (
            "model.parallel_block",
            model.parallel_block != "none",
            say("blocks whose attention and MLP run side by side"),
        ),
    ):
        if is_there:
            yield say(
                "{maps} have no adapters here, and {setting} is set beside model.adapter; leave one of them out",
                maps=maps,
                setting=setting,
            )
    yield from _target_faults(model)
    if model.moe.bias_update:
        yield say(
            "model.moe.bias_update {rate} moves the routers' biases, and model.adapter freezes all but adapters; set "
            "model.moe.bias_update = 0",
            rate=model.moe.bias_update,
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


def _target_faults(model: ModelSpec) -> Iterator[str]:
    """A fault of targets if no layer has any of their maps."""
    targets, shape = model.adapter.targets, shape_of(model)
    kinds = dict.fromkeys(shape.kind(layer) for layer in range(model.layers))
    if not targets or any(model.adapter.targets_of(matrix) for kind in kinds for matrix in shape.matrices(kind)):
        return
    if not model.gated_mlp and set(targets) == {"gate"}:
        yield say(
            "model.adapter.targets names gate alone, and model.gated_mlp is false, so no layer has one; use "
            '"up", or more targets'
        )
        return
    yield say(
        "model.adapter.targets names {targets}, and no layer has such a map: those of experts are expert_gate, "
        "expert_up and expert_down; name some, or maps of attention",
        targets=targets,
    )


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
    if not software_of(job.cluster.software).adapters:
        yield (
            say(
                "cluster.software is {software}, and what it keeps and computes for adapters is not described here; "
                'use cluster.software = "shardwright", {way_out}',
                software=repr(job.cluster.software),
                way_out=_WITHOUT,
            )
        )
