"""The choice of operators to recompute in each layer, so that a rank's activations fit a limit at the least time.

Chen et al. 2016 (arXiv 1604.06174) and Korthikanti et al. 2022 (arXiv 2205.05198, section 5) say what is worth it:
compute again what is cheap for the bytes that it frees. Here every layer has a choice of policies, from keeping all to
keeping its input alone. Those that no mixture of others beats are a ladder of steps, each dearer a byte than the last.
Layers climb it one step at a time, always the cheapest for the bytes freed at the moment that is still over the limit;
so an early stage, which holds more microbatches, climbs higher. Then layers step back down where there is room left.
Because the steps get dearer, that is the least time up to the last step of one layer.

Within a stage the first layers climb first: their turn in the backward comes last, when the later ones have let go.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

from shardwright.account.activation_peak import Moment, StageMemory, job_stages, moments, peak
from shardwright.account.activations import Layer, layer_of
from shardwright.account.layer_memory import LayerMemory
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.recompute_policy import NEEDS, OPERATORS, WHOLE_LAYER, Policy
from shardwright.config.units import GIB
from shardwright.schedule.job_program import job_program
from shardwright.workload.recompute_cost import Again


@dataclass(frozen=True)
class Option:
    """One policy of a layer, what it keeps and what computing again costs."""

    policy: Policy
    kept_bytes: int
    cost: float


@dataclass(frozen=True)
class RecomputeChoice:
    """The policies of the layers of one pipeline rank, and the most bytes of activations that it then holds."""

    policies: dict[int, Policy]
    peak_bytes: int
    flops: float  # that are computed again, of one microbatch


def options(layer: Layer, again: Again) -> list[Option]:
    """The policies that no other beats, from keeping all to keeping least; costs ascend."""
    candidates = [Option(policy, layer.kept_bytes(policy), again.cost(policy)) for policy in _all_policies()]
    best: list[Option] = []
    for option in sorted(candidates, key=lambda o: (o.cost, o.kept_bytes, sorted(o.policy))):
        if not best or option.kept_bytes < best[-1].kept_bytes:
            best.append(option)
    return best


def _all_policies() -> list[Policy]:
    subsets = chain.from_iterable(combinations(OPERATORS, count) for count in range(len(OPERATORS) + 1))
    sensible = [frozenset(names) for names in subsets if all(NEEDS[name] in names for name in names if name in NEEDS)]
    return [*sensible, WHOLE_LAYER]


def ladder(options: list[Option]) -> list[Option]:
    """The lower convex hull of options: each step costs more for a byte than the one before."""
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
    """The choices of layers of one kind, with experts or without: the steps of their ladder with the memory of a
    microbatch on each, and the costs of all policies that no other beats."""

    again: Again
    steps: tuple[Option, ...]
    rungs: tuple[LayerMemory, ...]
    known: Mapping[Policy, tuple[float, LayerMemory]]

    @classmethod
    def of(cls, layer: Layer, again: Again) -> "Choices":
        """The choices of a layer."""
        every = options(layer, again)
        steps = tuple(ladder(every))
        known = {option.policy: (option.cost, LayerMemory.of(layer, option.policy)) for option in every}
        return cls(again, steps, tuple(known[option.policy][1] for option in steps), known)


StageChoices = Mapping[int, Sequence[Choices]]  # of the layers of each stage


def choose(
    allowed: StageChoices, stages: Mapping[int, StageMemory], when: frozenset[Moment], limit_bytes: int
) -> dict[int, StageMemory] | None:
    """The stages of a rank, with policies that fit; None if none do. The policies that `stages` have do not matter."""
    levels = {stage: [0] * len(memory.layers) for stage, memory in stages.items()}
    current = {
        stage: replace(memory, layers=tuple(choices.rungs[0] for choices in allowed[stage]))
        for stage, memory in stages.items()
    }
    most, moment = peak(when, current)
    while most > limit_bytes:
        candidates = []
        for stage, count in moment.microbatches.items():
            candidates += [
                # A step frees more where more microbatches hold what it frees.
                (_rate(choices.steps[level], choices.steps[level + 1]) / count, stage, index)
                for index, (choices, level) in enumerate(zip(allowed[stage], levels[stage], strict=True))
                if level + 1 < len(choices.steps)
            ]
        if not candidates:
            return None
        _, stage, index = min(candidates)
        levels[stage][index] += 1
        current[stage] = _with(current[stage], index, allowed[stage][index].rungs[levels[stage][index]])
        most, moment = peak(when, current)
    return _give_back(current, allowed, when, limit_bytes)


def _with(memory: StageMemory, index: int, layer: LayerMemory) -> StageMemory:
    return replace(memory, layers=(*memory.layers[:index], layer, *memory.layers[index + 1 :]))


def _give_back(
    current: dict[int, StageMemory], allowed: StageChoices, when: frozenset[Moment], limit_bytes: int
) -> dict[int, StageMemory]:
    """Let single layers take cheaper policies where there is room, the largest saving first."""
    while True:
        savings = []
        for stage, memory in current.items():
            # Layers of a kind with the same policy differ in their turn alone: the last of them is tried.
            kinds = zip(allowed[stage], memory.layers, strict=True)
            last = {(id(choices), layer.policy): index for index, (choices, layer) in enumerate(kinds)}
            for (_, policy), index in last.items():
                known = allowed[stage][index].known
                savings += [
                    (known[policy][0] - cost, stage, index, layer)
                    for cost, layer in known.values()
                    if cost < known[policy][0]
                ]
        for _, stage, index, layer in sorted(savings, key=lambda saving: saving[0], reverse=True):
            changed = {**current, stage: _with(current[stage], index, layer)}
            if peak(when, changed)[0] <= limit_bytes:
                current = changed
                break
        else:
            return current


def choices(job: JobSpec) -> list[RecomputeChoice]:
    """The policies of each pipeline rank under plan.recompute = "budget". PlanError if a rank can't fit the limit."""
    plan, layers, program = job.plan, job.model.layers, job_program(job)
    counts, kinds = plan.stage_layers(layers), layer_choices(job)
    limit_bytes = int(plan.memory_limit_gib * GIB)
    answers, faults = [], []
    for rank in range(plan.pp):
        least = job_stages(job, program, rank, [WHOLE_LAYER] * layers)
        when = moments(program, rank)
        allowed = {stage: kinds[sum(counts[:stage]) : sum(counts[: stage + 1])] for stage in least}
        chosen = choose(allowed, least, when, limit_bytes)
        if chosen is None:
            faults.append(_too_little(job, rank, least, when))
            continue
        policies = {
            sum(counts[:stage]) + i: held.policy
            for stage, memory in chosen.items()
            for i, held in enumerate(memory.layers)
        }
        flops = sum(kinds[index].again.flops(policy) for index, policy in policies.items())
        answers.append(RecomputeChoice(policies, peak(when, chosen)[0], flops))
    if faults:
        raise PlanError(f"memory budget of {job.name}", faults)
    return answers


def layer_choices(job: JobSpec) -> list[Choices]:
    """The choices of each layer of the model: one object for all layers of a kind."""
    kind_of = shape_of(job.model).kind
    first = {kind_of(number): number for number in reversed(range(job.model.layers))}
    kinds = {kind: Choices.of(layer_of(job, number), Again.of(job, number)) for kind, number in first.items()}
    return [kinds[kind_of(number)] for number in range(job.model.layers)]


def chosen_layers(job: JobSpec) -> list[list[str]]:
    """The operators that each layer of the model recomputes. PlanError as `choices`.

    Where a schedule holds a stage on two ranks, its layers do what the rank that keeps less of them needs.
    """
    kept = [{policy: memory.kept_bytes for policy, (_, memory) in kind.known.items()} for kind in layer_choices(job)]
    merged: dict[int, Policy] = {}
    for choice in choices(job):
        for index, policy in choice.policies.items():
            merged[index] = min(policy, merged.get(index, policy), key=kept[index].__getitem__)
    return [sorted(merged[index]) for index in sorted(merged)]


def _too_little(job: JobSpec, rank: int, stages: Mapping[int, StageMemory], when: frozenset[Moment]) -> str:
    """The arithmetic of the moment that does not fit, and a way out."""
    most, moment = peak(when, stages)
    terms = [f"{count} x {_described(stage, stages[stage])}" for stage, count in moment.kept]
    terms += [
        f"{count} x {stages[stage].deferred_bytes:,} that wait for weight gradients of stage {stage}"
        for stage, count in moment.deferred
    ]
    if moment.in_backward is not None:
        memory = stages[moment.in_backward]
        again = max((layer.again_bytes for layer in memory.layers), default=0)
        terms.append(
            f"{memory.backward_bytes(moment.is_split):,} in the backward of stage {moment.in_backward} (one layer made "
            f"again is {again:,})"
        )
    plan = job.plan
    return (
        f"plan.memory_limit_gib {plan.memory_limit_gib:g} is {int(plan.memory_limit_gib * GIB):,} bytes, and pipeline "
        f"rank {rank} holds {most:,} of activations even if every layer keeps its input alone: {' + '.join(terms)}; "
        f"set it to at least {math.ceil(most / GIB * 1e4) / 1e4:g}, lower plan.microbatch_size {plan.microbatch_size}, "
        f"or use a schedule that holds fewer microbatches"
    )


def _described(stage: int, memory: StageMemory) -> str:
    layers = sum(layer.kept_bytes for layer in memory.layers)
    ends = memory.documents_bytes + memory.embedding_bytes + memory.head_bytes
    return f"{memory.kept_bytes:,} of stage {stage} (inputs of {len(memory.layers)} layers {layers:,}, ends {ends:,})"
