"""Every schedule by name: its bubble, its peak and its messages are its paper's, at any size that it admits."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.plan import PlanSpec
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.schedule.action import SEND, Kind
from shardwright.schedule.buffer_lifetimes import peak_activations
from shardwright.schedule.generators.interleaved import interleaved
from shardwright.schedule.job_program import plan_faults
from shardwright.schedule.lowering.lower import lower
from shardwright.schedule.lowering.weight_versions import stashed_versions, weight_versions
from shardwright.schedule.program_check import program_faults
from shardwright.schedule.schedule import Program
from shardwright.schedule.shape_program import forward_of
from shardwright.schedule.timing import Costs, play
from shardwright.simulate.bubbles import Bubbles, Work, measure_and_play
from support.programs import generated, schedule_faults, training_program

NAMES = (
    "sequential", "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min",
    "dualpipe", "dualpipev", "pipedream", "pipedream-2bw",
)  # fmt: skip
LOOPED = ("interleaved-1f1b", "looped-bfs")
ASYNCHRONOUS = ("pipedream", "pipedream-2bw")
SIZES = [(2, 4), (2, 7), (4, 8), (4, 15), (8, 16), (8, 32)]
EQUAL = Work()
# F, I and W; the third is what a layer with attention over a long sequence looks like.
COSTS = [EQUAL, Work(1, 1, 0.5), Work(1, 1.3, 0.9), Work(1, 2, 0.5), Work(2, 1, 1), Work(1, 0.7, 1.2), Work(1, 0.5, 2)]


def measure(
    name: str, num_ranks: int, num_microbatches: int, work: Work | None = None, virtual_stages: int = 1, *,
    extra_warmup: int = 0, group: int = 0,
) -> Bubbles:  # fmt: skip
    """A named schedule. ValueError says why it does not admit a shape."""

    def stream(num_steps: int) -> Program:
        return training_program(
            name, num_ranks, num_microbatches, virtual_stages,
            extra_warmup=extra_warmup, group=group, num_steps=num_steps,
        )  # fmt: skip

    one = stream(1)
    return measure_and_play(one, (work or Work()).costs(one), 1, stream)[0]


def chunks(name: str) -> tuple[int, ...]:
    return (2, 4) if name in LOOPED else (1,)


def admitted(name: str) -> list[tuple[int, int, int]]:
    """(p, m, v) of the sizes that a schedule admits."""
    return [(p, m, v) for p, m in SIZES for v in chunks(name) if not schedule_faults(name, p, m, v)]


def formula(text: str, p: int, m: int, v: int, work: Work) -> Any:
    F, I, W = work.forward, work.input_grad, work.weight_grad  # noqa: E741
    B = I + W
    return eval(text, {"p": p, "m": m, "v": v, "F": F, "I": I, "W": W, "B": B, "FB": F + B})


# --- the table: free communication ---

Row = tuple[float, float, float, list[float]]  # bubble, span bubble, period bubble, peak by rank


def expected_row(name: str, p: int, m: int, v: int) -> Row:
    """F = I = W = 1, B = 2."""
    full = 3.0 * (p - 1)
    by_rank = range(p)
    rows: dict[str, Callable[[], Row]] = {
        "sequential": lambda: (m * full, m * full, m * full, [1] * p),
        "gpipe": lambda: (full, full, full, [m] * p),
        "1f1b": lambda: (full, full, full, [min(m, p - r) for r in by_rank]),
        "looped-bfs": lambda: (full / v, full / v, full / v, [m] * p),
        "zb-h1": lambda: (p - 1, p - 1, p - 1, [p] * p),
        "zb-h2": lambda: (p - 1, 0, 0, [2 * p - 1] * p),
        "zb-v": lambda: ((p - 1) / 2, 0, 0, [p] * p),
        "dualpipe": lambda: (2 * (p / 2 - 1), 2 * (p / 2 - 1), 2 * (p / 2 - 1), [p + 1] * p),
        "dualpipev": lambda: (p - 1, p - 1, p - 1, [p + 0.5] * p),
        "pipedream": lambda: (full, full, 0, [p - r for r in by_rank]),
        "pipedream-2bw": lambda: (full, full, 0, [p - r for r in by_rank]),
    }
    return rows[name]()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("interleaved-1f1b", "v-half", "v-min")])
def test_table_of_the_papers(name: str) -> None:
    for p, m, v in admitted(name):
        if name == "zb-h2" and m < 2 * p - 1:
            continue
        result = measure(name, p, m, virtual_stages=v)
        bubble, span, period, peaks = expected_row(name, p, m, v)
        assert result.bubble == pytest.approx(bubble, abs=1e-9), (p, m, v)
        assert result.span_bubble == pytest.approx(span, abs=1e-9), (p, m, v)
        assert result.period_bubble == pytest.approx(period, abs=1e-9), (p, m, v)
        assert list(result.peak_activations) == peaks, (p, m, v)
        assert result.makespan == pytest.approx(3 * m + bubble)
        assert result.bubble_fraction == pytest.approx(bubble / (3 * m + bubble))


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize(("p", "m"), [(2, 6), (4, 12), (8, 24)])
def test_interleaved(p: int, m: int, v: int) -> None:
    for group in (p, p + 1, 2 * p):
        if m % group:
            continue
        result = measure("interleaved-1f1b", p, m, virtual_stages=v, group=group)
        assert result.bubble == pytest.approx(3 * (p - 1) / v)
        expected = [min(m, (2 * (p - 1 - r) + (v - 1) * group + 1) / v) for r in range(p)]
        assert list(result.peak_activations) == pytest.approx(expected)
    first = measure("interleaved-1f1b", p, m, virtual_stages=v).peak_activations[0]
    assert first == pytest.approx(p * (1 + (p - 1) / (p * v)))


@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_takes_any_number_of_microbatches(v: int) -> None:
    """A rest joins the first group; so the bubble is the same, and only the peak grows."""
    p = 4
    for group, most in ((4, 14), (5, 12), (8, 24)):
        for m in range(1, most):
            program = training_program("interleaved-1f1b", p, m, v, group=group)
            makespan = play(program, Work().costs(program)).makespan
            missing = max(0, p - m)  # too few to fill the pipeline: each chunk but the first waits for them
            assert makespan - 3 * m == pytest.approx(3 * (p - 1 + missing * (v - 1)) / v), (group, m)
    assert measure("interleaved-1f1b", 4, 9, virtual_stages=2).peak_activations[0] == (6 + 5 + 1) / 2


@pytest.mark.parametrize("name", NAMES)
def test_formulas_where_costs_differ(name: str) -> None:
    """The text of a formula is right wherever the text of its condition says so."""
    entry = SCHEDULES[name]
    if not entry.bubble:
        return
    checked = 0
    for p, m in [(2, 4), (3, 5), (4, 3), (4, 8), (5, 10), (8, 16)]:
        v = p % 2 + 2 if name in LOOPED else 1
        for work in COSTS:
            if schedule_faults(name, p, m, v) or (entry.when and not formula(entry.when, p, m, v, work)):
                continue
            result = measure(name, p, m, work, v)
            assert result.bubble == pytest.approx(formula(entry.bubble, p, m, v, work), abs=1e-9), (p, m, v, work)
            period = formula(entry.repeated or entry.bubble, p, m, v, work)
            assert result.period_bubble == pytest.approx(period, abs=1e-9), (p, m, v, work)
            checked += 1
    assert checked >= 5


@pytest.mark.parametrize("work", COSTS)
@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 9), (8, 15), (8, 32)])
def test_span_of_zb_h2(p: int, m: int, work: Work) -> None:
    result = measure("zb-h2", p, m, work)
    idle = work.forward + work.input_grad - 2 * work.weight_grad
    assert result.span_bubble == pytest.approx((p - 1) * max(0, idle), abs=1e-9)
    assert result.period_bubble == pytest.approx(result.span_bubble, abs=1e-9)
    assert result.bubble == pytest.approx((p - 1) * max(work.forward, idle))


# --- DualPipe ---


def test_dualpipe_table_of_its_readme() -> None:
    """PP = 8 stages, F&B = F + B, B the whole backward: bubble, parameters, activations, devices."""
    m = 20
    F, I, W = 1, 1, 1  # noqa: E741
    B, FB = I + W, F + I + W
    own = {name: measure(name, 8, m) for name in ("1f1b", "zb-h1", "dualpipe")}
    # The same eight stages on four ranks; a chunk is F, so a rank's whole work is twice that.
    own["dualpipev"] = measure("dualpipev", 4, m, Work(2, 2, 2))
    table: dict[str, tuple[float, float, float]] = {
        "1f1b": (7 * (F + B), 1, 8),
        "zb-h1": (7 * (F + B - 2 * W), 1, 8),
        "dualpipe": (3 * (FB + B - 3 * W), 2, 9),
        "dualpipev": (3 * (FB + B - 3 * W), 2, 9),
    }
    for name, (bubble, parameters, activations) in table.items():
        stages_of_a_rank = 8 // len(own[name].peak_activations)
        assert own[name].bubble == pytest.approx(bubble), name
        assert max(own[name].parameter_copies) * stages_of_a_rank == parameters, name
        assert max(own[name].peak_activations) * stages_of_a_rank == activations, name


def test_dualpipe_where_forward_and_input_gradient_differ() -> None:
    """Between (p / 2 - 1)(F&B + F - 2W) and the README's (p / 2 - 1)(F&B + I - 2W)."""
    result = measure("dualpipe", 8, 20, Work(1, 1.3, 0.9)).bubble
    assert result == pytest.approx(3 * (3.2 + 1 - 1.8))
    longer = measure("dualpipe", 8, 20, Work(1, 2, 0.5)).bubble
    assert 3 * (3.5 + 1 - 1) < longer < 3 * (3.5 + 2 - 1)


def test_dualpipe_saves_what_pairs_save() -> None:
    """The bubble's F&B is a pair's time; ranks at the turn run most pairs, and theirs is the bubble of the formula."""
    for pair in (1.0, 5 / 6, 2 / 3):
        program, work = training_program("dualpipe", 8, 32), Work(pair=pair)
        costs = work.costs(program)
        busy = [sum(costs.compute(action) for action in row if action.computes()) for row in program.ranks]
        makespan = play(program, costs).makespan
        assert makespan - min(busy) == pytest.approx(3 * (3 * pair + 2 - 3))
        assert busy[3] == busy[4] == min(busy)
        assert measure_and_play(program, costs, 1)[0].bubble == pytest.approx(makespan - sum(busy) / 8)


@pytest.mark.parametrize(("name", "p", "m"), [("dualpipe", 8, 20), ("dualpipev", 4, 10)])
def test_pairs_are_a_forward_and_a_backward_of_two_chunks(name: str, p: int, m: int) -> None:
    for rank, row in enumerate(training_program(name, p, m).ranks):
        pairs = [action.parts for action in row if action.kind is Kind.OVERLAP]
        assert pairs
        assert all((f.kind, b.kind) == (Kind.FORWARD, Kind.BACKWARD) and f.stage != b.stage for f, b in pairs), rank


def test_the_two_halves_of_dualpipe_mirror_each_other() -> None:
    ranks = generated("dualpipe", 4, 8).ranks
    for near, far in ((0, 3), (1, 2)):
        mirrored = [
            [(part.kind, part.stage, (part.microbatch + 4) % 8) for part in action.computes()] for action in ranks[far]
        ]
        assert mirrored == [[(q.kind, q.stage, q.microbatch) for q in action.computes()] for action in ranks[near]]


# --- controllable memory ---


def test_v_half_and_v_min_of_their_paper() -> None:
    half, least, plain = (measure(name, 8, 32) for name in ("v-half", "v-min", "1f1b"))
    assert (half.bubble, least.bubble, plain.bubble) == pytest.approx((8.5, 13.5, 21))
    assert peak_activations(training_program("v-half", 8, 32)) == [10] * 8  # of 16 halves
    assert peak_activations(training_program("v-min", 8, 32)) == [8] * 8
    slower = Work(1, 1.3, 0.9)
    assert measure("v-min", 8, 32, slower).bubble == pytest.approx(37.0)
    assert measure("1f1b", 8, 32, slower).bubble == pytest.approx(22.4)


@pytest.mark.parametrize("p", range(2, 13))
def test_v_half_and_v_min_at_any_size(p: int) -> None:
    """Peaks are the paper's. It gives no closed form of the bubble; these are what the order comes to."""
    for m in (p, 2 * p + 1, 3 * p + 4):
        half, least = measure("v-half", p, m), measure("v-min", p, m)
        assert max(half.peak_activations) == min(m, (p + 2) // 2)
        assert max(least.peak_activations) == min(m, (p + 4) // 3)
    assert half.bubble == (0.5 if p == 2 else (3 * p - (4 if p % 2 else 7)) / 2)
    assert least.bubble == 2 * p - (2.5 if p % 3 else 3)


def test_bubble_of_v_half_does_not_grow_with_the_microbatches() -> None:
    for work in (EQUAL, Work(1, 1.3, 0.9), Work(1.2, 1, 0.5)):
        assert measure("v-half", 6, 40, work).bubble == pytest.approx(measure("v-half", 6, 20, work).bubble)
    lockstep = Work(1, 1.3, 0.9)
    assert measure("v-min", 6, 40, lockstep).bubble > measure("v-min", 6, 20, lockstep).bubble + 10


# --- communication that is not free ---


@pytest.mark.parametrize("c", [0.1, 0.25])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_what_a_latency_costs(p: int, m: int, c: float) -> None:
    """Exact for F = I = W = 1, m a multiple of p. Each message is c late, and holds up only who waits for it."""
    late = Work(latency=c)

    def bubble(name: str, v: int = 1, **options: int) -> float:
        return measure(name, p, m, late, v, **options).bubble

    hop = 2 * c * (p - 1)  # once there and once back
    assert bubble("1f1b") == pytest.approx(3 * (p - 1) + 2 * c * ((p - 1) * m / p + p - 2))
    assert bubble("gpipe") == pytest.approx(3 * (p - 1) + hop)
    assert bubble("1f1b", extra_warmup=p - 1) == pytest.approx(3 * (p - 1) + hop)
    assert bubble("zb-h1") == pytest.approx(p - 1 + 2 * hop)
    assert bubble("zb-h2") == pytest.approx(p - 1 + hop / 2)
    for v in (2, 3):
        assert bubble("looped-bfs", v) == pytest.approx(3 * (p - 1) / v + hop)
        assert bubble("interleaved-1f1b", v) == pytest.approx(3 * (p - 1) / v + 2 * c * (v * p - 1))
        assert bubble("interleaved-1f1b", v, group=2 * p) == pytest.approx(3 * (p - 1) / v + hop)


def test_latency_hurts_dualpipev_in_every_microbatch() -> None:
    result = [measure("dualpipev", 8, m, Work(latency=0.1)).bubble for m in (16, 64)]
    assert result == pytest.approx([11.9, 20.3])


@pytest.mark.parametrize(("p", "m"), [(4, 16), (8, 32)])
def test_extra_warmup(p: int, m: int) -> None:
    """Each extra forward of the warm-up is a microbatch more to keep; with all of them latency is paid for once."""
    results = [measure("1f1b", p, m, Work(latency=0.5), extra_warmup=extra) for extra in range(p + 1)]
    bubbles = [each.bubble for each in results]
    assert bubbles == sorted(bubbles, reverse=True)
    assert bubbles[0] > bubbles[1] > bubbles[p - 1] == bubbles[p]  # more than twice is the same as twice
    for extra, each in enumerate(results):
        assert list(each.peak_activations) == [1 + (p - 1 - r) + min(p - 1 - r, extra) for r in range(p)]


# --- messages and parameters ---


@pytest.mark.parametrize("name", NAMES)
def test_messages_and_parameters(name: str) -> None:
    p, m, v = 4, 16, 2 if name in LOOPED else 1
    result = measure(name, p, m, virtual_stages=v)
    borders = {"in line": p - 1, "looped": v * p - 1, "vee": 2 * (p - 1)}  # the turn of a vee is on one rank
    placement = "looped" if name in LOOPED else "vee" if name in ("zb-v", "v-half", "v-min", "dualpipev") else "in line"
    assert result.messages == 2 * m * borders[placement]
    copies = {"dualpipe": (2, 2, 2, 2), "pipedream": (4, 3, 2, 1), "pipedream-2bw": (2, 2, 2, 2)}
    assert result.parameter_copies == copies.get(name, (1, 1, 1, 1))


# --- versions of the weights ---


def test_pipedream_sees_the_weights_of_its_forward() -> None:
    p, m = 4, 10
    program = training_program("pipedream", p, m)
    versions = weight_versions(program)
    for stage in range(p):
        assert [versions[stage, i] for i in range(m)] == [max(0, i - (p - 1 - stage)) for i in range(m)]
    assert stashed_versions(program) == [4, 3, 2, 1]
    assert "2B5 2R5 2S5" in " ".join(str(a) for a in program.ranks[2] if a.kind not in SEND and a.peer < 0)


def test_2bw_is_late_by_one_update() -> None:
    p, m, batches = 4, 5, 4
    program = training_program("pipedream-2bw", p, m, num_steps=batches)
    assert program.num_microbatches == m * batches
    versions = weight_versions(program)
    for stage in range(p):
        assert [versions[stage, i] for i in range(m * batches)] == [0] * 10 + [1] * 5 + [2] * 5
        steps = [a.microbatch for a in program.ranks[stage] if a.kind is Kind.STEP]
        assert steps == [4, 9, 14, 19]
    assert stashed_versions(program) == [2] * p


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(0, 6), st.integers(1, 4))
def test_two_versions_are_enough_for_2bw(p: int, more: int, batches: int) -> None:
    """The version that a batch is due was made before its first forward, on every stage; and no other is awaited."""
    program = training_program("pipedream-2bw", p, p + more, num_steps=batches)
    versions = weight_versions(program)
    for row in program.ranks:
        updates, awaited = 0, {}
        for action in row:
            if action.kind is Kind.FORWARD:
                awaited[action.microbatch] = versions[action.stage, action.microbatch]
                assert updates - 1 <= awaited[action.microbatch] <= updates
            elif action.kind is Kind.STEP:
                updates += 1
            elif action.kind is Kind.BACKWARD:
                del awaited[action.microbatch]
            assert len({*awaited.values(), updates}) <= 2


def test_a_synchronous_schedule_has_one_version() -> None:
    program = training_program("zb-v", 2, 4)
    assert set(weight_versions(program).values()) == {0}
    assert stashed_versions(program) == [1, 1]


# --- any size ---

virtual = st.integers(1, 4)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 16), st.integers(1, 64), virtual, st.integers(1, 2))
def test_programs_are_right(name: str, p: int, m: int, v: int, num_steps: int) -> None:
    if name in LOOPED:
        p = max(1, p // v)
    elif v < 4:  # else most would be refused
        v = 1
    num_steps = num_steps if not SCHEDULES[name].drains else 1
    m = m // num_steps + 1
    if faults := schedule_faults(name, p, m, v, num_steps=num_steps):
        with pytest.raises(PlanError) as refused:
            training_program(name, p, m, v, num_steps=num_steps)
        assert refused.value.faults == faults
        return
    program = training_program(name, p, m, v, num_steps=num_steps)
    assert program_faults(program) == []
    assert program.num_stages == PlanSpec(pp=p, schedule=name, virtual_stages=v).num_stages
    assert_microbatches_stay_in_order(program)
    evaluation = forward_of(training_program(name, p, m, v))
    assert program_faults(evaluation) == []
    assert evaluation.num_microbatches == m
    assert evaluation.num_stages == program.num_stages
    assert not evaluation.trains


def assert_microbatches_stay_in_order(program: Program) -> None:
    """On each stage of each rank: then gradients add up in the order in which one rank would add them."""
    for row in program.ranks:
        last: dict[tuple[Kind, int], int] = {}
        for part in (part for action in row for part in action.computes()):
            kind = Kind.BACKWARD if part.kind is Kind.INPUT_GRAD else part.kind
            assert last.get((kind, part.stage), -1) < part.microbatch
            last[kind, part.stage] = part.microbatch


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 30), st.integers(1, 4), st.integers(0, 12))
def test_interleaved_with_any_group(p: int, m: int, v: int, more: int) -> None:
    assert program_faults(lower(interleaved(p, m, v, p + more))) == []


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 14))
def test_1f1b_with_any_warmup(p: int, m: int, extra: int) -> None:
    program = training_program("1f1b", p, m, extra_warmup=extra)
    assert program_faults(program) == []
    assert measure_and_play(program, Costs.uniform(p), 1)[0].bubble == pytest.approx(3 * (p - 1))


def test_names_are_those_of_the_plan() -> None:
    assert set(NAMES) <= set(SCHEDULES) and set(NAMES) <= set(SCHEDULES.names)
    for name in NAMES:
        v = 2 if name in LOOPED else 1
        assert generated(name, 2, 4, v).name == training_program(name, 2, 4, v).name == name


def test_dualpipe_evaluates_in_both_directions() -> None:
    program = forward_of(training_program("dualpipe", 4, 8))
    assert program.placement.num_copies == 2
    first_of_rank = [next(str(action) for action in row if action.computes()) for row in program.ranks]
    assert first_of_rank == ["0F0", "1F0", "1F4", "0F4"]


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "faults"),
    [
        (
            "dualpipe", 4, 6, 1,
            ["dualpipe needs m >= 2p microbatches and an even number: m 6 < 2 x 4 = 8; use 8 or more"],
        ),
        ("dualpipe", 4, 9, 1, ["dualpipe needs m >= 2p microbatches and an even number: m 9 is odd; use 8 or 10"]),
        ("dualpipe", 3, 6, 1, ["dualpipe pairs rank r with rank p - 1 - r, and p 3 is odd; use 2 or 4, or dualpipev"]),
        ("dualpipev", 4, 7, 2, ["dualpipev needs m >= 2p microbatches: m 7 < 2 x 4 = 8; use 8 or more"]),
        ("zb-v", 4, 8, 3, ["schedule 'zb-v' runs two stages on each rank, and plan.virtual_stages is 3; use 2"]),
        ("zb-h1", 4, 8, 2, ["schedule 'zb-h1' runs one stage on each rank, and plan.virtual_stages is 2; use 1"]),
        (
            "dualpipe", 4, 8, 2,
            ["schedule 'dualpipe' runs one stage of each direction on each rank, and plan.virtual_stages is 2; use 1"],
        ),
        (
            "interleaved-1f1b", 4, 8, 1,
            ["schedule 'interleaved-1f1b' runs several stages on each rank, and plan.virtual_stages is 1; "
             "use 2 or more, or schedule '1f1b'"],
        ),
        (
            "pipedream-2bw", 4, 2, 1,
            ["pipedream-2bw needs m >= p microbatches between updates, else two versions of the weights are too few: "
             "m 2 < p 4; use 4 or more"],
        ),
    ],
)  # fmt: skip
def test_what_is_not_admitted_says_why(name: str, p: int, m: int, v: int, faults: list[str]) -> None:
    assert schedule_faults(name, p, m, v) == faults
    with pytest.raises(ValueError, match="use"):
        forward_of(training_program(name, p, m, v))


def test_options_of_other_schedules_are_refused() -> None:
    assert schedule_faults("gpipe", 2, 4, extra_warmup=1, num_steps=2) == [
        "schedule 'gpipe' has no extra_warmup, and it is 1; leave it out, or use 1f1b",
        "schedule 'gpipe' has no num_steps, and it is 2; leave it out, or use pipedream or pipedream-2bw",
    ]
    assert "group 3 < p 4; use 4 or more" in schedule_faults("interleaved-1f1b", 4, 8, 2, group=3)[0]


def job(**plan: Any) -> JobSpec:
    return make_job({"plan": plan, "batch": {"global_batch_size": 12}, "model": {"layers": 16}})


def test_a_job_is_told_where_its_numbers_come_from() -> None:
    assert plan_faults(job(pp=4, schedule="dualpipe", dp=2)) == [
        "dualpipe needs m >= 2p microbatches and an even number: m 6 < 2 x 4 = 8; use 8 or more "
        "(p is plan.pp 4; m is batch.global_batch_size 12 / (plan.dp 2 x plan.microbatch_size 1) = 6)"
    ]
    assert plan_faults(job(pp=4, virtual_stages=2)) == [
        "schedule '1f1b' runs one stage on each rank, and plan.virtual_stages is 2; use 1"
    ]
    assert plan_faults(job(pp=4, schedule="v-half")) == []


def test_stages_of_a_plan() -> None:
    assert job(pp=4, schedule="zb-v").plan.num_stages == 8
    assert job(pp=4, schedule="dualpipe").plan.num_stages == 4
    assert job(pp=2, schedule="looped-bfs", virtual_stages=3).plan.num_stages == 6
    with pytest.raises(ValueError, match="pp 9 x 2 stages a rank with zb-v = 18 stages for 16 layers"):
        job(pp=9, schedule="zb-v")


# --- figures ---


@pytest.mark.parametrize(
    ("name", "p", "m", "figure"),
    [
        ("zb-h1", 2, 3, "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2|1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"),
        ("zb-h2", 2, 3, "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2|1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"),
        (
            "zb-v", 2, 3,
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2|"
            "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
        ),
        ("dualpipev", 1, 2, "0F0 1F0 0F1 1B0 (1F1+0B0) 1B1 0I1 0W1"),
        ("pipedream", 2, 2, "0F0 0F1 0B0 0R0 0S0 0B1 0R1 0S1|1F0 1B0 1R0 1S0 1F1 1B1 1R1 1S1"),
    ],
)  # fmt: skip
def test_reads_like_the_figure(name: str, p: int, m: int, figure: str) -> None:
    assert "|".join(" ".join(map(str, row)) for row in generated(name, p, m).ranks) == figure


def test_interleaved_reads_like_the_figure() -> None:
    assert " ".join(map(str, generated("interleaved-1f1b", 2, 4, 2).ranks[0])) == (
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    )


def test_measures_of_a_program_written_by_hand() -> None:
    result, _ = measure_and_play(training_program("gpipe", 2, 2), Costs.uniform(2, 1, 1, 1), 1)
    assert result == Bubbles(9.0, 3.0, 3.0, 3.0, (2.0, 2.0), (1.0, 1.0), 4, reductions=2)
    assert play(training_program("gpipe", 2, 2), Costs.uniform(2)).makespan == result.makespan
