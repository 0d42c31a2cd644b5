"""Shares of a token's copies that are sent where several of its experts are in one place, which gets one copy."""

import numpy as np

from shardwright.config.section_shapes import ExpertShape
from shardwright.layers.arrays import Numbers


def copies_to(mixture: ExpertShape, places: Numbers, reach: float = 1.0) -> Numbers:
    """The share of a token's copies that is sent if each of so many `places`, which share the experts, gets one. A
    token goes to at most the share `reach` of them."""
    if mixture.routing == "in-turn":
        return copies_in_turn(mixture.topk, np.maximum(1, mixture.num // places))
    return copies_sent(mixture.topk, np.maximum(1, reach * places))


def copies_sent(topk: int, domains: Numbers) -> Numbers:
    """The share of a token's `topk` copies that is sent if a domain with several of its experts gets one copy; the same
    of ranks, if a rank gets one.

    With evenly chosen experts a token goes to domains x (1 - (1 - 1 / domains)^topk) domains.
    """
    return domains * (1 - (1 - 1 / domains) ** topk) / topk


def copies_in_turn(topk: int, experts: Numbers) -> Numbers:
    """The share of a token's `topk` copies that is sent if each group of so many `experts` gets one, and each token the
    next experts in their order.

    Tokens begin at multiples of `topk`, so as often at each multiple of what that has in common with a group's size.
    The last of a token's experts is topk - 1 places behind its first, and crosses a border to the next group as often
    as such a way does.
    """
    common = np.gcd(topk, np.asarray(experts, dtype=np.int64))
    return (1 + (topk - common) / experts) / topk
