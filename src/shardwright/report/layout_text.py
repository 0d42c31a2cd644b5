"""Text of the command `layout`: the number of layers of each stage, its devices, and the gain."""

from typing import Any

from shardwright.config.units import GIB, counted
from shardwright.planner.stages.best_layout import LaidOut
from shardwright.report.plans_text import plan_words
from shardwright.report.text_columns import aligned, filled
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


def layout_text(laid_out: LaidOut) -> str:
    """A layout as text."""
    job, stages = laid_out.job, laid_out.stages
    placement = job_placement(job)
    rows = [["pp rank", "device", "layers", "a microbatch", "state and activations"]]
    for rank, device in enumerate(laid_out.devices):
        rank_layers = [str(stages.layout[stage]) for stage in placement.stages_of(rank)]
        rows.append(
            [
                str(rank),
                device,
                " + ".join(rank_layers),
                f"{1e3 * stages.rank_s[rank]:.1f} ms",
                f"{stages.rank_bytes[rank] / GIB:.1f} GiB",
            ]
        )
    heading = (
        f"{job.name}: {counted(job.model.layers, 'layer')} on {counted(job.plan.num_stages, 'stage')}; "
        f"{plan_words(job.plan)}. A step takes {laid_out.step_s:.3g} s, and "
        f"the slowest pipeline rank {100 * stages.imbalance:.1f} % longer than the mean. "
    )
    order = [part.device for part in job.cluster.parts]
    lines = [f"plan.layout = {list(stages.layout)}"]
    if order:
        lines.append(f"Order of cluster.parts, and so of the nodes' ranks: {', then '.join(order)}.")
    return "\n\n".join([filled(heading + _gain(laid_out)), aligned(rows), "\n".join(lines)])


def _gain(laid_out: LaidOut) -> str:
    if laid_out.even_step_s is None:
        return "Layers spread evenly would not fit."
    if laid_out.even_step_s <= laid_out.step_s * (1 + 1e-6):
        return "Layers spread evenly would take as long."
    return f"With layers spread evenly it would take {laid_out.even_step_s:.3g} s."
