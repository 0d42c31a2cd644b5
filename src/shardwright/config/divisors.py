"""Divisors of a number, and words for those that are a way out of a fault."""

import math

from shardwright.config.phrase import either


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def nearest_divisors(number: int, target: int) -> str:
    """The divisors of `number` just below and above `target`, in words: the way out of most faults."""
    legal = divisors(number)
    lower = [d for d in legal if d <= target][-1:]
    higher = [d for d in legal if d > target][:1]
    return either([str(d) for d in lower + higher])


def all_divisors(number: int, most: int = 8) -> str:
    """The first `most` divisors of `number` in words: "1, 2, 4 or 8"."""
    return either([str(d) for d in divisors(number)[:most]])
