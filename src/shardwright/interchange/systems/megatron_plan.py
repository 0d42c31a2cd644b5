"""Megatron-LM's flags for the plan: parallel degrees, pipeline, sharding; recompute is in megatron_recompute.py."""

import re
from typing import Any

from shardwright.config import largest
from shardwright.config.cluster_facts import USUAL_NODE, filled_nodes
from shardwright.config.job import JobSpec
from shardwright.config.phrase import both, say
from shardwright.config.plan import even_stages
from shardwright.config.rank_order import DEFAULT_ORDER, STAGES_INSIDE
from shardwright.interchange.reading.setting_notes import off_without_tensors
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.rows import Rule, Table, degree, word_for
from shardwright.interchange.systems.megatron_recompute import read_recompute, write_recompute

WORLD = "world-size"  # number of ranks that the launcher starts

_VIRTUAL = ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank")
LAYOUT = "pipeline-model-parallel-layout"
_FSDP = ("use-megatron-fsdp", "use-custom-fsdp")
_SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_CP = {"p2p": "ring", "all_gather": "all-gather", "a2a": "ulysses"}


def read_dp(settings: Settings, fields: Flat) -> None:
    """Read how many replicas there are; a fault asks for the number of GPUs, or tells of ranks that do not share."""
    shared = fields["plan.tp"] * fields["plan.pp"] * fields["plan.cp"]
    world = settings.count(WORLD, 0)
    fields["plan.dp"] = max(1, world // max(1, shared))
    if world == 0:
        if not any("how many GPUs there are" in fault for fault in settings.faults):
            usual = filled_nodes(shared, USUAL_NODE)
            settings.faults.append(
                say("nothing says how many GPUs there are; say it with --devices, such as {usual}", usual=usual)
            )
    elif shared and world % shared:
        degrees = f"tensor {fields['plan.tp']} x pipeline {fields['plan.pp']}"
        degrees += f" x context {fields['plan.cp']}" if fields["plan.cp"] > 1 else ""
        settings.faults.append(
            say(
                "the launcher starts {world} ranks, and {degrees} = {shared} of them share one replica ({world} / "
                "{shared} = {quotient:.2f}); say how many GPUs there are with --devices, such as {near}",
                world=world,
                degrees=degrees,
                shared=shared,
                quotient=world / shared,
                near=filled_nodes(shared, world),
            )
        )


def _read_pipeline(settings: Settings, fields: Flat) -> None:
    """Read the schedule, the virtual stages, and the layers of each stage."""
    pp, layers = fields["plan.pp"], fields["model.layers"]
    text = settings.text(LAYOUT)
    layers_per_stage, stages_per_rank = (settings.count(name, 0, largest.LAYERS) for name in _VIRTUAL)
    first = settings.count("decoder-first-pipeline-num-layers", 0)
    last = settings.count("decoder-last-pipeline-num-layers", 0)
    extra_layers = [settings.flag(f"account-for-{name}-in-pipeline-split") for name in ("embedding", "loss")]
    num_counted = layers + sum(extra_layers)
    stages: list[int] = []
    if layers_per_stage and stages_per_rank:
        settings.faults.append(
            say(
                "{settings} are both there, and Megatron-LM takes one of them; leave one out",
                settings=both(list(map(settings.setting_text, _VIRTUAL))),
            )
        )
    if text:
        stages = _stages_of(text, settings)
        virtual = max(1, len(stages) // pp)
    elif layers_per_stage and pp and num_counted % (pp * layers_per_stage):
        settings.faults.append(
            say(
                "{product} = {shared} does not divide {layers} layers",
                product=f"--{_VIRTUAL[0]} {layers_per_stage} x --pipeline-model-parallel-size {pp}",
                shared=layers_per_stage * pp,
                layers=num_counted,
            )
        )
        virtual = 1
    else:
        virtual = max(1, num_counted // (pp * layers_per_stage) if layers_per_stage else stages_per_rank)
    if pp * virtual > num_counted and not text:
        stages = []
    elif any(extra_layers) and not text:
        stages = even_stages(num_counted, pp * virtual)
        stages[0] -= extra_layers[0]
        stages[-1] -= extra_layers[1]
    elif (first or last) and not text and pp > 1:
        stages = _uneven_stages(layers, pp, virtual, first, last)
    if pp * virtual > layers + 2:  # the checks of the job report this
        stages = []
    if not (stages or text):
        _tell_uneven_stages(settings, num_counted, pp, virtual)
    fields["plan.schedule"] = "interleaved-1f1b" if virtual > 1 and pp > 1 else "1f1b"
    if (schedule := _zero_bubbles(settings, pp)) and pp > 1:
        fields["plan.schedule"] = schedule
    fields["plan.virtual_stages"] = virtual if pp > 1 else 1
    if stages and pp > 1 and (stages != even_stages(layers, pp * virtual) or 0 in stages):
        fields["plan.layout"] = stages


def _zero_bubbles(settings: Settings, pp: int) -> str:
    """The schedule of forks without bubbles: Megatron-DeepSpeed's, and that of Sea AI Lab's; empty without one."""
    if settings.flag("enable-zbh1-pipeline"):
        return "zb-h1"
    if settings.flag("zero-bubble-v-schedule"):
        settings.ignore("enable-zero-bubble", "zero-bubble-max-pending-backward")
        words = {"half": "v-half", "min": "v-min", "zb": "zb-v"}
        return str(settings.one_of("zero-bubble-v-schedule-mem-setup", words, "zb", "plan.schedule"))
    if not settings.flag("enable-zero-bubble"):
        return ""
    alive = settings.count("zero-bubble-max-pending-backward", pp)
    return "zb-h2" if alive >= 2 * pp - 1 else "zb-h1"


def _tell_uneven_stages(settings: Settings, layers: int, pp: int, virtual: int) -> None:
    """Tell of layers that do not divide into the stages, which Megatron-LM refuses where no option says how."""
    parts = pp * virtual
    is_other = settings.has("deepspeed") or settings.has("noop-layers")
    if pp > 1 and layers > parts and layers % parts and not is_other:
        settings.lose(
            "pipeline-model-parallel-size",
            say(
                "{layers} layers do not divide into {parts} stages, where Megatron-LM stops; stages of {least} and "
                "{most} are counted here",
                layers=layers,
                parts=parts,
                least=layers // parts,
                most=layers // parts + 1,
            ),
        )


def _uneven_stages(layers: int, pp: int, virtual: int, first: int, last: int) -> list[int]:
    """Layers of each stage, with `first` and `last` layers on the first and the last rank; 0 takes an equal share."""
    num_middle = pp - (first > 0) - (last > 0)
    per_middle_rank = (layers - first - last) // num_middle if num_middle else 0
    ranks = [first or per_middle_rank, *[per_middle_rank] * (pp - 2), last or per_middle_rank]
    return [ranks[stage % pp] // virtual for stage in range(pp * virtual)]


def _stages_of(text: str, settings: Settings) -> list[int]:
    """Layers of each stage of a layout, such as Et*3|(tt|)*29,m|L; empty, with a fault, if it is not valid."""
    if len(text) > 4096 or not re.fullmatch(r"[EtmL|(),*0-9\s]*", text):
        settings.faults.append(say("{setting} has other letters than E, t, m and L", setting=f"--{LAYOUT} {text[:60]}"))
        return []
    text = re.sub(r"[,\s]", "", text)
    for pattern in (r"\(([^()]*)\)\*([0-9]{1,3})", r"([EtmL|])\*([0-9]{1,3})"):
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
        if len(text) > 1 << 16:
            settings.faults.append(
                say("{setting} names more than {most:,} layers", setting=f"--{LAYOUT}", most=1 << 16)
            )
            return []
    return [stage.count("t") for stage in text.split("|")]


def layout_text(stages: list[int], mtp_layers: int) -> str:
    """The layout of stages as Megatron-LM writes it: E embedding, t layer, m MTP layer, L loss."""
    words = ["t" * count for count in stages]
    words[0] = "E" + words[0]
    words[-1] += "m" * mtp_layers + "L"
    return "|".join(words)


def _write_pipeline(job: JobSpec, settings: dict[str, Any]) -> None:
    plan, layers = job.plan, job.model.layers
    virtual = plan.virtual_stages if plan.schedule == "interleaved-1f1b" and plan.pp > 1 else 1
    stages = plan.stage_layers(layers) if len(plan.stage_layers(layers)) == plan.pp * virtual else []
    if stages and len(set(stages)) > 1:
        settings[LAYOUT] = layout_text(stages, job.model.mtp_layers)
    elif virtual > 1:
        settings[_VIRTUAL[1]] = virtual


# Words for heads that are traded among some ranks, and a ring over the others: Megatron-LM's and MindSpeed's.
_BOTH_WAYS = {"cp-comm-type": "a2a+p2p", "context-parallel-algo": "hybrid_cp_algo"}


def _read_context(settings: Settings, fields: Flat) -> None:
    words = settings.words("cp-comm-type") or ["p2p"]
    names = [name for name, word in _BOTH_WAYS.items() if settings.text(name) == word] if fields["plan.cp"] > 1 else []
    if names:
        names += [name for name in ("ulysses-degree-in-cp",) if settings.has(name)]
        fault = say(
            "{settings} can't be said here: heads are traded among some ranks there and keys go round the others, and "
            "a plan has one of both (--set plan.cp_method=ring or ulysses)",
            settings=tuple(map(settings.setting_text, names)),
        )
        settings.ignore(*names)
        (settings.lost if "plan.cp_method" in settings.overrides else settings.faults).append(fault)
    elif set(words) - set(_CP) or len(set(words)) > 1:
        settings.faults.append(
            say(
                "{setting} can't be said here; use one of {words} for all layers",
                setting=settings.setting_text("cp-comm-type"),
                words=tuple(_CP),
            )
        )
    is_ulysses = settings.has("ds-sequence-parallel-size")  # Megatron-DeepSpeed: Ulysses
    fields["plan.cp_method"] = "ulysses" if is_ulysses else _CP.get(words[0], "ring")


def _write_context(job: JobSpec, settings: dict[str, Any]) -> None:
    if job.plan.cp > 1 and (word := word_for(job.plan.cp_method, _CP)):
        settings["cp-comm-type"] = word


def _read_zero(settings: Settings, fields: Flat) -> None:
    shards = settings.flag("use-distributed-optimizer")
    strategy = settings.one_of("data-parallel-sharding-strategy", _SHARDED, "no_shard")
    zero = max(int(shards), settings.count("zero-stage", 0))
    if settings.flag("deepspeed") and settings.flag("bf16") and zero == 0 and settings.has("zero-stage"):
        zero = 1
        settings.note(
            say(
                "DeepSpeed shards the optimizer's state with bf16 also at {setting}, so plan.zero is 1",
                setting="--zero-stage 0",
            )
        )
    if settings.has(*_FSDP):
        zero = strategy
        if not settings.has("data-parallel-sharding-strategy"):
            settings.note(
                say(
                    "{option} shards nothing without {other}: no_shard is its default",
                    option="--use-megatron-fsdp",
                    other="--data-parallel-sharding-strategy",
                )
            )
    if settings.flag("use-torch-fsdp2"):
        zero = 2 if settings.flag("torch-fsdp2-no-reshard-after-forward") else 3
    num_copies = settings.count("num-distributed-optimizer-instances", 1)
    replicas = fields["plan.dp"] * fields["plan.cp"]
    fields["plan.zero"] = zero
    fields["plan.zero_ranks"] = replicas // num_copies if zero and num_copies > 1 and replicas % num_copies == 0 else 0
    if num_copies > 1 and (not zero or replicas % num_copies):
        settings.faults.append(
            say(
                "{setting} does not divide {replicas} replicas",
                setting=f"--num-distributed-optimizer-instances {num_copies}",
                replicas=replicas,
            )
        )


def _write_zero(job: JobSpec, settings: dict[str, Any]) -> None:
    plan = job.plan
    if plan.zero and plan.replicas > 1:
        settings["use-distributed-optimizer"] = True
        if plan.shard_copies > 1:
            settings["num-distributed-optimizer-instances"] = plan.shard_copies
    if plan.zero > 1 and plan.pp == 1 and plan.replicas > 1:
        settings["use-megatron-fsdp"] = True
        settings["data-parallel-sharding-strategy"] = {2: "optim_grads", 3: "optim_grads_params"}[plan.zero]
        settings["ckpt-format"] = "fsdp_dtensor"
        settings["no-gradient-accumulation-fusion"] = True


def _read_offload(settings: Settings, fields: Flat) -> None:
    share = settings.number("optimizer-offload-fraction", 1.0)
    is_offloaded = settings.flag(("optimizer-cpu-offload", "cpu-optimizer"))
    fields["plan.offload_optimizer"] = share if is_offloaded else 0.0
    if settings.flag("cpu-parameters") and fields["plan.zero"] == 3:  # by DeepSpeed's configuration
        fields["plan.offload_parameters"] = True


def _write_offload(job: JobSpec, settings: dict[str, Any]) -> None:
    if job.plan.offload_optimizer and shards_state(job):
        settings["optimizer-cpu-offload"] = True
        settings["optimizer-offload-fraction"] = job.plan.offload_optimizer
        settings["use-precision-aware-optimizer"] = True


def shards_state(job: JobSpec) -> bool:
    """True if replicas shard the state of Adam. Offload and moments in bf16 need it."""
    return job.plan.zero > 0 and job.plan.replicas > 1 and job.optimizer.name == "adamw"


def _read_order(settings: Settings, fields: Flat) -> None:
    fields["plan.order"] = STAGES_INSIDE if settings.flag("use-tp-pp-dp-mapping") else DEFAULT_ORDER


def _write_order(job: JobSpec, settings: dict[str, Any]) -> None:
    plan = job.plan
    stages = [axis for axis in plan.order.split("-") if getattr(plan, axis) > 1]
    if stages == [axis for axis in STAGES_INSIDE.split("-") if getattr(plan, axis) > 1] and {"pp", "dp"} <= set(stages):
        settings["use-tp-pp-dp-mapping"] = True


def _read_expert_tp(settings: Settings, fields: Flat) -> None:
    expert_tp = settings.count("expert-tensor-parallel-size", 0)
    fields["plan.expert_tp"] = 0 if expert_tp == fields["plan.tp"] else expert_tp


def _write_expert_tp(job: JobSpec, settings: dict[str, Any]) -> None:
    if job.model.moe.experts and job.plan.expert_tp:
        settings["expert-tensor-parallel-size"] = job.plan.expert_tp_size


def _read_sequence(settings: Settings, fields: Flat) -> None:
    is_requested = settings.flag("sequence-parallel")
    fields["plan.sequence_parallel"] = is_requested and fields["plan.tp"] > 1
    if is_requested and fields["plan.tp"] == 1:
        settings.note(off_without_tensors("--sequence-parallel"))


def _write_sequence(job: JobSpec, settings: dict[str, Any]) -> None:
    settings |= {"sequence-parallel": True} if job.plan.sequence_parallel and job.plan.tp > 1 else {}


PLAN: Table = (
    degree("tensor-model-parallel-size model-parallel-size", "plan.tp", largest.RANKS, always=True),
    degree("pipeline-model-parallel-size", "plan.pp", largest.PIPELINE_RANKS, always=True),
    degree("context-parallel-size ds-sequence-parallel-size", "plan.cp", largest.RANKS),
    Rule((WORLD,), read_dp),
    Rule((*_VIRTUAL, LAYOUT), _read_pipeline, _write_pipeline),
    Rule(("cp-comm-type",), _read_context, _write_context),
    degree("expert-model-parallel-size", "plan.ep", largest.RANKS),
    Rule(("expert-tensor-parallel-size",), _read_expert_tp, _write_expert_tp),
    Rule(("sequence-parallel",), _read_sequence, _write_sequence),
    Rule(("use-distributed-optimizer", *_FSDP), _read_zero, _write_zero),
    Rule(("use-tp-pp-dp-mapping",), _read_order, _write_order),
    Rule(("optimizer-cpu-offload",), _read_offload, _write_offload),
    Rule(
        ("recompute-granularity", "recompute-method", "recompute-num-layers", "recompute-modules"),
        read_recompute,
        write_recompute,
    ),
    degree("micro-batch-size batch-size", "plan.microbatch_size", largest.BATCH, always=True),
)
