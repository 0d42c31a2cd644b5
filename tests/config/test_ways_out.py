"""Ways out that faults name are ways out. Mostly drawn: tests/fuzz/ways_out.py tries more of them."""

import pytest

from fuzz.ways_out import DEFAULT, drawn, false_ways, faults_of, kind_of, ways_out, with_field

COUNT = 150


def test_way_out_ends_its_fault() -> None:
    tried, wrong = 0, []
    for number in range(COUNT):
        here, of_draw = false_ways(drawn(2026, number))
        tried, wrong = tried + here, wrong + of_draw
    assert not wrong, "\n".join(wrong)
    assert tried > COUNT


@pytest.mark.parametrize(
    ("fault", "ways"),
    [
        ("plan.ep 5 does not divide 6 experts (6 / 5 = 1.20); use 1, 2 or 6", [("plan.ep", n) for n in (1, 2, 6)]),
        ('ulysses; use plan.cp = 3, or plan.cp_method = "ring"', [("plan.cp", 3), ("plan.cp_method", "ring")]),
        ("plan.zero_ranks 2 does not cut; set plan.zero_ranks to 0", [("plan.zero_ranks", 0)]),
        ("schedule 'pipedream' keeps; use a schedule that drains, such as 1f1b", [("plan.schedule", "1f1b")]),
        ("batch.global_batch_size 7 does not split; use a batch of 6 or 12, or another plan.dp",
         [("batch.global_batch_size", 6), ("batch.global_batch_size", 12)]),
        ("plan.ep 5 spreads experts; leave plan.ep out, or set model.moe.experts", [("plan.ep", DEFAULT)]),
        ("plan.tp = 0: it should be greater than 0 (degree; ranks)", []),
        ("plan.tp 3 does not divide; use another width", []),
    ],
)  # fmt: skip
def test_ways_are_read(fault: str, ways: list[tuple[str, object]]) -> None:
    assert list(ways_out(fault)) == ways


def test_way_that_is_none_is_seen() -> None:
    fields = {"plan": {"dp": 1, "ep": 2}, "batch": {"global_batch_size": 8}}
    (fault,) = (one for one in faults_of(fields) if "spreads experts" in one)
    assert fault.endswith("leave plan.ep out, or set model.moe.experts")
    assert kind_of(fault) in map(kind_of, faults_of(with_field(fields, "plan.ep", 3)))
    assert faults_of(with_field(fields, "plan.ep", DEFAULT)) == []


def test_experts_are_cut_over_tp_or_not_at_all() -> None:
    fields = {"model": {"moe": {"experts": 4}}, "plan": {"expert_tp": 3}, "batch": {"global_batch_size": 8}}
    (fault,) = (one for one in faults_of(fields) if "neither 1 nor plan.tp" in one)
    assert fault.endswith("; use 1")
