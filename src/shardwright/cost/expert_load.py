"""Rows of the rank whose experts get most, over those of the mean rank: all others wait for it."""

import math
from functools import lru_cache
from math import comb

import numpy as np

from shardwright.config.section_shapes import ExpertShape
from shardwright.layers.arrays import Numbers

_EXPERTS_A_CHOICE = 16.0  # 128 experts and 8 choices: the mixture whose spread was measured (docs/measured-runs.md)


def fullest_load(mixture: ExpertShape, ep: Numbers, spread: Numbers) -> Numbers:
    """Rows of the fullest of `ep` ranks over the mean, by how the mixture's tokens are routed.

    Routing that a benchmark forces is even. A rule of balance leaves experts a relative deviation, which the experts of
    one rank even out; the largest of n normal numbers is sqrt(2 log n) deviations above their mean. The deviation is
    `spread` if a token takes one expert in 16. If it takes k of n, the share of an expert has the variance of choices
    at random, relative to its square: it is in proportion to n / k - 1.
    Without a rule the gate sends nearly all tokens to the same `topk` experts (Shazeer et al. 2017, arXiv 1701.06538,
    section 4; docs/experts.md: 3.6 times the mean of at most 4), which fall on ranks by chance. Experts with a capacity
    take no more than that.
    """
    if mixture.routing in ("forced", "in-turn"):
        return 1.0
    if mixture.routing == "free":
        return np.vectorize(_collapsed_load)(ep, mixture.num, mixture.topk)
    local = np.maximum(1.0, mixture.num / np.asarray(ep))
    if mixture.routing == "balanced":
        spread = spread * math.sqrt(max(0.0, mixture.num / mixture.topk - 1.0) / (_EXPERTS_A_CHOICE - 1.0))
    return np.minimum(1.0 + spread * np.sqrt(2.0 * np.log(ep) / local), max(1.0, mixture.most_load))


def spread_by_bias(lasting: float, of_text: float, sequences: Numbers) -> Numbers:
    """Relative deviation of an expert's rows over `sequences` that ranks compute at once, if biases of the gate follow
    loads (Wang et al. 2024, arXiv 2408.15664).

    Biases even out what lasts, to a relative deviation of `lasting` over all data, and not what one sequence is about:
    within texts of a kind experts deviate by `of_text`, which sequences of many kinds even out.
    """
    return np.sqrt(lasting**2 + of_text**2 / np.maximum(1.0, sequences))


@lru_cache(maxsize=256)
def _collapsed_load(ep: int, num: int, topk: int) -> float:
    """Expected rows of the fullest of `ep` ranks over the mean, if all tokens choose the same experts at random."""
    local, choices = max(1, num // ep), comb(num, topk)
    expected = 0.0
    for most in range(topk):  # the sum over m of the chance that the fullest rank has more than m of them
        held = np.array([float(comb(local, count)) for count in range(most + 1)])
        ways = np.ones(1)
        for _ in range(ep):
            ways = np.convolve(ways, held)[: topk + 1]
        expected += 1.0 - (ways[topk] / choices if ways.size > topk else 0.0)
    return expected * ep / topk
