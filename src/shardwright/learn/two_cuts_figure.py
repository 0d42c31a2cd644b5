"""Tensor and pipeline parallelism of one degree side by side, inside a node and across two, as a drawn table."""

from collections.abc import Sequence
from functools import partial

from shardwright.config.percent import percent_text
from shardwright.config.phrase import in_language, say
from shardwright.config.units import memory_text, seconds_text
from shardwright.cost.calibration import shipped
from shardwright.explain.step_traffic import step_traffic
from shardwright.learn.drawing import Drawing
from shardwright.learn.playable_figure import FigureJob
from shardwright.learn.playable_memory import fullest
from shardwright.report import svg
from shardwright.simulate.full_step import simulated_step

_MODEL, _DEVICE, _DEVICES = "llama2-7b", "h100-sxm", 16
_LEFT, _COLUMN, _ROW, _TOP = 330.0, 112.0, 27.0, 76.0
TWO_CUTS = tuple((axis, degree) for degree in (8, 16) for axis in ("tp", "pp"))


def two_cuts_job(axis: str, degree: int) -> FigureJob:
    """The model under one of the two, with replicas on the other devices."""
    sets = [
        f"plan.{axis}={degree}",
        f"plan.dp={_DEVICES // degree}",
        f"plan.sequence_parallel={str(axis == 'tp').lower()}",
        "plan.zero=1",
        "plan.microbatch_size=1",
        "plan.recompute=selective",
        "batch.global_batch_size=256",
    ]
    return FigureJob(_MODEL, _DEVICES, _DEVICE, sets)


def two_cuts_rows(axis: str, degree: int) -> list[tuple[str, str]]:
    """The figures of a column with their names."""
    job = two_cuts_job(axis, degree).spec
    step, memory = simulated_step(job, shipped()), fullest(job).as_dict()
    crossings = [crossing for crossing in step_traffic(job, step).crossings if crossing.axis == axis]
    total_s = float(step.total)
    return [
        (say("collectives or messages of a rank in a step"), f"{sum(crossing.calls for crossing in crossings):,}"),
        (say("sent by a rank in a step"), memory_text(round(sum(crossing.sent.total for crossing in crossings)))),
        (say("communication that nothing hides"), percent_text((step.tensor + step.messages) / total_s)),
        (say("bubble"), percent_text(step.bubble / total_s)),
        (say("weights of the fullest rank"), memory_text(memory["parameters_bytes"])),
        (say("activations of the fullest rank"), memory_text(memory["activations_bytes"])),
        (say("a step"), seconds_text(total_s)),
        ("MFU", percent_text(step.mfu)),
    ]


def two_cuts_figure() -> Drawing:
    """A column for each of the two, by degree."""
    return partial(_drawn, [two_cuts_rows(*one) for one in TWO_CUTS])


def _drawn(columns: Sequence[Sequence[tuple[str, str]]], language: str) -> str:
    title = say(
        "{model} on {devices} {device}, nodes of 8: cut by tp or by pp",
        model=_MODEL,
        devices=_DEVICES,
        device=_DEVICE,
    )
    width, parts = _LEFT + _COLUMN * len(columns) + 16, [svg.text(16, 26, in_language(title, language), "name", 15)]
    for number, (axis, degree) in enumerate(TWO_CUTS):
        heading = f"{axis} {degree}, dp {_DEVICES // degree}"
        parts.append(svg.text(_LEFT + _COLUMN * (number + 1), _TOP - 20, heading, "name", 13, "end"))
    for place, (name, _) in enumerate(columns[0]):
        y = _TOP + _ROW * place
        parts.append(svg.horizontal_line("grid", svg.Box(16, 0, width - 32, 0), y - 12))
        parts.append(svg.text(16, y + 6, in_language(name, language), "name", 13))
        for number, rows in enumerate(columns):
            x = _LEFT + _COLUMN * (number + 1)
            parts.append(svg.text(x, y + 6, in_language(rows[place][1], language), size=13, anchor="end"))
    return svg.document(in_language(title, language), width, _TOP + _ROW * len(columns[0]) + 2, parts)
