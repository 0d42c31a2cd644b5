"""Megatron-LM's flags for the plan: degrees, pipeline, sharding, recomputation."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwright.config import largest
from shardwright.config.job import JobSpec
from shardwright.config.model import ModelSpec
from shardwright.config.other_systems.rows import Rule, Table, degree
from shardwright.config.other_systems.settings import Flat, Settings
from shardwright.config.plan import even_stages, layer_policies
from shardwright.config.rank_order import EXAMPLE, STAGES_INSIDE
from shardwright.config.usual_links import filled_nodes

WORLD = "world-size"  # ranks, by the launcher of the command

_VIRTUAL = ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank")
_LAYOUT = "pipeline-model-parallel-layout"
_FSDP = ("use-megatron-fsdp", "use-custom-fsdp")
_SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_CP = {"p2p": "ring", "all_gather": "all-gather", "a2a": "ulysses"}


def _read_dp(theirs: Settings, ours: Flat) -> None:
    shared = ours["plan.tp"] * ours["plan.pp"] * ours["plan.cp"]
    world = theirs.count(WORLD, 0)
    ours["plan.dp"] = max(1, world // max(1, shared))
    if world == 0:
        theirs.note(
            f"nothing says how many GPUs there are, so one replica is taken: {shared} GPUs (--devices N for more)"
        )
    elif shared and world % shared:
        cp = f" x context {ours['plan.cp']}" if ours["plan.cp"] > 1 else ""
        theirs.faults.append(
            f"the launcher starts {world} ranks, and tensor {ours['plan.tp']} x pipeline {ours['plan.pp']}{cp} = "
            f"{shared} of them share one replica ({world} / {shared} = {world / shared:.2f}); say how many GPUs there "
            f"are with --devices, such as {filled_nodes(shared, world)}"
        )


def _read_pipeline(theirs: Settings, ours: Flat) -> None:
    """Schedule, virtual stages and what each stage holds."""
    pp, layers = ours["plan.pp"], ours["model.layers"]
    text = theirs.text(_LAYOUT)
    by_layers, by_number = (theirs.count(name, 0, largest.LAYERS) for name in _VIRTUAL)
    first = theirs.count("decoder-first-pipeline-num-layers", 0)
    last = theirs.count("decoder-last-pipeline-num-layers", 0)
    around = [theirs.flag(f"account-for-{name}-in-pipeline-split") for name in ("embedding", "loss")]
    counted = layers + sum(around)
    stages: list[int] = []
    if by_layers and by_number:
        theirs.faults.append(
            f"{theirs.said(_VIRTUAL[0])} and {theirs.said(_VIRTUAL[1])} are both there, and Megatron-LM takes one of "
            "them; leave one out"
        )
    if text:
        stages = _stages_of(text, theirs)
        virtual = max(1, len(stages) // pp)
    elif by_layers and pp and counted % (pp * by_layers):
        theirs.faults.append(
            f"--{_VIRTUAL[0]} {by_layers} x --pipeline-model-parallel-size {pp} = {by_layers * pp} does not divide "
            f"{counted} layers"
        )
        virtual = 1
    else:
        virtual = max(1, counted // (pp * by_layers) if by_layers else by_number)
    if pp * virtual > counted and not text:
        stages = []
    elif any(around) and not text:
        stages = even_stages(counted, pp * virtual)
        stages[0] -= around[0]
        stages[-1] -= around[1]
    elif (first or last) and not text and pp > 1:
        stages = _around_the_middle(layers, pp, virtual, first, last)
    if pp * virtual > layers + 2:  # which the checks of the job will say
        stages = []
    ours["plan.schedule"] = "interleaved-1f1b" if virtual > 1 and pp > 1 else "1f1b"
    ours["plan.virtual_stages"] = virtual if pp > 1 else 1
    if stages and pp > 1 and (stages != even_stages(layers, pp * virtual) or 0 in stages):
        ours["plan.layout"] = stages


def _around_the_middle(layers: int, pp: int, virtual: int, first: int, last: int) -> list[int]:
    """Stages where those of the first and the last rank are said, and the others share the rest."""
    middle = pp - (first > 0) - (last > 0)
    each = (layers - first - last) // middle if middle else 0
    ranks = [first or each, *[each] * (pp - 2), last or each]
    return [ranks[stage % pp] // virtual for stage in range(pp * virtual)]


def _stages_of(text: str, theirs: Settings) -> list[int]:
    """Layers of each stage of a layout such as Et*3|(tt|)*29,m|L."""
    if len(text) > 4096 or not re.fullmatch(r"[EtmL|(),*0-9\s]*", text):
        theirs.faults.append(f"--{_LAYOUT} {text[:60]} has other letters than E, t, m and L")
        return []
    text = re.sub(r"[,\s]", "", text)
    for pattern in (r"\(([^()]*)\)\*([0-9]{1,3})", r"([EtmL|])\*([0-9]{1,3})"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
        if len(text) > 1 << 16:
            theirs.faults.append(f"--{_LAYOUT} names more than {1 << 16:,} layers")
            return []
    return [stage.count("t") for stage in text.split("|")]


def _layout_text(stages: list[int], further: int) -> str:
    """Stages as Megatron-LM writes them."""
    words = ["t" * count for count in stages]
    words[0] = "E" + words[0]
    words[-1] += "m" * further + "L"
    return "|".join(words)


def _write_pipeline(job: JobSpec, theirs: dict[str, Any]) -> None:
    plan, layers = job.plan, job.model.layers
    virtual = plan.virtual_stages if plan.schedule == "interleaved-1f1b" and plan.pp > 1 else 1
    stages = plan.stage_layers(layers) if len(plan.stage_layers(layers)) == plan.pp * virtual else []
    if stages and len(set(stages)) > 1:
        theirs[_LAYOUT] = _layout_text(stages, job.model.mtp_layers)
    elif virtual > 1:
        theirs[_VIRTUAL[1]] = virtual


def _read_context(theirs: Settings, ours: Flat) -> None:
    words = theirs.words("cp-comm-type") or ["p2p"]
    if set(words) - set(_CP) or len(set(words)) > 1:
        theirs.faults.append(
            f"{theirs.said('cp-comm-type')} can't be said here; use one of {', '.join(_CP)} for all layers"
        )
    is_split = theirs.has("ds-sequence-parallel-size")  # of Megatron-DeepSpeed: Ulysses
    ours["plan.cp_method"] = "ulysses" if is_split else _CP.get(words[0], "ring")


def _write_context(job: JobSpec, theirs: dict[str, Any]) -> None:
    if job.plan.cp > 1:
        theirs["cp-comm-type"] = next(word for word, ours in _CP.items() if ours == job.plan.cp_method)


def _read_zero(theirs: Settings, ours: Flat) -> None:
    shards = theirs.flag("use-distributed-optimizer")
    strategy = theirs.one_of("data-parallel-sharding-strategy", _SHARDED, "no_shard")
    zero = max(int(shards), theirs.count("zero-stage", 0))
    if theirs.flag("deepspeed") and theirs.flag("bf16") and zero == 0 and theirs.has("zero-stage"):
        zero = 1
        theirs.note("DeepSpeed shards the optimizer's state with bf16 also at --zero-stage 0, so plan.zero is 1")
    if theirs.has(*_FSDP):
        zero = strategy
        if not theirs.has("data-parallel-sharding-strategy"):
            theirs.note(
                "--use-megatron-fsdp shards nothing without --data-parallel-sharding-strategy: no_shard is its default"
            )
    if theirs.flag("use-torch-fsdp2"):
        zero = 2 if theirs.flag("torch-fsdp2-no-reshard-after-forward") else 3
    copies = theirs.count("num-distributed-optimizer-instances", 1)
    replicas = ours["plan.dp"] * ours["plan.cp"]
    ours["plan.zero"] = zero
    ours["plan.zero_ranks"] = replicas // copies if zero and copies > 1 and replicas % copies == 0 else 0
    if copies > 1 and (not zero or replicas % copies):
        theirs.faults.append(f"--num-distributed-optimizer-instances {copies} does not divide {replicas} replicas")


def _write_zero(job: JobSpec, theirs: dict[str, Any]) -> None:
    plan = job.plan
    if plan.zero and plan.replicas > 1:
        theirs["use-distributed-optimizer"] = True
        if plan.shard_copies > 1:
            theirs["num-distributed-optimizer-instances"] = plan.shard_copies
    if plan.zero > 1 and plan.pp == 1 and plan.replicas > 1:
        theirs["use-megatron-fsdp"] = True
        theirs["data-parallel-sharding-strategy"] = {2: "optim_grads", 3: "optim_grads_params"}[plan.zero]
        theirs["ckpt-format"] = "fsdp_dtensor"
        theirs["no-gradient-accumulation-fusion"] = True


def _read_offload(theirs: Settings, ours: Flat) -> None:
    share = theirs.number("optimizer-offload-fraction", 1.0)
    ours["plan.offload_optimizer"] = share if theirs.flag("optimizer-cpu-offload") else 0.0


def _write_offload(job: JobSpec, theirs: dict[str, Any]) -> None:
    if job.plan.offload_optimizer and shards_state(job):
        theirs["optimizer-cpu-offload"] = True
        theirs["optimizer-offload-fraction"] = job.plan.offload_optimizer
        theirs["use-precision-aware-optimizer"] = True


def shards_state(job: JobSpec) -> bool:
    """Whether replicas share the state of Adam, which its parts in other numbers and in host memory need."""
    return job.plan.zero > 0 and job.plan.replicas > 1 and job.optimizer.name == "adamw"


def _read_order(theirs: Settings, ours: Flat) -> None:
    ours["plan.order"] = STAGES_INSIDE if theirs.flag("use-tp-pp-dp-mapping") else EXAMPLE


def _write_order(job: JobSpec, theirs: dict[str, Any]) -> None:
    plan = job.plan
    stages = [axis for axis in plan.order.split("-") if getattr(plan, axis) > 1]
    if stages == [axis for axis in STAGES_INSIDE.split("-") if getattr(plan, axis) > 1] and {"pp", "dp"} <= set(stages):
        theirs["use-tp-pp-dp-mapping"] = True


def _read_expert_tp(theirs: Settings, ours: Flat) -> None:
    degree = theirs.count("expert-tensor-parallel-size", 0)
    ours["plan.expert_tp"] = 0 if degree == ours["plan.tp"] else degree


def _write_expert_tp(job: JobSpec, theirs: dict[str, Any]) -> None:
    if job.model.moe.experts and job.plan.expert_tp:
        theirs["expert-tensor-parallel-size"] = job.plan.expert_tp_size


# ---- recomputation -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Module:
    """A module that can be computed again: the operators that it is, and the models that have it. `is_part` is one
    that is less than an operator here."""

    operators: frozenset[str]
    is_in: Callable[[ModelSpec], bool] = lambda model: True
    is_part: bool = False


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


def _read_recompute(theirs: Settings, ours: Flat) -> None:
    granularity = theirs.text("recompute-granularity")
    method = theirs.text(("recompute-method", "activations-checkpoint-method"))
    number = theirs.count(("recompute-num-layers", "activations-checkpoint-num-layers", "checkpoint-num-layers"), 1)
    modules = theirs.words("recompute-modules")
    selective = theirs.flag("recompute-activations")
    whole = theirs.flag(("checkpoint-activations", "deepspeed-activation-checkpointing"))
    if whole or (method and not granularity):
        granularity, method = "full", method or "uniform"
    granularity = granularity or ("selective" if selective else "")
    theirs.lose("distribute-saved-activations", "inputs of recomputed layers are whole on each rank here")
    if granularity == "selective":
        _read_modules(modules or ["core_attn"], theirs, ours)
    elif granularity == "full":
        _read_full(method, number, theirs, ours)
    elif granularity:
        theirs.faults.append(f"--recompute-granularity {granularity} can't be said here; use full or selective")


def _read_modules(modules: list[str], theirs: Settings, ours: Flat) -> None:
    unknown = [name for name in modules if name not in _MODULES]
    if unknown:
        theirs.faults.append(
            f"--recompute-modules {' '.join(unknown)[:60]} can't be said here; use one of {', '.join(_MODULES)}"
        )
    known = {name: _MODULES[name] for name in modules if name in _MODULES}
    operators = frozenset[str]().union(*(module.operators for module in known.values() if not module.is_part))
    for name, module in known.items():
        if module.is_part and not (module.operators and module.operators <= operators):
            theirs.lost.append(f"--recompute-modules {name}: no operator here is that part alone; it is kept")
    if operators:
        names = [one for one in ("norm", "qkv", "attention", "up", "activation") if one in operators]
        ours |= {"plan.recompute": "selective", "plan.recompute_operators": names}


def _read_full(method: str, number: int, theirs: Settings, ours: Flat) -> None:
    layers = ours["model.layers"]
    number_of = min(max(1, ours["plan.pp"] * ours["plan.virtual_stages"]), layers + 2)
    stages = ours.get("plan.layout") or even_stages(layers, number_of)
    if method == "block":
        kept = [["layer"] if place < number else [] for count in stages for place in range(count)]
        ours |= (
            {"plan.recompute": "layers", "plan.recompute_layers": kept}
            if number < max(stages)
            else {"plan.recompute": "full"}
        )
    elif number <= 1:
        ours["plan.recompute"] = "full"
    elif set(stages) == {number}:
        ours["plan.recompute"] = "stage"
    else:
        ours["plan.recompute"] = "full"
        theirs.lost.append(
            f"--recompute-num-layers {number}: layers are computed again one by one here, not {number} at once"
        )


def _write_recompute(job: JobSpec, theirs: dict[str, Any]) -> None:
    plan, stages = job.plan, job.plan.stage_layers(job.model.layers)
    if plan.recompute == "stage" and len(set(stages)) == 1:
        theirs |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": stages[0]}
        return
    if plan.recompute in ("budget", "stage"):
        return
    policies = layer_policies(plan, job.model.layers)
    if all(policy == {"layer"} for policy in policies):
        theirs |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    elif len(set(policies)) == 1 and policies[0]:
        modules = _modules_of(policies[0], job)
        theirs |= {"recompute-granularity": "selective", "recompute-modules": modules} if modules else {}
    elif all(policy in ({"layer"}, frozenset()) for policy in policies):
        first = next((place for place, policy in enumerate(policies[: stages[0]]) if not policy), stages[0])
        if first:
            theirs |= {"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": first}


def _modules_of(policy: frozenset[str], job: JobSpec) -> list[str]:
    found = {
        name: module.operators
        for name, module in _MODULES.items()
        if module.operators and module.operators <= policy and module.is_in(job.model)
    }
    modules = [name for name, operators in found.items() if not any(operators < other for other in found.values())]
    # Norms and activations are made again from what they gave, which delayed scales do not allow.
    is_refused = job.precision.float8 == "delayed" and {"layernorm", "moe_act"} & {*modules}
    return [] if is_refused else modules


def _read_sequence(theirs: Settings, ours: Flat) -> None:
    is_said = theirs.flag("sequence-parallel")
    ours["plan.sequence_parallel"] = is_said and ours["plan.tp"] > 1
    if is_said and ours["plan.tp"] == 1:
        theirs.note("--sequence-parallel is off, as Megatron-LM turns it off where no tensors are split (tensor 1)")


def _write_sequence(job: JobSpec, theirs: dict[str, Any]) -> None:
    theirs |= {"sequence-parallel": True} if job.plan.sequence_parallel and job.plan.tp > 1 else {}


PLAN: Table = (
    degree("tensor-model-parallel-size model-parallel-size", "plan.tp", largest.RANKS, always=True),
    degree("pipeline-model-parallel-size", "plan.pp", largest.PIPELINE_RANKS, always=True),
    degree("context-parallel-size ds-sequence-parallel-size", "plan.cp", largest.RANKS),
    Rule((WORLD,), _read_dp),
    Rule((*_VIRTUAL, _LAYOUT), _read_pipeline, _write_pipeline),
    Rule(("cp-comm-type",), _read_context, _write_context),
    degree("expert-model-parallel-size", "plan.ep", largest.RANKS),
    Rule(("expert-tensor-parallel-size",), _read_expert_tp, _write_expert_tp),
    Rule(("sequence-parallel",), _read_sequence, _write_sequence),
    Rule(("use-distributed-optimizer", *_FSDP), _read_zero, _write_zero),
    Rule(("use-tp-pp-dp-mapping",), _read_order, _write_order),
    Rule(("optimizer-cpu-offload",), _read_offload, _write_offload),
    Rule(("recompute-granularity", "recompute-method", "recompute-num-layers", "recompute-modules"),
         _read_recompute, _write_recompute),
    degree("micro-batch-size batch-size", "plan.microbatch_size", largest.BATCH, always=True),
)  # fmt: skip
