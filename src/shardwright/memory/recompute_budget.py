"""The choice of operators to recompute in each layer, so that a rank's activations fit a limit at the least time.

Chen et al. 2016 (arXiv 1604.06174) and Korthikanti et al. 2022 (arXiv 2205.05198, section 5): recompute operators that
are cheap for the bytes that they free. Here every layer has several policies, from keeping all tensors to keeping only
its input. The policies that no mixture of others beats form a ladder, whose steps cost more and more for each byte.
Layers climb it one step at a time. Each step is the cheapest for the bytes that it frees at the moment that is still
over the limit, so an early stage, which keeps more microbatches, climbs higher. Then layers step back down if there is
room left. Because the steps get more expensive, the result takes the least time up to the last step of one layer.

Within a stage the first layers climb first: their turn in the backward comes last, when later layers have freed theirs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.phrase import say, summed
from shardwright.config.recompute_policy import NEEDS, OPERATORS, WHOLE_LAYER, Policy
from shardwright.config.units import GIB
from shardwright.layers.recompute_cost import Again
from shardwright.memory.activation_peak import Moment, StageMemory, job_stages, moments, peak
from shardwright.memory.activations import Layer, layer_of
from shardwright.memory.layer_memory import LayerMemory
from shardwright.schedule.job_program import job_program


@dataclass(frozen=True)
class Option:
    """One policy of a layer, the bytes that it keeps and the cost of its recomputation."""

    policy: Policy
    kept_bytes: int
    cost: float


@dataclass(frozen=True)
class RecomputeChoice:
    """The policies of the layers of one pipeline rank, and its peak of activations with them."""

    policies: dict[int, Policy]
    peak_bytes: int
    flops: float  # recomputed, for one microbatch


def options(layer: Layer, again: Again) -> list[Option]:
    """The policies that no other beats, from keeping all to keeping the least, in the order of their costs."""
    candidates = [Option(policy, layer.kept_bytes(policy), again.cost(policy)) for policy in _all_policies()]
    best: list[Option] = []
    for option in sorted(candidates, key=lambda option: (option.cost, option.kept_bytes, sorted(option.policy))):
        if not best or option.kept_bytes < best[-1].kept_bytes:
            best.append(option)
    return best


def _all_policies() -> list[Policy]:
    subsets = chain.from_iterable(combinations(OPERATORS, count) for count in range(len(OPERATORS) + 1))
    sensible = [frozenset(names) for names in subsets if all(NEEDS[name] in names for name in names if name in NEEDS)]
    return [*sensible, WHOLE_LAYER]


def ladder(options: list[Option]) -> list[Option]:
    """The lower convex hull of options: each step costs more for each byte than the step before."""
    hull: list[Option] = []
    for option in options:
        while len(hull) >= 2 and _rate(hull[-2], hull[-1]) >= _rate(hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _rate(lower: Option, upper: Option) -> float:
    return (upper.cost - lower.cost) / (lower.kept_bytes - upper.kept_bytes)


@dataclass(frozen=True)
class Choices:
    """The choices of layers of one kind: the `steps` of their ladder, the memory of a microbatch on each (`rungs`), and
    the cost and memory of every policy that no other beats (`known`)."""

    again: Again
    steps: tuple[Option, ...]
    rungs: tuple[LayerMemory, ...]
    known: Mapping[Policy, tuple[float, LayerMemory]]

    @classmethod
    def of(cls, layer: Layer, again: Again) -> "Choices":
        """The choices of a layer."""
        best_options = options(layer, again)
        steps = tuple(ladder(best_options))
        known = {option.policy: (option.cost, LayerMemory.of(layer, option.policy)) for option in best_options}
        return cls(again, steps, tuple(known[option.policy][1] for option in steps), known)


StageChoices = Mapping[int, Sequence[Choices]]  # of the layers of each stage


def choose(
    allowed: StageChoices, stages: Mapping[int, StageMemory], peak_moments: frozenset[Moment], limit_bytes: int
) -> dict[int, StageMemory] | None:
    """The stages of a rank with policies that fit, or None if none fit. The present policies of `stages` do not
    matter."""
    levels = {stage: [0] * len(memory.layers) for stage, memory in stages.items()}
    current = {
        stage: replace(memory, layers=tuple(choices.rungs[0] for choices in allowed[stage]))
        for stage, memory in stages.items()
    }
    peak_bytes, moment = peak(peak_moments, current)
    while peak_bytes > limit_bytes:
        candidates = []
        for stage, count in moment.microbatches.items():
            candidates += [
                # A step frees more bytes if more microbatches are alive.
                (_rate(choices.steps[level], choices.steps[level + 1]) / count, stage, index)
                for index, (choices, level) in enumerate(zip(allowed[stage], levels[stage], strict=True))
                if level + 1 < len(choices.steps)
            ]
        if not candidates:
            return None
        _, stage, index = min(candidates)
        levels[stage][index] += 1
        current[stage] = _with(current[stage], index, allowed[stage][index].rungs[levels[stage][index]])
        peak_bytes, moment = peak(peak_moments, current)
    return _give_back(current, allowed, peak_moments, limit_bytes)


def _with(memory: StageMemory, index: int, layer: LayerMemory) -> StageMemory:
    return replace(memory, layers=(*memory.layers[:index], layer, *memory.layers[index + 1 :]))


def _give_back(
    current: dict[int, StageMemory], allowed: StageChoices, peak_moments: frozenset[Moment], limit_bytes: int
) -> dict[int, StageMemory]:
    """Let single layers take cheaper policies if there is room, the largest saving first."""
    while True:
        savings = []
        for stage, memory in current.items():
            # Layers of a kind with the same policy differ only in their turn: the last of them is tried.
            layers = zip(allowed[stage], memory.layers, strict=True)
            last_index = {(id(choices), layer.policy): index for index, (choices, layer) in enumerate(layers)}
            for (_, policy), index in last_index.items():
                costs = allowed[stage][index].known
                savings += [
                    (costs[policy][0] - cost, stage, index, layer)
                    for cost, layer in costs.values()
                    if cost < costs[policy][0]
                ]
        for _, stage, index, layer in sorted(savings, key=lambda saving: saving[0], reverse=True):
            changed = {**current, stage: _with(current[stage], index, layer)}
            if peak(peak_moments, changed)[0] <= limit_bytes:
                current = changed
                break
        else:
            return current


def choices(job: JobSpec) -> list[RecomputeChoice]:
    """The policies of each pipeline rank under plan.recompute = "budget". PlanError if a rank can't fit the limit."""
    plan, layers, program = job.plan, job.model.layers, job_program(job)
    counts, choices_of_layer = plan.stage_layers(layers), layer_choices(job)
    limit_bytes = int(plan.memory_limit_gib * GIB)
    rank_choices, faults = [], []
    for rank in range(plan.pp):
        least = job_stages(job, program, rank, [WHOLE_LAYER] * layers)
        peak_moments = moments(program, rank)
        allowed = {stage: choices_of_layer[sum(counts[:stage]) : sum(counts[: stage + 1])] for stage in least}
        chosen = choose(allowed, least, peak_moments, limit_bytes)
        if chosen is None:
            faults.append(_too_little(job, rank, least, peak_moments))
            continue
        policies = {
            sum(counts[:stage]) + index: layer.policy
            for stage, memory in chosen.items()
            for index, layer in enumerate(memory.layers)
        }
        flops = sum(choices_of_layer[index].again.flops(policy) for index, policy in policies.items())
        rank_choices.append(RecomputeChoice(policies, peak(peak_moments, chosen)[0], flops))
    if faults:
        raise PlanError(say("memory budget of {name}", name=job.name), faults)
    return rank_choices


def layer_choices(job: JobSpec) -> list[Choices]:
    """The choices of each layer of the model. All layers of a kind share one object."""
    kind_of = shape_of(job.model).kind
    number_of_kind = {kind_of(number): number for number in reversed(range(job.model.layers))}
    kinds = {kind: Choices.of(layer_of(job, number), Again.of(job, number)) for kind, number in number_of_kind.items()}
    return [kinds[kind_of(number)] for number in range(job.model.layers)]


def chosen_layers(job: JobSpec) -> list[list[str]]:
    """The operators that each layer of the model recomputes. PlanError as in `choices`.

    If a schedule has a stage on two ranks, its layers take the policy of the rank that keeps less.
    """
    kept_of_kinds = [
        {policy: memory.kept_bytes for policy, (_, memory) in kind.known.items()} for kind in layer_choices(job)
    ]
    merged: dict[int, Policy] = {}
    for choice in choices(job):
        for index, policy in choice.policies.items():
            merged[index] = min(policy, merged.get(index, policy), key=kept_of_kinds[index].__getitem__)
    return [sorted(merged[index]) for index in sorted(merged)]


def _too_little(job: JobSpec, rank: int, stages: Mapping[int, StageMemory], peak_moments: frozenset[Moment]) -> str:
    """Text with the arithmetic of the moment that does not fit, and what to change."""
    most, moment = peak(peak_moments, stages)
    terms: list[str] = [
        say("{count} x {what}", count=count, what=_described(stage, stages[stage])) for stage, count in moment.kept
    ]
    terms += [
        say(
            "{count} x {size:,} that wait for weight gradients of stage {stage}",
            count=count,
            size=stages[stage].deferred_bytes,
            stage=stage,
        )
        for stage, count in moment.deferred
    ]
    if moment.in_backward is not None:
        memory = stages[moment.in_backward]
        again = max((layer.again_bytes for layer in memory.layers), default=0)
        terms.append(
            say(
                "{size:,} in the backward of stage {stage} (one layer made again is {again:,})",
                size=memory.backward_bytes(moment.is_split),
                stage=moment.in_backward,
                again=again,
            )
        )
    plan = job.plan
    return say(
        "plan.memory_limit_gib {limit:g} is {size:,} bytes, and pipeline rank {rank} holds {most:,} of activations "
        "even if every layer keeps its input alone: {terms}; set it to at least {least:g}, lower "
        "plan.microbatch_size {microbatch}, or use a schedule that holds fewer microbatches",
        limit=plan.memory_limit_gib,
        size=int(plan.memory_limit_gib * GIB),
        rank=rank,
        most=most,
        terms=summed(terms),
        least=math.ceil(most / GIB * 1e4) / 1e4,
        microbatch=plan.microbatch_size,
    )


def _described(stage: int, memory: StageMemory) -> str:
    layers = sum(layer.kept_bytes for layer in memory.layers)
    ends = memory.documents_bytes + memory.embedding_bytes + memory.head_bytes
    return say(
        "{size:,} of stage {stage} (inputs of {count} layers {layers:,}, ends {ends:,})",
        size=memory.kept_bytes,
        stage=stage,
        count=len(memory.layers),
        layers=layers,
        ends=ends,
    )
