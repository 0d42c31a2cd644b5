"""Laps of a list: they are the list again, and a replay that counts them moves and borrows as one that makes each."""

import random

import pytest

from shardwright.config.load import load_job
from shardwright.memory.rank_course import RankCourse
from shardwright.memory.rank_state import sized_state
from shardwright.memory.repeated_items import Laps, laps_of
from shardwright.memory.zero_replay import replay
from shardwright.schedule.job_program import job_program


def test_laps_are_the_list_and_few() -> None:
    draw = random.Random(5)
    for _ in range(50):
        parts = [[draw.choice("abcd") for _ in range(draw.randint(1, 6))] * draw.choice([1, 2, 9, 40]) for _ in "123"]
        items = [item for part in parts for item in part]
        laps, place = laps_of(items), 0
        for start, length, count in laps:
            assert start == place
            assert items[start : start + length * count] == items[start : start + length] * count
            place += length * count
        assert place == len(items)
    assert laps_of("a" * 9 + "bc" * 40 + "d" * 9) == [Laps(0, 1, 9), Laps(9, 2, 40), Laps(89, 1, 9)]
    assert laps_of("") == []


@pytest.mark.parametrize(
    ("schedule", "zero", "float8"),
    [("1f1b", 3, "none"), ("1f1b", 3, "rowwise"), ("zb-v", 2, "none"), ("dualpipe", 3, "none"), ("gpipe", 1, "none")],
)
def test_a_replay_that_counts_laps_is_one_that_makes_all(
    schedule: str, zero: int, float8: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"schedule": schedule, "zero": zero, "pp": 4, "tp": 2, "dp": 2, "microbatch_size": 1}
    sets = [f"plan.{key}={value}" for key, value in fields.items()]
    others = ("model.layers=8", "batch.global_batch_size=128", f"precision.float8={float8}", "precision.compute=bf16")
    job = load_job("quickstart-moe", (*sets, *others))
    program = job_program(job)
    for rank in range(4):
        state = sized_state(job, program, rank, 0)
        counted = replay(job, program, rank, state)
        with monkeypatch.context() as patch:
            patch.setattr(RankCourse, "laps", property(lambda course: ([Laps(0, len(course.events), 1)],) * 2))
            assert counted == replay(job, program, rank, state)
