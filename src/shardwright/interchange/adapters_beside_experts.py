"""Adapters and bases in 4 bits of models with experts: which of them experts have depends on the release of a library.

In transformers up to 4 most experts are linear modules, which settings of all linear modules and loading in 4 bits
find; in its version 5, as in gpt-oss from the start, all experts of a layer are one tensor, which they pass over.
Modules that are named one by one are those of experts in either: peft takes their names for parts of that tensor.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.config.adapter import EXPERT_TARGETS, TARGETS, Target
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.phrase import say
from shardwright.interchange.reading.settings import Settings

# The modules of an expert, in the order of EXPERT_TARGETS, in most families and in those of Mixtral's kind.
_MODULES, _OF_MIXTRAL = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
_LIKE_MIXTRAL = ("mixtral", "phimoe", "minimax_m2", "minimax")
_OF_MEGATRON = ("linear_fc1", "linear_fc2")  # of MLPs and of experts alike
_OF_EXPERTS: dict[Target, Target] = dict(zip(("gate", "up", "down"), EXPERT_TARGETS, strict=True))
_TARGETS, _BASE = "model.adapter.targets", "model.adapter.base"


def targets_with_experts(job: JobSpec, settings: Settings, asked: Mapping[str, Any]) -> list[Target]:
    """The maps that have adapters in a model with experts, where settings name maps of MLPs one by one: those of its
    experts, too, if these have modules of such names. Empty where nothing changes. Names without a module are told."""
    targets = job.model.adapter.targets
    of_mlps = [target for target in targets if target in _OF_EXPERTS]
    if not _has_experts(job) or settings.all_linear or _TARGETS in asked or not of_mlps:
        return []
    names = _OF_MIXTRAL if settings.family in _LIKE_MIXTRAL else _MODULES
    given = settings.adapted_modules
    named = [target for target, name in zip(EXPERT_TARGETS, names, strict=True) if name in given]
    if not given:
        named = [_OF_EXPERTS[target] for target in of_mlps]
    maps = _maps_of(job)
    absent = [name for name in given if name in {*_MODULES, *_OF_MIXTRAL} - {*names}]
    if absent:
        settings.note(say("{modules}: this model has no modules of such names", modules=tuple(absent)))
    own = dict(zip(_OF_EXPERTS, names, strict=True))
    left_out = [target for target in of_mlps if absent and own[target] not in given]
    return [target for target in (*targets, *named) if target in maps and target not in left_out]


def _maps_of(job: JobSpec) -> set[Target]:
    """The maps that some layer of a model has."""
    shape = shape_of(job.model)
    kinds = dict.fromkeys(shape.kind(layer) for layer in range(job.model.layers))
    return {name for kind in kinds for matrix in shape.matrices(kind) for name in job.model.adapter.maps(matrix)}


def adapter_faults(job: JobSpec, settings: Settings, asked: Mapping[str, Any]) -> list[str]:
    """Faults of settings that mean different adapters, or a different base, under different releases; each with the
    fields that settle it."""
    if not _has_experts(job):
        return []
    faults = list[str]()
    of_both = [name for name in settings.adapted_modules if name in _OF_MEGATRON]
    if settings.all_linear and _TARGETS not in asked:
        faults.append(
            say(
                "{setting}: experts are linear modules in transformers 4, each with adapters then, and one tensor in "
                "its version 5 and in gpt-oss, without; say which: --set {field}=[{beside}], or with experts --set "
                "{field}=[{all}]",
                setting=settings.all_linear,
                **_answers(job, TARGETS),
            )
        )
    elif of_both and _TARGETS not in asked:
        faults.append(
            say(
                "{modules}: maps of experts have these names, too, and adapters of their own, one that all experts of "
                "a device share, or none, by the release and how products are grouped; say which: --set "
                "{field}=[{beside}] for none, or --set {field}=[{all}] for one each",
                modules=tuple(of_both),
                **_answers(job, job.model.adapter.targets),
            )
        )
    if settings.four_bits and _BASE not in asked:
        faults.append(
            say(
                "{setting}: experts that are linear modules (transformers 4) are quantised, and those in one tensor "
                "(its version 5, gpt-oss) stay in 16 bits; say which: --set {field}=nf4 for all, or --set "
                "{field}=compute --set model.adapter.double_quantization=false for none",
                setting=settings.four_bits,
                field=_BASE,
            )
        )
    return faults


def _answers(job: JobSpec, targets: Sequence[Target]) -> dict[str, str]:
    """The words of a fault that asks which maps have adapters: the field, its value without experts and with them."""
    maps = _maps_of(job)
    beside, inside = ([name for name in names if name in maps] for names in (targets, EXPERT_TARGETS))
    return {"field": _TARGETS, "beside": ",".join(beside), "all": ",".join([*beside, *inside])}


def _has_experts(job: JobSpec) -> bool:
    return job.model.is_adapted and job.model.moe.experts > 0
