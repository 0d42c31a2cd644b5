"""Text of the command `layout`: the number of layers of each stage, its devices, and the gain."""

from typing import Any

from shardwright.config.phrase import ENGLISH, say
from shardwright.config.units import counted_phrase, memory_text, seconds_text
from shardwright.planner.stages.best_layout import LaidOut
from shardwright.report.document import AlignedRows, Lines, Part, document_text, paragraph
from shardwright.report.plans_text import plan_words
from shardwright.schedule.job_program import job_placement


def layout_dict(laid_out: LaidOut) -> dict[str, Any]:
    """A layout for `--json`: seconds of a step, and of one microbatch by rank; bytes by rank."""
    job = laid_out.job
    return {
        "plan": job.plan.model_dump(),
        "layout": list(laid_out.stages.layout),
        "parts": [part.model_dump() for part in job.cluster.parts],
        "devices": list(laid_out.devices),
        "step_s": laid_out.step_s,
        "even_step_s": laid_out.even_step_s,
        "rank_s": list(laid_out.stages.rank_s),
        "rank_bytes": list(laid_out.stages.rank_bytes),
        "imbalance": laid_out.stages.imbalance,
    }


def layout_text(laid_out: LaidOut, language: str = ENGLISH) -> str:
    """A layout as text."""
    job, stages = laid_out.job, laid_out.stages
    placement = job_placement(job)
    rows: list[list[str]] = [
        [say("pp rank"), say("device"), say("layers"), say("a microbatch"), say("state and activations")]
    ]
    for rank, device in enumerate(laid_out.devices):
        rank_layers = [str(stages.layout[stage]) for stage in placement.stages_of(rank)]
        rows.append(
            [
                str(rank),
                device,
                " + ".join(rank_layers),
                seconds_text(stages.rank_s[rank], max(stages.rank_s)),
                memory_text(int(stages.rank_bytes[rank])),
            ]
        )
    heading = say(
        "{job}: {layers} on {stages}; {plan}.",
        job=job.name,
        layers=counted_phrase(job.model.layers, "layer"),
        stages=counted_phrase(job.plan.num_stages, "stage"),
        plan=plan_words(job.plan),
    )
    step = say(
        "A step takes {step}, and the slowest pipeline rank {share:.1f} % longer than the mean.",
        step=seconds_text(laid_out.step_s),
        share=100 * stages.imbalance,
    )
    lines: list[str] = [f"plan.layout = {list(stages.layout)}"]
    if order := [part.device for part in job.cluster.parts]:
        devices = order[0]
        for device in order[1:]:
            devices = say("{devices}, then {device}", devices=devices, device=device)
        lines.append(say("Order of cluster.parts, and so of the nodes' ranks: {devices}.", devices=devices))
    parts: list[Part] = [paragraph(heading, step, _gain(laid_out)), AlignedRows(rows), Lines(lines)]
    return document_text(parts, language)


def _gain(laid_out: LaidOut) -> str:
    if laid_out.even_step_s is None:
        return say("Layers spread evenly would not fit.")
    if laid_out.even_step_s <= laid_out.step_s * (1 + 1e-6):
        return say("Layers spread evenly would take as long.")
    return say("With layers spread evenly it would take {seconds:.3g} s.", seconds=laid_out.even_step_s)
