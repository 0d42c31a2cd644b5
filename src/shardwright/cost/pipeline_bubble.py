"""What a schedule costs by closed form: how long a rank idles in a step, and how many microbatches it keeps alive.

Of all schedules of `plan.schedule` that drain, for equal stages and free communication, in F, I and W: forward, input
gradient and weight gradient of a microbatch through all layers of a rank. Where a paper gives a formula for F = I = W
only, the others are the lengths of the other paths through the program that can be the longest, as `schedule/timing.py`
finds them. The steps of zb-h2 and zb-v begin before all ranks have ended the one before, as in their paper; the bubble
is that of a step among others (Qi et al. 2024, arXiv 2401.10241, section 4). Elementwise.
"""

import numpy as np

from shardwright.config.plan import sums_by_run
from shardwright.workload.arrays import Numbers
from shardwright.workload.query import PlanGrid

ALTERNATING = ("zb-v", "v-half", "v-min", "dualpipev")  # a rank's two stages take turns with every microbatch


def puts_weights_off(schedule: str) -> bool:
    """Whether weight gradients are computed apart from the input gradients of their microbatch, as most are."""
    return schedule == "auto" or schedule.startswith(("zb-", "v-"))


def are_put_off(cut: PlanGrid) -> Numbers:
    """Which plans compute weight gradients apart from the input gradients of their microbatch, 1 or 0."""
    if len(cut.schedules) == 1:
        return 1.0 * puts_weights_off(cut.schedules[0][0])
    return cut.by_schedule(lambda name, at: np.full(len(cut.pp[at]), 1.0 * puts_weights_off(name)))


def gathers_for_a_pass(cut: PlanGrid) -> tuple[Numbers, Numbers]:
    """How often ZeRO-3 (gathers parameters for one pass of a microbatch, scatters gradients for its backward): once
    where layers are gathered as they come; in a pipeline whole stages are, for a stretch of passes."""
    p, m, v = cut.pp, cut.num_microbatches, cut.virtual

    def gathers(name: str, p: Numbers, m: Numbers, v: Numbers) -> Numbers:
        return np.where(p > 1, num_gathers(name, p, m, v) / (2.0 * m), 1.0)

    def scatters(name: str, p: Numbers, m: Numbers, v: Numbers) -> Numbers:
        return np.where(p > 1, num_reductions(name, p, m, sums_by_run(name, v, cut.reduce_each)) / (1.0 * m), 1.0)

    if len(cut.schedules) == 1:
        name = cut.schedules[0][0]
        return gathers(name, p, m, v), scatters(name, p, m, v)
    return (
        cut.by_schedule(lambda name, at: gathers(name, p[at], m[at], v[at])),
        cut.by_schedule(lambda name, at: scatters(name, p[at], m[at], v[at])),
    )


def in_flight(schedule: str, p: Numbers, rank: Numbers, m: Numbers, v: Numbers, extra_warmup: Numbers = 0) -> Numbers:
    """Microbatches whose activations of all its layers a pipeline rank keeps at once.

    Exact for m >= 2p; of zb-v with fewer it is that of the rank which keeps most. A rank of dualpipe has twice the
    layers, and each microbatch meets half of them.
    """
    if schedule in ("gpipe", "looped-bfs"):
        alive = 1.0 * m
    elif schedule == "sequential":
        alive = 1.0 * np.minimum(1, m)
    elif schedule == "interleaved-1f1b":
        group = p + m % p  # the first takes the rest
        alive = np.minimum(m * v, 2 * (p - 1 - rank) + (v - 1) * group + 1) / v
    elif schedule in ("zb-h1", "zb-v"):
        alive = 1.0 * np.minimum(m, p)
    elif schedule == "zb-h2":
        alive = 1.0 * np.minimum(m, 2 * p - 1)
    elif schedule == "v-half":
        alive = 1.0 * np.minimum(m, (p + 2) // 2)
    elif schedule == "v-min":
        alive = 1.0 * np.minimum(m, (p + 4) // 3)
    elif schedule == "dualpipe":
        alive = np.minimum(m, p + 1) / 2
    elif schedule == "dualpipev":
        alive = np.minimum(2 * m, 2 * p + 1) / 2
    else:
        alive = 1.0 * np.minimum(m, p - rank + np.minimum(extra_warmup, p - 1 - rank))
    return np.where(p == 1, 1.0, alive)


def in_flight_split(schedule: str, p: Numbers, rank: Numbers, m: Numbers) -> tuple[Numbers, Numbers]:
    """Microbatches whose activations a pipeline rank keeps, and those that wait for their weight gradients alone, when
    most of them wait; of all its layers. (0, 0) for schedules in which none waits long.

    Of v-half and v-min about those of the ranks on which most wait. What a microbatch leaves for its weight gradients
    may be more than what it keeps, where that is computed again; so either moment may be the peak.
    """
    if schedule == "zb-h1":
        waits = np.minimum(rank, np.maximum(0, m - 1))
        kept = np.minimum(p - rank, m - waits)
    elif schedule == "zb-h2":
        waits = np.minimum(2 * rank, np.maximum(0, m - 1))
        kept = np.minimum(2 * (p - 1 - rank) + 1, m - waits)
    elif schedule == "zb-v":
        waits = np.minimum(rank, m - 1) * (m > p)
        kept = np.minimum(p - rank, m) / 2
    elif schedule in ("v-half", "v-min"):
        half = np.where(p == 2, 3, np.maximum(1, p // 4))  # of stages, of which a rank has two
        waits = (half if schedule == "v-half" else np.where(p < 8, 1, 2)) / 2 + 0 * rank
        kept = in_flight(schedule, p, rank, m, 2) - waits
    elif schedule == "dualpipe":
        waits = np.minimum(rank, p - 1 - rank) / 2
        kept = p / 4 - waits
    elif schedule == "dualpipev":
        waits, kept = rank / 2, (p - rank) / 2
    else:
        waits = kept = 0.0 * (p + rank + m)
    return np.where(p == 1, 0.0, kept), np.where(p == 1, 0.0, waits)


def num_reductions(schedule: str, p: Numbers, m: Numbers, by_run: Numbers) -> Numbers:
    """How often a rank reduces all of its gradients in a step where they are sharded (ZeRO-2): they can't wait whole.

    That is with each microbatch, or `by_run`, after each stretch of backwards of one stage (config/plan.py): every p
    microbatches where a rank passes through its stages in turn, with almost every microbatch where two stages
    alternate, once where it has one stage or stays with each until its last microbatch.
    """
    among: Numbers = 1.0
    if schedule == "interleaved-1f1b":
        among = np.ceil(m / p)
    elif schedule in ALTERNATING:
        among = 1.0 * m
    return np.where(by_run, among, m)


def num_gathers(schedule: str, p: Numbers, m: Numbers, v: Numbers) -> Numbers:
    """About how often the mean rank of a pipeline gathers all of its parameters in a step where they are sharded
    (ZeRO-3): once for each stretch of work on one stage (schedule/lowering/zero3_gathers.py).

    A rank with one stage has one stretch, and one that stays with each stage for all microbatches two, of which the
    last forward and the first backward are one. Where stages take turns, every second computation is of the other.
    """
    if schedule == "looped-bfs":
        return 2.0 - 1.0 / v + 0.0 * m
    if schedule == "interleaved-1f1b":
        turned = np.minimum(m * v, p - 1 + (v - 1) * p)  # computed before forwards and backwards take turns
        in_turns = 2 * (m * v - turned) * (1.0 - 1.0 / v)
        return np.maximum(1.0, (in_turns + 2 * turned / p) / v)
    if schedule == "dualpipe":
        return np.minimum(m, 1.25 + 0.6 * p)
    if schedule == "dualpipev":
        return np.minimum(m, 1.25 + 1.22 * p)
    if schedule in ALTERNATING:
        return m + 0.5
    return np.where((schedule == "auto") & (v > 1), 1.0 * m, 1.0)


def bubble(schedule: str, p: Numbers, m: Numbers, v: Numbers, f: Numbers, i: Numbers, w: Numbers) -> Numbers:
    """How long each rank idles in a step, in the unit of F, I and W. ValueError if there is no formula."""
    b = i + w
    if schedule in ("1f1b", "gpipe"):
        return (p - 1) * (f + b)
    if schedule == "sequential":
        return m * (p - 1) * (f + b)
    if schedule in ("interleaved-1f1b", "looped-bfs"):
        # With fewer microbatches than ranks, each waits at the end of the loop until the first has come round.
        return (p - 1 + (v - 1) * np.maximum(0, p - m)) * (f + b) / v
    if schedule == "zb-h1":
        return (p - 1) * _longest(f + i - w, i, f)
    if schedule == "zb-h2":
        filled = np.clip(m - 1, 0, 2 * (p - 1))  # weight gradients that there are to fill the wait
        turned = np.where(f > i, filled // 2, 0)  # the longest way through both passes takes the dearer where it may
        # Of an odd number of them one is left over, between a forward and an input gradient.
        left_over = np.where(f > i, filled % 2, 0) * np.maximum(0.0, f - w)
        through = (p - 1 - filled + turned) * f + (p - 1 - turned) * i + left_over
        return _longest((p - 1) * (f + i) - filled * w, through, 0.0 * f)
    if schedule == "zb-v":
        filled = np.clip(m - p, 0, p - 1)
        return _longest((p - 1) * i - filled * w, (p - 1) * (f - b / 2), 0.0 * f)
    if schedule == "v-half":
        return _v_half(p, m, f, i, w)
    if schedule == "v-min":
        return _v_min(p, m, f, i, w)
    if schedule in ("dualpipe", "dualpipev"):
        turns = p / 2 - 1 if schedule == "dualpipe" else (p - 1) / 2
        from_turn = np.maximum(0, 2 * turns - p / 2) if schedule == "dualpipev" else np.maximum(0, turns - 1)
        return _longest(turns * (2 * f + i - w), from_turn * f + turns * (2 * i - w), 2 * turns * f)
    raise ValueError(f"schedule {schedule!r} has no formula for its bubble; simulate it")


def _longest(*paths: Numbers) -> Numbers:
    found = paths[0]
    for path in paths[1:]:
        found = np.maximum(found, path)
    return found


def _v_half(p: Numbers, m: Numbers, f: Numbers, i: Numbers, w: Numbers) -> Numbers:
    """Qi et al. 2024 (arXiv 2405.15362) say about half of 1F1B's; the first path grows with m where 2I > F + W.

    Within 2 % of a step of what is played for even p >= 4 and m >= p, 10 % for others.
    """
    longest = _longest(
        (p - m) * f + (m + p - 3) * i - (m / 2 + p / 4 + 0.5) * w,
        (p - 0.5) * f + (p - 2.5) * i - (p + 1) / 2 * w,
        (p / 2 - 1.5) * f + 1.5 * (p - 1) * i - (p + 1) / 2 * w,
        (p / 2 - 2) * f + 1.5 * (p - 1) * i - p / 2 * w,
        (p / 2 - 1.5) * f + (7 / 8 * p - 1) * i,
    )
    return np.maximum(0.0, longest + np.where(p % 2, 0.5 * (f + i + w), 0.0))


def _v_min(p: Numbers, m: Numbers, f: Numbers, i: Numbers, w: Numbers) -> Numbers:
    """Qi et al. 2024 (arXiv 2405.15362) say about two thirds of 1F1B's. It has no slack: wherever F, I and W differ one
    of the first two paths grows with m. Within 4 % of a step of what is played for p >= 3 and m >= p.
    """
    thirds = 0.5 * (p % 3 == 0)
    equal = 2 * p - 2.5 - thirds  # what it is where F = I = W = 1
    n = m * np.minimum(1, (p - 1) / 2)
    return np.maximum(
        0.0,
        _longest(
            (p - n) * f + (2 * n + equal - thirds - p - 0.5) * i + (0.5 - n) * w,
            (2 * n - 2) * f + (equal + 1 - n) * i - (n - 1) * w,
            (p / 2 + 1) * f + (equal - p / 2) * i - w,
        ),
    )
