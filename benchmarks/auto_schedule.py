"""Schedules made to measure against the best named one in the same memory, over 200 random models.

    python benchmarks/auto_schedule.py

Stages are unlike each other, F != I != W, messages take time. 50 models for each limit of memory; every schedule, named
or built, is timed by the same clock. "Gain" is how much longer the best named schedule takes, "above bound" how
much longer than lower_bound.py's lower bound the built one is. The same numbers come out on any machine, but for the
last column. About six minutes on one core.
"""

from collections.abc import Callable
from random import Random
from statistics import mean, median
from time import perf_counter

from shardwright.schedule.schedule import Schedule
from shardwright.schedule.solver.auto import auto, lower_bound
from shardwright.schedule.solver.auto_model import Model, by_stage, fits, named_schedules, step_time
from shardwright.schedule.solver.lower_bound import Objective
from shardwright.schedule.timing import Costs

MODELS_PER_LIMIT = 50
LIMITS: dict[str, Callable[[int], float | None]] = {
    "(p + 4) / 3, as V-Min": lambda p: (p + 4) // 3,
    "(p + 2) / 2, as V-Half": lambda p: (p + 2) // 2,
    "p, as 1F1B and ZB-V": lambda p: p,
    "none": lambda p: None,
}
HEADER = ("memory limit", "gain, mean", "median", "max", "strict wins", "above bound, mean", "median", "s, mean")


def random_costs(random: Random, num_pieces: int) -> Costs:
    """Pieces that differ by up to 30 percent either way, the last one heavier: it has the head."""
    sizes = [random.uniform(0.7, 1.3) for _ in range(num_pieces)]
    sizes[-1] += random.uniform(0, 0.5)

    def times(factor: float) -> tuple[float, ...]:
        return tuple(factor * size * random.uniform(0.9, 1.1) for size in sizes)

    forward, input_grad, weight_grad = times(1.0), times(random.uniform(0.8, 1.4)), times(random.uniform(0.6, 1.1))
    return Costs(forward, input_grad, weight_grad, latency=random.choice((0.0, 0.05, 0.2)))


def compare(
    random: Random, limit_of: Callable[[int], float | None], objective: Objective, stages_per_rank: int | None
) -> tuple[float, float, float]:
    """Gain over the best named schedule, distance from the bound, seconds."""
    p = random.choice((4, 8))
    m, costs, limit = random.choice((2, 4)) * p, random_costs(random, 2 * p), limit_of(p)

    def time(schedule: Schedule) -> float:
        return step_time(schedule, by_stage(costs, schedule.num_stages), objective)

    began = perf_counter()
    model = Model(p, m, costs, limit, stages_per_rank=stages_per_rank)
    built = auto(model, objective)
    seconds = perf_counter() - began
    built_time = time(built)
    named_time = min(
        time(schedule)
        for _, schedule in named_schedules(p, m, 2 * p, stages_per_rank)
        if limit is None or fits(schedule, (p / schedule.num_stages,) * schedule.num_stages, (limit,) * p)
    )
    bound = lower_bound(model, objective)
    return named_time / built_time - 1, built_time / bound - 1, seconds


def row(name: str, results: list[tuple[float, float, float]]) -> str:
    """A line of the table."""
    gains, gaps, seconds = zip(*results, strict=True)
    wins = sum(gain > 1e-6 for gain in gains) / len(gains)
    cells = (mean(gains), median(gains), max(gains), wins, mean(gaps), median(gaps))
    texts = [f"{100 * cell:.0f}%" if cell is wins else f"{100 * cell:.1f}%" for cell in cells]
    return f"| {name} | " + " | ".join(texts) + f" | {mean(seconds):.2f} |"


def table(title: str, objective: Objective, stages_per_rank: int | None = None) -> None:
    """All limits under one objective."""
    print(f"\n{title}\n\n| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER), flush=True)
    everything = []
    for number, (name, limit_of) in enumerate(LIMITS.items()):
        if stages_per_rank == 1 and number < 2:
            continue  # nothing but running one microbatch at a time fits
        random = Random(number)
        results = [compare(random, limit_of, objective, stages_per_rank) for _ in range(MODELS_PER_LIMIT)]
        print(row(name, results), flush=True)
        everything += results
    print(row("all", everything), flush=True)


if __name__ == "__main__":
    table("Makespan, one or two stages a rank", "makespan")
    table("Period of steps back to back, one or two stages a rank", "period")
    table("Makespan, one stage a rank", "makespan", stages_per_rank=1)
