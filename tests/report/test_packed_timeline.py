"""A timeline as columns for a page: unpacked, it has every action, wait, message and count, at its time."""

from typing import Any

import pytest

from shardwright.config.load import load_job
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.cost.calibration import shipped
from shardwright.report.timeline.job_study import study_job
from shardwright.report.timeline.packed_timeline import packed_timeline
from shardwright.report.timeline.step_drawing import step_drawing
from shardwright.report.timeline.study import study_schedule
from shardwright.report.timeline.trace import messages
from shardwright.schedule.buffer_lifetimes import Buffer
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.simulate.bubbles import Work
from shardwright.simulate.full_step import simulated_step
from shardwright.simulate.timeline import Resource, Timeline
from shardwright.simulate.waits import Cause
from support.packed_columns import Columns, unpacked_columns, unpacked_ranks

OTHERS = {"recompute": ("1f1b", "stage", False), "gathers": ("1f1b", "none", True)}


def timeline_of(name: str) -> Timeline:
    schedule, recompute, gathers = OTHERS.get(name, (name, "none", False))
    virtual_stages = 1 if SCHEDULES[schedule].stages_per_rank else 2
    shape = PipelineShape(4, 8, virtual_stages)
    return study_schedule(schedule, shape, Work(latency=0.25), recompute, gathers).timeline


def blocks(columns: Columns, kinds: list[Any], tick: float) -> list[tuple[Any, ...]]:
    """(start, end, parts, step) of each block, parts without their colours."""
    rows = []
    for n, start in enumerate(columns["from"]):
        microbatches = [columns["microbatch"][n], *(columns["second"][n : n + 1] if "second" in columns else ())]
        parts = [(letter, stage, microbatches[k]) for k, (_, letter, stage) in enumerate(kinds[columns["kind"][n]])]
        step = columns["step"][n] if "step" in columns else 0
        rows.append((start * tick, columns["to"][n] * tick, parts, step))
    return rows


@pytest.mark.parametrize("name", [*SCHEDULES.names, *OTHERS])
def test_nothing_is_lost_in_columns(name: str) -> None:
    timeline = timeline_of(name)
    colours: dict[tuple[str, str], int] = {}
    packed = packed_timeline(timeline, colours)
    tick = packed["tick"]
    assert tick <= timeline.makespan * 1e-7

    def close(times: list[float]) -> Any:
        return pytest.approx(times, abs=tick)

    for row, rank in zip(timeline.ranks, unpacked_ranks(packed), strict=True):
        spans = [span for span in row.spans if span.resource is Resource.COMPUTE and span.end > span.start]
        drawn = blocks(rank["busy"], packed["kinds"], tick)
        parts = [[(str(p.kind), p.stage, p.microbatch) for p in s.action.computes() or (s.action,)] for s in spans]
        assert [(part, step) for _, _, part, step in drawn] == [
            (part, span.step) for part, span in zip(parts, spans, strict=True)
        ]
        assert [start for start, *_ in drawn] == close([span.start for span in spans])
        assert [end for _, end, *_ in drawn] == close([span.end for span in spans])
        idle, alive = rank["idle"], rank["alive"]
        assert [list(Cause)[cause] for cause in idle["cause"]] == [gap.cause for gap in row.idle]
        assert [tick * at for at in idle["from"]] == close([gap.start for gap in row.idle])
        assert [tick * at for at in idle["to"]] == close([gap.end for gap in row.idle])
        counts = dict(row.kept[Buffer.ACTIVATIONS].count)
        assert alive["count"] == list(counts.values())
        assert [tick * at for at in alive["at"]] == close(list(counts))
        moves = [span for span in row.spans if span.resource in (Resource.COLLECTIVES, Resource.RELEASE)]
        expected = [(span.action.stage, str(span.action.kind)) for span in moves] if timeline.program.gathers else []
        drawn_moves = blocks(rank["moves"], packed["kinds"], tick)
        assert sorted((stage, letter) for _, _, ((letter, stage, _),), _ in drawn_moves) == sorted(expected)
    sent = unpacked_columns(packed["messages"])
    steps = sent.get("step") or [0] * len(sent["from"])
    rows = sorted(
        (*packed["routes"][route][:3], packed["routes"][route][3], microbatch, step, start * tick)
        for route, microbatch, step, start in zip(sent["route"], sent["microbatch"], steps, sent["from"], strict=True)
    )
    wanted = sorted((m.sender, m.receiver, int(m.backward), *m.about, m.send.start) for m in messages(timeline))
    assert [row[:6] for row in rows] == [row[:6] for row in wanted]
    assert [row[6] for row in rows] == close([row[6] for row in wanted])


def test_a_step_is_drawn_whole() -> None:
    """Its actions, and after them what the prediction has besides; the study of the job has the same times."""
    job = load_job("gpt3-175b-1024", ("batch.global_batch_size=256",))
    step = simulated_step(job, shipped())
    drawing = step_drawing(job, step)
    assert drawing.times.end == study_job(job, 0.0, 1).simulated.times.end
    assert drawing.bubble_share == pytest.approx(float(step.bubble / step.total))
    tail = dict(drawing.section.tail)
    assert drawing.times.makespan + sum(tail.values()) == pytest.approx(float(step.total))
    assert tail["optimizer"] == pytest.approx(float(step.optimizer))
    assert "data" not in tail  # gradients are reduced beside the actions, where they are drawn
    assert drawing.axes == {"tp": 8, "cp": 1, "dp": 8}
    measured = drawing.performed(drawing.times)
    assert measured.bubble_share == pytest.approx(float(step.bubble) / drawing.times.makespan)


def test_blocks_say_the_communication_within_them() -> None:
    """By stage, the exposed communication of forward and backward adds up to that of the step."""
    job = load_job("gpt3-175b-1024", ("plan.recompute=none", "batch.global_batch_size=256"))
    step = simulated_step(job, shipped())
    drawing = step_drawing(job, step)
    section, costs = drawing.section, drawing.drawn.actions
    assert costs is not None
    exposed = [f + b for f, b in zip(costs.exposed_forward, costs.exposed_backward, strict=True)]
    assert max(exposed) * job.num_microbatches == pytest.approx(float(step.tensor), rel=0.05)
    assert set(section.exposed) == {"F", "C", "B", "I"} and all(0 < share < 1 for share in section.exposed["F"])
    assert not step_drawing(load_job("quickstart"), "no device").section.exposed
