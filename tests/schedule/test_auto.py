"""Schedules made to measure: right, never worse than a named one, often better, and how near to the best possible."""

from dataclasses import dataclass
from itertools import product
from math import inf
from random import Random

import pytest

from shardwright.config.load import make_job
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.schedule.action import Kind
from shardwright.schedule.buffer_lifetimes import peak_activations
from shardwright.schedule.generators.zb_v import zb_v
from shardwright.schedule.job_program import job_program
from shardwright.schedule.lowering.lower import lower
from shardwright.schedule.program_check import program_faults
from shardwright.schedule.schedule import Schedule
from shardwright.schedule.solver.auto import auto, lower_bound
from shardwright.schedule.solver.auto_model import Model, by_stage, fits, named_schedules, runs, step_time
from shardwright.schedule.solver.greedy import Policy, construct
from shardwright.schedule.solver.lower_bound import Objective, placement_bound
from shardwright.schedule.solver.problem import Problem, Rows
from shardwright.schedule.timing import Costs, play
from shardwright.sharding.stage_placement import in_line, looped, vee

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Case:
    """A question for `auto`."""

    num_ranks: int
    num_microbatches: int
    costs: Costs
    most_alive: float | tuple[float, ...] | None
    activations: tuple[float, ...]
    objective: Objective

    @property
    def model(self) -> Model:
        return Model(self.num_ranks, self.num_microbatches, self.costs, self.most_alive, self.activations)

    def solve(self, effort: float) -> Schedule:
        return auto(self.model, self.objective, effort)

    def bound(self) -> float:
        return lower_bound(self.model, self.objective)

    def time(self, schedule: Schedule) -> float:
        return step_time(schedule, by_stage(self.costs, schedule.num_stages), self.objective)

    def fits(self, schedule: Schedule) -> bool:
        pieces, p = len(self.costs.forward), self.num_ranks
        sizes = runs(self.activations or (p / pieces,) * pieces, schedule.num_stages)
        limit = inf if self.most_alive is None else self.most_alive
        return fits(schedule, sizes, limit if isinstance(limit, tuple) else (limit,) * p)

    def best_named(self) -> float:
        names = named_schedules(self.num_ranks, self.num_microbatches, len(self.costs.forward))
        return min((self.time(schedule) for _, schedule in names if self.fits(schedule)), default=inf)


def random_costs(random: Random, num_pieces: int, unevenness: float) -> Costs:
    """F != I != W, stages unlike each other and sometimes a heavy last one, messages with latency and size."""
    sizes = [random.uniform(1 - unevenness, 1 + unevenness) for _ in range(num_pieces)]
    sizes[-1] += random.choice((0.0, random.uniform(0, 1)))
    kinds = [
        tuple(mean * size * random.uniform(0.9, 1.1) for size in sizes)
        for mean in (1.0, random.uniform(0.7, 1.5), random.uniform(0.5, 1.2))
    ]
    transfer = random.choice(((), (), (random.choice((0.05, 0.2)),) * (num_pieces - 1)))
    reduce = random.choice(((), (), tuple(random.uniform(0, 1) for _ in sizes)))
    latency, step = random.choice((0.0, 0.0, 0.1, 0.5)), random.choice((0.0, 0.0, 0.7))
    return Costs(*kinds, transfer=transfer, latency=latency, reduce=reduce, step=step)


def random_case(random: Random, ranks: tuple[int, ...] = (2, 3, 4), microbatches: range = range(4, 13)) -> Case:
    p, m = random.choice(ranks), random.choice(microbatches)
    pieces = 2 * p
    most_alive: float | tuple[float, ...] | None = random.choice((None, p, p, (p + 2) // 2, 2 * p - 1, 0.75 * p + 0.5))
    activations: tuple[float, ...] = ()
    if random.random() < 0.2:
        activations = tuple(random.uniform(0.3, 0.7) for _ in range(pieces))
    if most_alive is not None and random.random() < 0.2:
        most_alive = tuple(most_alive + random.choice((0.5, 1, 2)) for _ in range(p))
    objective: Objective = random.choice(("makespan", "makespan", "period"))
    costs = random_costs(random, pieces, random.choice((0.0, 0.1, 0.3, 0.6)))
    return Case(p, m, costs, most_alive, activations, objective)


def check(case: Case, schedule: Schedule) -> float:
    """All that must hold of any answer; how much longer the best named schedule takes."""
    assert program_faults(lower(schedule)) == []
    assert case.fits(schedule)
    time, named = case.time(schedule), case.best_named()
    assert time <= named
    assert time >= case.bound() * (1 - 1e-9)
    for row in schedule.ranks:  # each stage sums gradients in the order of the microbatches
        seen: dict[tuple[Kind, int], int] = {}
        for part in (part for action in row for part in action.computes()):
            kind = Kind.INPUT_GRAD if part.kind is Kind.BACKWARD else part.kind
            assert seen.get((kind, part.stage), -1) < part.microbatch
            seen[kind, part.stage] = part.microbatch
    return named / time


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(5))
def test_right_and_never_worse_than_the_best_named_one(seed: int) -> None:
    """5 times 10 questions."""
    random = Random(seed)
    gains = []
    for _ in range(10):
        case = random_case(random)
        gains.append(check(case, case.solve(effort=0.15)))
    assert sum(gain > 1 + 1e-6 for gain in gains) >= 5


@pytest.mark.parametrize("objective", ["makespan", "period"])
def test_larger(objective: Objective) -> None:
    random = Random(1)
    case = Case(8, 24, random_costs(random, 16, 0.3), 8, (), objective)
    assert check(case, case.solve(effort=0.5)) > 1.005


UNIFORM = [(2, 8), (4, 8), (4, 16), (8, 16)]


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), UNIFORM)
def test_zero_bubble_where_it_is_known_to_exist(num_ranks: int, num_microbatches: int) -> None:
    """F = I = W: the schedules of the papers attain the bound, so does this, and neither is beaten."""
    p, m = num_ranks, num_microbatches
    costs = Costs.uniform(2 * p, 0.5, 0.5, 0.5)

    def idle(most_alive: float | None, stages_per_rank: int, objective: Objective = "makespan") -> float:
        model = Model(p, m, costs, most_alive, stages_per_rank=stages_per_rank)
        result = auto(model, objective)
        time = step_time(result, by_stage(costs, result.num_stages), objective)
        bound = lower_bound(model, objective)
        assert time == pytest.approx(bound)
        assert program_faults(lower(result)) == []
        return time - 3 * m

    assert idle(None, 1) == pytest.approx(p - 1)  # ZB-H2
    assert idle(p, 1) == pytest.approx(p - 1)  # ZB-H1
    assert idle(p, 2) == pytest.approx((p - 1) / 2)  # ZB-V
    assert idle(2 * p - 1, 1, "period") == pytest.approx(0)  # ZB-H2
    assert idle(p, 2, "period") == pytest.approx(0)  # ZB-V


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_v_half_is_the_best_there_is_in_its_memory(num_ranks: int) -> None:
    p, m = num_ranks, 2 * num_ranks
    costs = Costs.uniform(2 * p)
    bound = placement_bound(Model(p, m, costs, (p + 2) // 2, (), 2).problem(vee(p)))
    result = auto(Model(p, m, costs, (p + 2) // 2))
    assert step_time(result, costs) == pytest.approx(bound)


@pytest.mark.parametrize("seed", range(6))
def test_near_the_bound_where_memory_is_no_limit(seed: int) -> None:
    random = Random(seed)
    p = random.choice((2, 3, 4))
    case = Case(p, 4 * p, random_costs(random, 2 * p, 0.3), None, (), "makespan")
    assert case.time(case.solve(effort=0.5)) <= 1.05 * case.bound()


def every_order(num_stages: int, stage: int, m: int) -> list[list[int]]:
    """All ways to order the operations of a stage, with microbatches in order."""
    results = []

    def extend(row: list[int], counts: tuple[int, ...]) -> None:
        if len(row) == 3 * m:
            results.append(row)
        for kind in range(3):
            if counts[kind] < (m, counts[0], counts[1])[kind]:
                op = (kind * num_stages + stage) * m + counts[kind]
                extend([*row, op], tuple(count + (n == kind) for n, count in enumerate(counts)))

    extend([], (0, 0, 0))
    return results


@pytest.mark.parametrize("seed", range(8))
def test_optimal_where_all_orders_can_be_tried(seed: int) -> None:
    random = Random(seed)
    p, m, most_alive = 2, 3, random.choice((1, 2, 3))
    costs = random_costs(random, p, 0.5)
    problem = Problem(in_line(p), m, costs, (1.0,) * p, (most_alive,) * p)
    orders = [[row for row in every_order(p, s, m) if problem.fits(s, row)] for s in range(p)]
    clocks = [problem.run(list(rows)) for rows in product(*orders)]
    best = min(max(clock.free) for clock in clocks if clock is not None)
    assert placement_bound(problem) <= best * (1 + 1e-9)
    assert step_time(auto(Model(p, m, costs, most_alive)), costs) == pytest.approx(best)


def random_policy(random: Random) -> Policy:
    return Policy(
        random.choice((inf, 2.0, 1.0)), random.choice(("backward", "forward", "alternate")), random.random() < 0.5,
        random.random() < 0.5, random.choice((inf, 0.5, 0.0)), random.choice((0.0, 0.5)),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_any_policy_builds_a_right_order_and_the_fast_clock_is_right(seed: int) -> None:
    """Also where just one microbatch fits, and with many stages a rank."""
    random = Random(seed)
    p, m, v = random.randint(1, 5), random.randint(1, 9), random.randint(1, 4)
    placement = {1: in_line(p), 2: random.choice((vee(p), looped(p, 2)))}.get(v, looped(p, v))
    costs = random_costs(random, p * v, 0.5)
    most_alive = random.choice((1, 1, 1.5, 2, p, inf))
    problem = Problem(placement, m, costs, (1 / v,) * (p * v), (most_alive,) * p)
    rows: Rows = construct(problem, random_policy(random))
    schedule = problem.schedule("built", rows)
    program = lower(schedule)
    assert program_faults(program) == []
    assert max(peak_activations(schedule)) / v <= most_alive + 1e-9
    assert problem.rows(schedule) == rows
    clock = problem.run(rows)
    assert clock is not None
    assert max(clock.free) == pytest.approx(play(program, costs).makespan)
    for _ in range(2):
        clock = problem.run(rows, clock.free, clock.links)
        assert clock is not None
    assert max(clock.free) == pytest.approx(play(program, costs, 3).makespan)


def test_all_named_schedules_of_one_kind_compete() -> None:
    """A generator that is added later must compete, too, if it updates once a step and holds the parameters once."""
    competing = {name.split(",")[0] for name, _ in named_schedules(4, 8, 8)}
    asynchronous = {"pipedream", "pipedream-2bw"}
    assert competing == set(SCHEDULES) - asynchronous - {"dualpipe", "auto"}


def test_a_named_one_wins_if_pairs_are_cheap() -> None:
    """Pairs are not built; but never worse holds."""
    costs = Costs((1.0,) * 8, (1.0,) * 8, (1.0,) * 8, pair=0.8)
    case = Case(4, 12, costs, None, (), "makespan")
    result = case.solve(effort=0.1)
    assert check(case, result) == pytest.approx(1)
    assert any(action.kind is Kind.OVERLAP for row in result.ranks for action in row)


def test_without_costs_it_is_for_equal_pieces() -> None:
    result = auto(Model(4, 8))
    assert result.name == "auto"
    assert result.placement == vee(4)
    assert step_time(result, Costs.uniform(8)) <= step_time(zb_v(4, 8), Costs.uniform(8))


def test_the_same_question_has_the_same_answer() -> None:
    costs = random_costs(Random(3), 6, 0.4)
    first = auto(Model(3, 7, costs, 3))
    assert auto(Model(3, 7, costs, 3)) is first  # kept
    auto.cache_clear()
    assert auto(Model(3, 7, costs, 3)) == first


def test_backwards_stay_whole_where_nobody_waits() -> None:
    kinds = {action.kind for row in auto(Model(1, 4)).ranks for action in row}
    assert kinds == {Kind.FORWARD, Kind.BACKWARD}
    # Rank 1 has little to do: its gradients are back long before rank 0 can use them.
    uneven = auto(Model(2, 6, Costs((3.0, 1.0), (3.0, 1.0), (3.0, 1.0))))
    assert any(action.kind is Kind.BACKWARD for action in uneven.ranks[1])


@pytest.mark.parametrize("scale", [1e-6, 1e9])
def test_units_of_time_do_not_matter(scale: float) -> None:
    costs = Costs((1.0, 1.5, 1.0, 2.0), (1.2, 1.6, 1.1, 2.0), (0.9, 1.0, 0.8, 1.7))
    scaled = Costs(*(tuple(scale * x for x in times) for times in (costs.forward, costs.input_grad, costs.weight_grad)))
    time, other = (step_time(auto(Model(2, 6, c, 2)), by_stage(c, 4)) for c in (costs, scaled))
    assert other == pytest.approx(scale * time)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"costs": Costs.uniform(5)}, "costs are of 5 pieces .* give those of 2 pieces"),
        ({"costs": Costs.uniform(6), "stages_per_rank": 2}, "2 ranks with 2 stages each can't share equally"),
        ({"costs": Costs((1.0, 1.0), (1.0,), (1.0, 1.0))}, "input_grad has 1 values; 2 pieces need 2"),
        ({"activations": (1.0, 1.0)}, "activations has 2 values; 4 pieces need 4"),
        ({"most_alive": (1.0, 2.0, 3.0)}, "most_alive has 3 values; give one number, or one for each of 2"),
        ({"most_alive": (0.5, 2.0)}, "rank 0 keeps 1 for one microbatch, and may keep 0.5; allow more"),
    ],
)
def test_wrong_questions_are_named(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Model(2, 4, **arguments)  # type: ignore[arg-type]


def test_a_step_with_fewer_microbatches_finds_the_stages_where_they_lie() -> None:
    """A batch that grows: for its first steps another placement may be the best, and the weights lie already."""
    given = {
        "model": {"layers": 5, "hidden": 24, "heads": 4, "ffn": 48, "vocab": 61, "sequence": 12},
        "plan": {"pp": 2, "schedule": "auto", "virtual_stages": 2, "recompute": "full"},
    }
    jobs = [make_job(given | {"batch": {"global_batch_size": size}}) for size in range(1, 13)]
    largest = job_program(jobs[-1])
    assert {job_program(job).placement for job in jobs} != {largest.placement}  # each for itself would move them
    for job in jobs:
        smaller = job_program(job, beside=largest)
        assert smaller.placement == largest.placement and not program_faults(smaller)
