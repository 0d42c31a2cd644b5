"""The parts of a plan's prediction as JSON, which the components in `report/page` show on the planning page and in the
reports of runs. What is quick to compute comes first in PARTS."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.link_words import link_words
from shardwright.config.units import counted
from shardwright.explain.story import tell
from shardwright.memory.job_memories import job_accounts
from shardwright.planner.own_plan import Estimate, estimate
from shardwright.report.fit_verdict import device_entry, device_room_bytes, fit_of, verdict_text
from shardwright.report.plans_text import plan_words
from shardwright.report.prediction_notes import batch_notes, job_notes
from shardwright.report.step_cost import price_dict
from shardwright.report.timeline.job_study import JobStudy, study_job
from shardwright.report.timeline.page import controls_html, drawn_data
from shardwright.sharding.mesh import MeshShape
from shardwright.sharding.stage_parameters import num_active_parameters, num_parameters

Part = dict[str, Any]
_MOST_DRAWN = 60_000  # actions of a timeline that is drawn anew with each change
_MOST_PLACED = 256  # ranks that are drawn in their nodes


@dataclass(frozen=True)
class PredictedPlan:
    """A checked job and its price, which is computed when it is first asked for. `notes` are about values that nobody
    stated."""

    job: JobSpec
    notes: Sequence[str] = ()

    @cached_property
    def priced(self) -> Estimate | str:
        """The predicted time and money; or the reason why there is none."""
        if self.job.cluster.device == "unknown":
            return "time, money and the verdict on memory need a device, and cluster.device is unknown"
        try:
            return estimate(self.job)
        except (KeyError, ValueError) as error:
            return str(error.args[0])


def _job_part(plan: PredictedPlan) -> Part:
    job = plan.job
    return {
        "name": job.name,
        "words": plan_words(job.plan),
        "parameters": num_parameters(job.model),
        "active_parameters": num_active_parameters(job.model),
        "tokens_per_step": job.tokens_per_step,
        "tokens_of_run": job.tokens_of_run,
        "ranks": job.plan.world,
        "software": job.cluster.software,
        "notes": [*plan.notes, *job_notes(job), *batch_notes(job)],
    }


def _step_part(plan: PredictedPlan) -> Part:
    return {"untimed": plan.priced} if isinstance(plan.priced, str) else price_dict(plan.job, plan.priced)


def _memory_part(plan: PredictedPlan) -> Part:
    job = plan.job
    memory = job_accounts(job)
    fit, room = fit_of(job, memory, plan.priced), device_room_bytes(job)
    return {
        "ranks": [rank.as_dict() for rank in memory],
        "room_bytes": room,
        "device_bytes": None if room is None else int(device_entry(job).memory_bytes),
        "fits": fit.fits if fit else None,
        "verdict": verdict_text(job, fit) if fit else "Whether it fits is not said: choose a device.",
    }


def _timeline_part(plan: PredictedPlan) -> Part:
    try:
        return timeline_part(study_job(plan.job, 0.0, 1))
    except PlanError as error:
        return {"undrawn": "; ".join(error.faults)}


def timeline_part(study: JobStudy) -> Part:
    """The drawn timeline of a step."""
    num_actions = sum(map(len, study.simulated.program.ranks))
    if num_actions > _MOST_DRAWN:
        most = f"a page draws at most {_MOST_DRAWN:,}; `shardwright simulate --html` draws more"
        return {"undrawn": f"the step has {counted(num_actions, 'action')}, and {most}"}
    sections = study.sections()
    bubble = study.simulated.bubble
    return {
        "data": drawn_data(sections),
        "legend": controls_html(sections),
        "unit": "s" if study.is_seconds else "forwards",
        "bubble_share": bubble.share if bubble else None,
        "shape": study.simulated.shape,
        "note": study.note,
    }


def _links_part(plan: PredictedPlan) -> Part:
    """The traffic of the rank that sets the pace, and the places of the first ranks in their nodes."""
    job = plan.job
    story, words = tell(job), link_words(job.cluster)
    mesh, per_node = MeshShape.of(job.plan), job.cluster.devices_per_node or job.plan.world
    num_placed = min(job.plan.world, max(per_node, _MOST_PLACED // per_node * per_node))
    places = [mesh.coordinates(rank) for rank in range(min(num_placed, _MOST_PLACED))]
    return {
        "rank": story.rank,
        "domain": words.domain,
        "inside": words.inside,
        "between": words.between,
        "step_s": None if isinstance(plan.priced, str) else plan.priced.step.total,
        "links": [asdict(link) for link in story.links],
        "crossings": [asdict(crossing) for crossing in story.crossings],
        "devices_per_node": per_node,
        "ranks": job.plan.world,
        "axes": {axis: size for axis, size in mesh.sizes.items() if size > 1},
        "places": places,
    }


PARTS: dict[str, Callable[[PredictedPlan], Part]] = {
    "job": _job_part,
    "step": _step_part,
    "memory": _memory_part,
    "timeline": _timeline_part,
    "links": _links_part,
}
