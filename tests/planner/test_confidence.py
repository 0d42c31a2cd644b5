"""How sure it is that one plan is faster: shipped numbers are those of the fit, and they hold on published sweeps."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config import catalog
from shardwright.layers.query import PlanGrid
from shardwright.planner.advice.confidence import DIFFERENCES, RatioSpread, differing, fitted_spread, student_cdf

pytestmark = pytest.mark.long

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def fitting() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        import fit_confidence

        return fit_confidence


@pytest.fixture(scope="module")
def pairs(fitting: ModuleType) -> Sequence:
    return fitting.pairs()


def test_the_file_is_what_the_fit_gives(fitting: ModuleType, pairs: Sequence) -> None:
    shipped = Path(catalog.__file__).parent / "confidence.toml"
    assert shipped.read_text() == fitting.text(fitting.fit(pairs)), "run benchmarks/fit_confidence.py"


def test_a_stated_confidence_is_the_share_that_was_right(fitting: ModuleType, pairs: Sequence) -> None:
    """Each sweep by a fit to the others. Of pairs called at 90 % nine of ten are right, to 6 %, whether pairs
    weigh alike or sweeps."""
    assert len(pairs) > 2000 and len({pair.sweep for pair in pairs}) > 20
    sure = fitting.left_out_confidences(pairs)
    of = {low: fitting.calibration(pairs, sure, low, high) for low, high in fitting.BINS}
    assert of[0.85].num_pairs > 300 and of[0.85].num_sweeps > 8
    assert 0.85 <= of[0.85].right <= 0.95
    assert 0.84 <= of[0.85].right_by_sweeps <= 0.95
    for called in of.values():
        assert called.right >= called.stated - 0.06  # never surer than it is right; it may be right more often
        assert called.right_by_sweeps >= called.stated - 0.1
    above = fitting.calibration(pairs, sure, 0.9, 1.0)
    assert above.right == pytest.approx(above.stated, abs=0.02)
    assert min(sure) >= 0.5


def test_sweeps_are_of_one_publication_and_weigh_alike(fitting: ModuleType, pairs: Sequence) -> None:
    """Pairs that are there twice change nothing where all of their sweep are."""
    assert {pair.sweep[0] for pair in pairs} >= {"aleph", "bloom", "zb"}
    assert "dgxc" not in {pair.sweep[0] for pair in pairs}  # its pairs are of several documents
    some = [pair for pair in pairs if pair.sweep[0] in ("bloom", "zb")]
    one = some[0].sweep
    twice = [*some, *(pair for pair in some if pair.sweep == one)]
    assert fitting.fit(twice).by_kind == pytest.approx(fitting.fit(some).by_kind, rel=1e-4)


def test_the_fit_finds_the_spreads_that_pairs_were_drawn_with(fitting: ModuleType) -> None:
    """Residuals at quantiles of Student's t, in sweeps that differ in one kind each."""
    freedom, spreads = 4, {"tp": 0.02, "zero": 0.08}
    quantiles = [(n + 0.5) / 400 for n in range(400)]
    drawn = [
        fitting.Pair((kind, n % 20), frozenset({kind}), spread * _inverse(at, freedom), 0.0)
        for kind, spread in spreads.items()
        for n, at in enumerate(quantiles)
    ]
    result = fitting.fit(drawn)
    assert result.freedom in (3, 4, 5)
    assert result.by_kind == pytest.approx(spreads, rel=0.1)
    assert result.unseen == max(result.by_kind.values())


def _inverse(at: float, freedom: int) -> float:
    low, high = -1e3, 1e3
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < at else (low, middle)
    return low


@pytest.mark.parametrize(
    ("freedom", "x"), [(1, 6.3138), (2, 2.9200), (3, 2.3534), (4, 2.1318), (5, 2.0150), (10, 1.8125)]
)
def test_student_has_the_quantiles_of_tables(freedom: int, x: float) -> None:
    assert student_cdf(x, freedom) == pytest.approx(0.95, abs=1e-5)


@given(
    st.floats(-1, 1), st.sets(st.sampled_from(sorted(DIFFERENCES)), min_size=1), st.sampled_from(sorted(DIFFERENCES))
)
def test_both_plans_are_as_sure_together_as_one(ratio: float, kinds: set[str], another: str) -> None:
    """The confidences of both orders add up to 1; more that differs makes less sure."""
    spread = fitted_spread()
    sure = spread.confidence(ratio, kinds)
    assert sure + spread.confidence(-ratio, kinds) == pytest.approx(1.0)
    assert abs(spread.confidence(ratio, kinds | {another}) - 0.5) <= abs(sure - 0.5) + 1e-12


def test_what_no_sweep_has_is_as_unsure_as_anything() -> None:
    spread = RatioSpread(4, {"tp": 0.03, "pp": 0.04}, 0.04)
    assert spread.of(["compress"]) == 0.04
    assert spread.of(["tp", "compress"]) == pytest.approx(math.hypot(0.03, 0.04))
    assert spread.confidence(0.5, ()) == 0.5


def test_the_spread_of_kinds_depends_on_no_order() -> None:
    spread = RatioSpread(4, {"tp": 0.1, "pp": 0.2, "cp": 0.3, "zero": 0.7}, 0.7)
    assert len({spread.of(kinds) for kinds in permutations(spread.by_kind)}) == 1


def test_what_differs() -> None:
    """A pipeline of one rank is as good as 1F1B, and experts on one rank have no shards to differ in."""
    plain = PlanGrid(dp=4, tp=2, pp=2, expert_tp=2)
    assert differing(plain, plain) == set()
    assert differing(plain, replace(plain, virtual=2)) == {"schedule"}
    assert differing(plain, PlanGrid(dp=8, tp=2, schedule="sequential")) == {"pp"}
    assert differing(plain, PlanGrid(dp=8, pp=2, zero=1, microbatch=2)) == {"tp", "zero", "microbatch_size"}
    assert differing(replace(plain, schedule="dualpipe"), PlanGrid(dp=8, tp=2)) == {"pp", "schedule"}
    assert differing(plain, PlanGrid(dp=8, pp=2, sequence_parallel=True)) == {"tp"}
    assert differing(plain, replace(plain, offload_optimizer=1.0, ep=2)) == {"ep", "offload"}
