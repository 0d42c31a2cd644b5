"""Gates and balance rules once more, token by token in plain Python and float64.

model/gates, model/capacity.py and model/balance.py are held against these. Nothing is shared with them but the
description and the random numbers.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from shardwright.config.moe import MoeSpec

BIASED = ("sigmoid", "biased-softmax")  # gates that add a bias to scores for the choice
NORMALISING = ("softmax", *BIASED, "correlation")  # gates whose weights may be divided by their sum


@dataclass
class Routed:
    """Of each token: experts and weights of its choices in order, those that it gave up by a draw too in `considered`;
    and preferences, None where it may not go. `weighed` are the experts among which weights were divided, once it is
    known who has room; empty until then."""

    considered: list[list[int]]
    experts: list[list[int]]
    weights: list[list[float]]
    preferences: list[list[float | None]]
    weighed: list[list[int]] = field(default_factory=list)


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    exponentials = [math.exp(x - top) for x in logits]
    return [e / sum(exponentials) for e in exponentials]


def scores_of(spec: MoeSpec, logits: list[float]) -> list[float]:
    if spec.gate == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in logits]
    return softmax(logits)


def in_12_bits(x: float) -> float:
    """The number that tokens are compared by: those that differ by rounding alone are equal."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(mantissa * 4096), exponent)


def ranked(preferences: list[float | None]) -> list[int]:
    """Experts from the most preferred to the least; those that may not be chosen are left out."""
    known = [(-p, e) for e, p in enumerate(preferences) if p is not None]
    return [e for _, e in sorted(known)]


def in_groups(spec: MoeSpec, preferences: list[float]) -> list[float | None]:
    size = spec.experts // spec.num_groups
    values = []
    for group in range(spec.num_groups):
        best = sorted(preferences[group * size : (group + 1) * size], reverse=True)
        values.append(best[0] if spec.group_score == "max" else best[0] + best[1])
    kept = sorted(range(spec.num_groups), key=lambda g: (-values[g], g))[: spec.groups_kept]
    return [p if e // size in kept else None for e, p in enumerate(preferences)]


def partners_of(first: int, spec: MoeSpec, together: list[list[float]]) -> set[int]:
    counts = [(-count, e) for e, count in enumerate(together[first]) if e != first]
    if not any(count for count, _ in counts):
        return set(range(spec.experts))
    return {first} | {e for _, e in sorted(counts)[: spec.num_partners]}


def weights_of(spec: MoeSpec, logits: list[float], experts: list[int]) -> list[float]:
    scores = scores_of(spec, logits)
    if spec.softmax_over == "chosen":
        weights = softmax([logits[e] for e in experts])
    else:
        weights = [scores[e] for e in experts]
        if spec.gate == "gshard" or (spec.gate in NORMALISING and spec.normalise):
            weights = [w / sum(weights) for w in weights]
    return [w * spec.routed_scaling for w in weights]


def route(
    spec: MoeSpec, logits: list[list[float]], bias: list[float], together: list[list[float]], draws: list[float] | None
) -> Routed:
    """The choices of a microbatch, before there is any lack of room."""
    if spec.gate == "expert-choice":
        return _experts_choose(spec, logits)
    result = Routed([], [], [], [])
    for t, row in enumerate(logits):
        scores = scores_of(spec, row)
        preferences: list[Any] = [s + b for s, b in zip(scores, bias, strict=True)] if spec.gate in BIASED else scores
        if spec.num_groups > 1:
            preferences = in_groups(spec, preferences)
        if spec.gate == "correlation":
            allowed = partners_of(ranked(preferences)[0], spec, together)
            preferences = [p if e in allowed else None for e, p in enumerate(preferences)]
        experts = ranked(preferences)[: spec.num_chosen]
        weights = weights_of(spec, row, experts)
        result.considered.append(experts)
        if spec.gate == "gshard" and draws is not None and not 2 * weights[1] / spec.routed_scaling > draws[t]:
            experts, weights = experts[:1], weights[:1]
        result.experts.append(experts)
        result.weights.append(weights)
        result.preferences.append(preferences)
    return result


def _experts_choose(spec: MoeSpec, logits: list[list[float]]) -> Routed:
    scores = [scores_of(spec, row) for row in logits]
    capacity = math.ceil(len(logits) * spec.num_chosen * (spec.capacity_factor or 1.0) / spec.experts)
    experts: list[list[int]] = [[] for _ in logits]
    for e in range(spec.experts):
        for t in sorted(range(len(logits)), key=lambda t: (-in_12_bits(scores[t][e]), t))[:capacity]:
            experts[t].append(e)
    weights = [[scores[t][e] * spec.routed_scaling for e in chosen] for t, chosen in enumerate(experts)]
    return Routed(experts, experts, weights, [list(row) for row in scores])


def with_room(spec: MoeSpec, logits: list[list[float]], routed: Routed) -> list[dict[int, float]]:
    """Weight by expert of each token, once there is only so much room."""
    tokens = range(len(logits))
    routed.weighed = routed.considered
    if not spec.capacity_factor or spec.gate == "expert-choice":
        return [dict(zip(routed.experts[t], routed.weights[t], strict=True)) for t in tokens]
    room = [max(1, math.ceil(len(logits) * spec.num_chosen * spec.capacity_factor / spec.experts))] * spec.experts
    choices = [(k, t) for k in range(spec.num_chosen) for t in tokens if k < len(routed.experts[t])]
    if spec.overflow == "reroute":
        return _rerouted(spec, logits, routed, room, choices)
    if spec.overflow == "drop-probability":
        choices.sort(key=lambda c: (-in_12_bits(routed.weights[c[1]][c[0]]), c[1], c[0]))
    result: list[dict[int, float]] = [{} for _ in tokens]
    for k, t in choices:
        expert = routed.experts[t][k]
        if room[expert]:
            room[expert] -= 1
            result[t][expert] = routed.weights[t][k]
    return result


def _rerouted(
    spec: MoeSpec, logits: list[list[float]], routed: Routed, room: list[int], choices: list[tuple[int, int]]
) -> list[dict[int, float]]:
    asked = [list(experts) for experts in routed.considered]  # of each choice the expert that it asks now
    reserves = [
        [e for e in ranked(preferences) if e not in experts]
        for preferences, experts in zip(routed.preferences, routed.considered, strict=True)
    ]
    seated, looking = set(), list(choices)
    while looking:
        refused = []
        for k, t in looking:
            if room[asked[t][k]]:
                room[asked[t][k]] -= 1
                seated.add((k, t))
            else:
                refused.append((k, t))
        looking = []
        for t in range(len(logits)):
            for k in sorted(k for k, other in refused if other == t):
                if reserves[t]:
                    asked[t][k] = reserves[t].pop(0)
                    looking.append((k, t))
        looking.sort()
    routed.weighed = asked
    results: list[dict[int, float]] = []
    for t, row in enumerate(logits):
        weights = weights_of(spec, row, asked[t])
        results.append({e: w for k, (e, w) in enumerate(zip(asked[t], weights, strict=True)) if (k, t) in seated})
    return results


def losses_of(
    spec: MoeSpec, logits: list[list[float]], routed: Routed, samples: list[int], shares: list[float]
) -> tuple[float, float]:
    """Balance loss and z-loss of a microbatch whose token t is of sample samples[t], each sample weighed by its
    tokens. Tokens that fill samples up are not among them."""
    E, T = spec.experts, len(logits)
    z = spec.z_coefficient * sum(math.log(sum(math.exp(x) for x in row)) ** 2 for row in logits) / T
    if spec.aux_loss == "none":
        return 0.0, z
    by_sample = [[t for t in range(T) if samples[t] == b] for b in sorted(set(samples))]
    groups = by_sample if spec.aux_scope == "sequence" else [list(range(T))]
    total = 0.0
    for group in groups:
        for e in range(E):
            if spec.aux_scope == "global":
                share = shares[e]
            elif spec.aux_loss == "gshard":
                share = sum(routed.experts[t][0] == e for t in group) / len(group)
            else:
                share = sum(e in routed.experts[t] for t in group) / (len(group) * spec.num_chosen)
            likelihoods = [scores_of(spec, logits[t]) for t in group]
            mean = sum(scores[e] / sum(scores) for scores in likelihoods) / len(group)
            total += share * mean * len(group) / T
    return total * spec.aux_coefficient * (1 / E if spec.aux_loss == "gshard" else E), z
