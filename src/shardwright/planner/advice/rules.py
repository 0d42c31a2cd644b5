"""The field's rules of thumb, each with its source, its recommendation for a job, and if a plan agrees.

They are shown with the plans of a search, and decide nothing. A rule that does not concern a job returns None.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shardwright.config.cluster_facts import node_devices
from shardwright.config.job import JobSpec
from shardwright.config.link_words import link_words
from shardwright.config.model_shape import shape_of
from shardwright.config.phrase import fixed, say
from shardwright.config.plan import repeats_forwards
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.units import GIB, memory_text, number_text
from shardwright.cost.calibration import device_of
from shardwright.cost.from_job import run_of
from shardwright.cost.group_links import Groups


@dataclass(frozen=True)
class RuleOfThumb:
    """The verdict of one rule: its name, its recommendation with the job's numbers, its source, and if the job's plan
    agrees."""

    name: str
    says: str
    source: str
    agrees: bool


@dataclass(frozen=True)
class PlaceOfState:
    """The first of a device, a node and several nodes that holds the state of a whole model, and if the job's plan
    begins as the tree of `shardwright learn choosing` does there."""

    place: Literal["device", "node", "more"]
    state_bytes: float
    memory_bytes: float
    node: int  # devices
    domain: str
    agrees: bool

    @property
    def words(self) -> str:
        """The place with the job's numbers."""
        numbers = {"state": memory_text(int(self.state_bytes)), "node": self.node, "domain": self.domain}
        if self.place == "device":
            return say("{state} of state fit one device, so no tp and no pp", **numbers)
        if self.place == "node":
            return say("{state} of state fit a {domain} of {node:,}, so ZeRO or tp inside it, no pp", **numbers)
        return say("{state} of state are more than a {domain} of {node:,} holds, so tp, pp or ZeRO-3", **numbers)


def place_of_state(job: JobSpec) -> PlaceOfState | None:
    """The job's branch of that tree. None for training that changes few weights, and where a device or a node is
    unknown."""
    plan, node = job.plan, min(node_devices(job.cluster), job.plan.world)
    if job.model.is_adapted or job.cluster.device == "unknown" or not node:
        return None
    memory_bytes, state_bytes = device_of(job.cluster.device).memory_bytes, _state_bytes(job)
    domain = fixed(link_words(job.cluster).domain)
    if state_bytes <= memory_bytes:
        return PlaceOfState("device", state_bytes, memory_bytes, node, domain, plan.tp == plan.pp == 1)
    if state_bytes <= node * memory_bytes:
        agrees = plan.pp == 1 and plan.tp <= node
        return PlaceOfState("node", state_bytes, memory_bytes, node, domain, agrees)
    agrees = plan.tp * plan.pp > 1 or plan.zero == 3
    return PlaceOfState("more", state_bytes, memory_bytes, node, domain, agrees)


def first_place_of_state(job: JobSpec) -> RuleOfThumb | None:
    """The tree by which plans are chosen by hand: the smallest of a device, a node and several nodes that holds the
    state names what to begin with; the rule is of training that changes all weights."""
    first = place_of_state(job)
    if first is None:
        return None
    numbers = {
        "state": memory_text(int(first.state_bytes)),
        "memory": memory_text(int(first.memory_bytes)),
        "node": first.node,
        "domain": first.domain,
    }
    if first.place == "device":
        begin = say("{state} of state fit a device of {memory}: replicas, with ZeRO-1", **numbers)
    elif first.place == "node":
        begin = say("{state} of state fit {node:,} devices of {memory}, a {domain}: ZeRO, or tp inside it", **numbers)
    else:
        begin = say(
            "{state} of state are more than {node:,} devices of {memory}, a {domain}: tp inside, pp across, dp over "
            "the rest; or ZeRO-3",
            **numbers,
        )
    return RuleOfThumb(
        say("a device, a {domain}, or more: the first that holds the state", domain=first.domain),
        begin,
        "shardwright learn choosing",
        first.agrees,
    )


def _state_bytes(job: JobSpec) -> float:
    """The bytes of state of a whole model in mixed precision, with gradients in float32."""
    return 18.0 * shape_of(job.model).parameters


def tensor_inside_a_node(job: JobSpec) -> RuleOfThumb | None:
    """Collectives of tp are on the critical path of every layer."""
    domain = job.cluster.devices_per_node
    if domain >= job.plan.world:
        return None
    return RuleOfThumb(
        say("tp inside the fast links"),
        say(
            "tp at most {devices}, the devices of a {domain}",
            devices=domain,
            domain=fixed(link_words(job.cluster).domain),
        ),
        "Narayanan et al. 2021 (arXiv 2104.04473), takeaway 1",
        bool(Groups(run_of(job)).tp.domains == 1),
    )


def sequence_with_tensor(job: JobSpec) -> RuleOfThumb | None:
    """Use sequence parallel with tp: the same bytes are sent, and norms and residuals are kept once instead of tp
    times."""
    if job.plan.tp == 1:
        return None
    return RuleOfThumb(
        say("sequence parallel wherever there is tp"),
        say("sequence_parallel = true with tp {tp}", tp=job.plan.tp),
        "Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2",
        job.plan.sequence_parallel,
    )


def model_parallel_as_memory_asks(job: JobSpec) -> RuleOfThumb | None:
    """Share the model among as few ranks as its state needs, and use the others as replicas; the rule is of training
    that changes all weights."""
    if job.model.is_adapted:
        return None
    memory_bytes = device_of(job.cluster.device).memory_bytes
    state_bytes = _state_bytes(job)
    least = 1
    while least * memory_bytes < state_bytes:
        least *= 2
    share = job.plan.tp * job.plan.pp * (job.plan.replicas if job.plan.zero == 3 else 1)
    return RuleOfThumb(
        say("as little model parallelism as memory allows"),
        say(
            "tp x pp about {least}: 18 bytes x {parameters} G parameters = {state} over devices of {memory:.0f} GiB; "
            "fewer with ZeRO",
            least=least,
            parameters=number_text(shape_of(job.model).parameters / 1e9),
            state=memory_text(int(state_bytes)),
            memory=memory_bytes / GIB,
        ),
        "Narayanan et al. 2021 (arXiv 2104.04473), takeaway 2",
        share <= 2 * least,
    )


def pipeline_across_nodes(job: JobSpec) -> RuleOfThumb | None:
    """Stages exchange the least, so they may lie farthest apart."""
    plan, node = job.plan, job.cluster.devices_per_node
    if plan.pp == 1 or node >= plan.world:
        return None
    return RuleOfThumb(
        say("pipeline across {domains}, once tp fills one", domains=fixed(link_words(job.cluster).domains)),
        say("tp {node} before pp, where the model needs both", node=node),
        "Narayanan et al. 2021 (arXiv 2104.04473), takeaway 1",
        plan.tp >= min(node, job.model.num_kv_heads) or plan.block >= node,
    )


def enough_microbatches(job: JobSpec) -> RuleOfThumb | None:
    """The bubble is (p - 1) / (m v) of the step's computing."""
    plan = job.plan
    if plan.pp == 1:
        return None
    m, v, facts = job.num_microbatches, plan.stages_per_rank, SCHEDULES[plan.schedule]
    return RuleOfThumb(
        say("four microbatches a stage, or stages interleaved"),
        say(
            "m >= 4 x pp = {least}, or more stages a rank: m is {m} and v is {v}, so 1F1B's bubble is {others} / "
            "({m} x {v}) = {bubble:.0%}",
            least=4 * plan.pp,
            m=m,
            v=v,
            others=plan.pp - 1,
            bubble=(plan.pp - 1) / (m * v),
        ),
        "Huang et al. 2019 (GPipe, arXiv 1811.06965), section 2.3; Narayanan et al. 2021, section 2.2",
        m >= 4 * plan.pp or v > 1 or facts.splits_weights or facts.pairs,
    )


def optimizer_state_alone(job: JobSpec) -> RuleOfThumb | None:
    """Shard only the optimizer state in a pipeline. With m microbatches ZeRO-3 gathers up to m times, and ZeRO-2 with
    several stages a rank reduces up to m times; ZeRO-1 does both once."""
    plan = job.plan
    if plan.replicas == 1:
        return None
    wanted = (1,) if plan.pp > 1 else (1, 2, 3)
    name = say("ZeRO-1 with a pipeline")
    recommendation = say("3 would gather with each microbatch again, and 2 reduce where a rank's stages alternate")
    if plan.pp == 1:
        name = say("some ZeRO stage wherever there are replicas")
        recommendation = say("what they hold alike is shared")
    return RuleOfThumb(
        name,
        recommendation,
        "DeepSpeed's pipeline engine refuses stages 2 and 3; Rajbhandari et al. 2020 (arXiv 1910.02054), section 7",
        plan.zero in wanted,
    )


def recompute_what_memory_needs(job: JobSpec) -> RuleOfThumb | None:
    """Full recomputation takes a third more FLOPs."""
    return RuleOfThumb(
        say("recompute no more than memory needs"),
        say("none, or selective; full recomputation costs one forward in three"),
        "Korthikanti et al. 2022 (arXiv 2205.05198), section 5",
        not repeats_forwards(job.plan, job.model.layers),
    )


def context_for_long_sequences(job: JobSpec) -> RuleOfThumb | None:
    """Activations of one sequence grow with its length, and no other axis cuts them."""
    is_long = job.model.sequence >= 32768
    return RuleOfThumb(
        say("cp for long sequences alone"),
        say(
            "{degree} at {tokens:,} tokens", degree=say("cp above 1") if is_long else "cp 1", tokens=job.model.sequence
        ),
        "Grattafiori et al. 2024 (Llama 3, arXiv 2407.21783), table 4: cp 16 at 131,072 tokens, 1 at 8,192",
        (job.plan.cp > 1) == is_long,
    )


def experts_before_tensor(job: JobSpec) -> RuleOfThumb | None:
    """Experts that tp does not cut have larger products."""
    if not job.model.moe.experts:
        return None
    return RuleOfThumb(
        say("ep before tp for experts"),
        say("experts whole (expert_tp 1), spread over ep"),
        "Liu et al. 2025 (arXiv 2504.14960), section 4; DeepSeek-V3 (arXiv 2412.19437), section 3.2",
        job.plan.expert_tp_size == 1 and job.plan.ep > 1,
    )


def experts_near(job: JobSpec) -> RuleOfThumb | None:
    """Tokens cross the network once for each node that has experts for them."""
    if not job.model.moe.experts or Groups(run_of(job)).ep.domains == 1:
        return None
    return RuleOfThumb(
        say("tokens once to each node"),
        say("node-aware dispatch where ep crosses nodes"),
        "DeepSeek-V3 (arXiv 2412.19437), section 3.2.2",
        job.plan.dispatch == "node-aware",
    )


def largest_microbatch(job: JobSpec) -> RuleOfThumb | None:
    """Larger products run nearer to the peak; fewer microbatches leave a larger bubble."""
    plan = job.plan
    if plan.pp == 1:
        return None
    doubled = job.num_microbatches // 2
    return RuleOfThumb(
        say("the largest microbatch that does not empty the pipeline"),
        say(
            "twice {size} would leave {microbatches} microbatches, and 4 x pp is {least}",
            size=plan.microbatch_size,
            microbatches=doubled,
            least=4 * plan.pp,
        ),
        "Narayanan et al. 2021 (arXiv 2104.04473), takeaway 3",
        doubled < 4 * plan.pp,
    )


RULES: tuple[Callable[[JobSpec], RuleOfThumb | None], ...] = (
    first_place_of_state,
    tensor_inside_a_node,
    model_parallel_as_memory_asks,
    pipeline_across_nodes,
    sequence_with_tensor,
    enough_microbatches,
    largest_microbatch,
    optimizer_state_alone,
    recompute_what_memory_needs,
    context_for_long_sequences,
    experts_before_tensor,
    experts_near,
)


def rules_for(job: JobSpec) -> list[RuleOfThumb]:
    """The verdicts of all rules that concern a job and its plan."""
    return [verdict for rule in RULES if (verdict := rule(job))]
