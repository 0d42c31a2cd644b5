"""Megatron-LM's flags for recompute: whole layers, a part of each stage's layers, or modules of each layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.model import ModelSpec
from shardwright.config.phrase import say
from shardwright.config.plan import even_stages, layer_policies
from shardwright.config.recompute_facts import RECOMPUTES
from shardwright.config.recompute_policy import OPERATORS
from shardwright.interchange.reading.setting_notes import none_of, none_of_few
from shardwright.interchange.reading.settings import Flat, Settings


@dataclass(frozen=True)
class _Module:
    """A module that can be recomputed: the operators of a plan that it consists of, and the models that have it.
    `is_part` is True if the module is only a part of an operator."""

    operators: frozenset[str]
    is_in: Callable[[ModelSpec], bool] = lambda model: True
    is_part: bool = False


_METHOD = ("recompute-method", "activations-checkpoint-method")
_FFN = frozenset(("up", "activation"))
_MODULES = {
    "core_attn": _Module(frozenset(("attention",))),
    "mla_up_proj": _Module(frozenset(("attention",)), lambda model: model.is_latent, is_part=True),
    "layernorm": _Module(frozenset(("norm",))),
    "mlp": _Module(_FFN, lambda model: not all(map(model.moe.has_experts, range(model.layers)))),
    "moe": _Module(_FFN, lambda model: model.moe.experts > 0),
    "moe_act": _Module(frozenset(("activation",)), lambda model: model.moe.experts > 0),
    "shared_experts": _Module(frozenset(), lambda model: False, is_part=True),
}


def read_recompute(settings: Settings, fields: Flat) -> None:
    """Read which layers, or which operators of each, are computed again."""
    granularity = settings.text("recompute-granularity")
    method = settings.text(_METHOD)
    number = settings.count(("recompute-num-layers", "activations-checkpoint-num-layers", "checkpoint-num-layers"), 1)
    modules = settings.words("recompute-modules")
    selective = settings.flag("recompute-activations")
    all_layers = settings.flag("checkpoint-activations")
    settings.ignore("deepspeed-activation-checkpointing")  # how, and not that: DeepSpeed's function does it then
    if all_layers or (method and not granularity):
        granularity = "full"
    granularity = granularity or ("selective" if selective else "")
    settings.lose("distribute-saved-activations", say("inputs of recomputed layers are whole on each rank here"))
    if granularity == "selective":
        _read_modules(modules or ["core_attn"], settings, fields)
    elif granularity == "full":
        _read_full(number, settings, fields)
        fields["plan.offload_activations"] = settings.flag("checkpoint-in-cpu")
    elif granularity:
        settings.faults.append(none_of_few(f"--recompute-granularity {granularity}", ["full", "selective"]))


def _read_modules(modules: list[str], settings: Settings, fields: Flat) -> None:
    unknown = [name for name in modules if name not in _MODULES]
    if unknown:
        settings.faults.append(none_of(f"--recompute-modules {' '.join(unknown)[:60]}", _MODULES))
    known = {name: _MODULES[name] for name in modules if name in _MODULES}
    operators = frozenset[str]().union(*(module.operators for module in known.values() if not module.is_part))
    for name, module in known.items():
        if module.is_part and not (module.operators and module.operators <= operators):
            settings.lost.append(
                say("{setting}: no operator here is that part alone; it is kept", setting=f"--recompute-modules {name}")
            )
    if operators:
        names = [operator for operator in OPERATORS if operator in operators]
        fields |= {"plan.recompute": "selective", "plan.recompute_operators": names}


def _read_full(number: int, settings: Settings, fields: Flat) -> None:
    method = settings.one_of(_METHOD, {"uniform": "uniform", "block": "block"}, "uniform", "plan.recompute")
    layers = fields["model.layers"]
    num_stages = min(max(1, fields["plan.pp"] * fields["plan.virtual_stages"]), layers + 2)
    stages = fields.get("plan.layout") or even_stages(layers, num_stages)
    if method == "block" and number == 0:
        fields["plan.recompute"] = "none"
    elif method == "block":
        policies = [["layer"] if place < number else [] for count in stages for place in range(count)]
        fields |= (
            {"plan.recompute": "layers", "plan.recompute_layers": policies}
            if number < max(stages)
            else {"plan.recompute": "full"}
        )
    elif number <= 1:
        fields["plan.recompute"] = "full"
    elif set(stages) == {number}:
        fields["plan.recompute"] = "stage"
    else:
        fields["plan.recompute"] = "full"
        settings.lost.append(
            say(
                "{setting}: layers are computed again one by one here, not {number} at once",
                setting=f"--recompute-num-layers {number}",
                number=number,
            )
        )


def write_recompute(job: JobSpec, settings: dict[str, Any]) -> None:
    """Write the flags for whole layers, or for the modules of a policy."""
    plan, stages = job.plan, job.plan.stage_layers(job.model.layers)
    facts = RECOMPUTES[plan.recompute]
    if facts.by_stage and len(set(stages)) == 1:
        settings |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": stages[0]}
        return
    if facts.layers is None or facts.by_stage:
        return
    policies = layer_policies(plan, job.model.layers)
    if all(policy == {"layer"} for policy in policies):
        settings |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    elif len(set(policies)) == 1 and policies[0]:
        modules = _modules_of(policies[0], job)
        settings |= {"recompute-granularity": "selective", "recompute-modules": modules} if modules else {}
    elif all(policy in ({"layer"}, frozenset()) for policy in policies):
        first = next((place for place, policy in enumerate(policies[: stages[0]]) if not policy), stages[0])
        if first:
            settings |= {"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": first}


def _modules_of(policy: frozenset[str], job: JobSpec) -> list[str]:
    recomputed = {
        name: module.operators
        for name, module in _MODULES.items()
        if module.operators and module.operators <= policy and module.is_in(job.model)
    }
    modules = [
        name for name, operators in recomputed.items() if not any(operators < other for other in recomputed.values())
    ]
    # Megatron-LM discards outputs of norms and activations to recompute them, which delayed scaling does not allow.
    is_refused = job.precision.float8 == "delayed" and {"layernorm", "moe_act"} & {*modules}
    return [] if is_refused else modules
