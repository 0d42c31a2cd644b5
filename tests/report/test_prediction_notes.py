"""Told numbers against the arithmetic: what contradicts the rest is noted, with what would agree."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cli.checked_job import load
from shardwright.config.model import ModelSpec
from shardwright.planner.advice.advice import Advice
from shardwright.planner.search.results import SearchTally
from shardwright.report.plan_screen import plan_screen
from shardwright.report.prediction_notes import job_notes
from shardwright.report.rendered import rendered
from shardwright.sharding.stage_parameters import num_parameters

JOB = "gpt-100b-32xa100"


def test_what_agrees_is_not_noted() -> None:
    assert load(JOB, ()).model.told_parameters_b == 100
    assert job_notes(load(JOB, ("cluster.told_devices=32",))) == []
    assert job_notes(load(JOB, ("model.told_parameters_b=0", "model.layers=50"))) == []  # nothing is told


def test_a_hidden_of_12288_makes_181_billion_and_not_100() -> None:
    (note,) = job_notes(load(JOB, ("model.hidden=12288", "model.heads=96", "model.ffn=49152")))
    assert (
        "says 100 billion" in note
        and "have 181.9 billion (181.2 in matrices of layers, 0.7 in tables and vectors)" in note
    )
    assert "9,106 would have them, or 9,088, which splits into heads of 128" in note


@given(
    layers=st.integers(2, 100), heads=st.integers(2, 64), vocab=st.integers(100, 200_000), stated=st.floats(0.01, 500.0)
)
def test_the_hidden_that_is_named_has_the_told_parameters(layers: int, heads: int, vocab: int, stated: float) -> None:
    fields = {"layers": layers, "hidden": 64 * heads, "heads": heads, "vocab": vocab, "told_parameters_b": stated}
    notes = job_notes(load(JOB, ()).model_copy(update={"model": ModelSpec.model_validate(fields)}))
    if not notes:
        assert num_parameters(ModelSpec.model_validate(fields)) == pytest.approx(stated * 1e9, rel=0.05)
        return
    named = re.search(r"a hidden of ([\d,]+) would", notes[0])
    assert named is not None
    hidden = int(named[1].replace(",", ""))
    # One head makes any width legal; matrices are the same. Positions are a table more.
    there = ModelSpec.model_validate(fields | {"hidden": hidden, "heads": 1, "positions": "learned"})
    assert num_parameters(there) - there.sequence * hidden == pytest.approx(stated * 1e9, rel=1.5 / hidden)


@pytest.mark.parametrize(("stated", "way_out"), [(64, "dp 16 would use them all"), (30, "no dp does: 30 / 4 = 7.50")])
def test_devices_that_the_degrees_do_not_make(stated: int, way_out: str) -> None:
    (note,) = job_notes(load(JOB, (f"cluster.told_devices={stated}",)))
    assert f"says {stated} devices, and dp 8 x tp 1 x pp 4 = 32 ranks; {way_out}" in note


def test_plan_says_it_too() -> None:
    job = load(JOB, ("cluster.told_devices=64",))
    (note,) = job_notes(job)
    assert f"Note: {note}." in " ".join(rendered(plan_screen(Advice(job, [], SearchTally()))).split())
