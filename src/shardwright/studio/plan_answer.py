"""The answer to a state of the page, in parts: what is quick to compute comes first, and the page shows it at once."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from shardwright.config.base import PlanError
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.job import JobSpec
from shardwright.config.link_words import link_words
from shardwright.config.load import validate_fields
from shardwright.config.units import counted
from shardwright.cost.calibration import shipped
from shardwright.explain.story import tell
from shardwright.memory.job_memory import job_memory
from shardwright.planner.own_plan import Estimate, estimate
from shardwright.report.fit_verdict import device_entry, device_room_bytes, fit_of, verdict_text
from shardwright.report.plans_text import plan_words
from shardwright.report.prediction_notes import batch_notes, job_notes
from shardwright.report.step_cost import price_dict
from shardwright.report.timeline.job_study import study_job
from shardwright.report.timeline.page import controls_html, drawn_data
from shardwright.sharding.mesh import MeshShape
from shardwright.sharding.stage_parameters import num_active_parameters, num_parameters
from shardwright.studio.page_state import PageState

Part = dict[str, Any]
_MOST_DRAWN = 60_000  # actions of a timeline that is drawn anew with each change
_MOST_PLACED = 256  # ranks that are drawn in their nodes


def answer(state: PageState, wanted: frozenset[str]) -> Iterator[Part]:
    """The parts: `job` or `faults`, then `step` and `memory`, and those of `wanted`: `timeline`, `links`."""
    try:
        yield {"part": "values", "values": _values(state)}
        job = state.job()
    except PlanError as error:
        yield {"part": "faults", "faults": error.faults, "way_out": ""}
        return
    yield _job_part(state, job)
    priced = _priced(job)
    yield _step_part(job, priced)
    yield _memory_part(job, priced)
    for name, part in (("timeline", _timeline_part), ("links", partial(_links_part, priced=priced))):
        if name in wanted:
            yield part(job)


def _values(state: PageState) -> Part:
    """The values of all fields of the page, whether or not they can run. Raises PlanError with faults of fields."""
    spec, faults = validate_fields(state.fields())
    if faults:
        raise PlanError(state.asked.subject, faults)
    values = flat_keys(spec.model_dump(mode="json", include={"model", "cluster", "plan", "batch", "precision"}))
    values |= {"device": spec.cluster.device, "devices": spec.cluster.num_devices or spec.plan.world}
    return values


def _job_part(state: PageState, job: JobSpec) -> Part:
    return {
        "part": "job",
        "name": job.name,
        "words": plan_words(job.plan),
        "parameters": num_parameters(job.model),
        "active_parameters": num_active_parameters(job.model),
        "tokens_per_step": job.tokens_per_step,
        "ranks": job.plan.world,
        "notes": [*state.asked.notes, *job_notes(job), *batch_notes(job)],
    }


def _priced(job: JobSpec) -> Estimate | str:
    """The prediction; or the reason why there is none."""
    if job.cluster.device == "unknown":
        return "time, money and the verdict on memory need a device: choose one"
    try:
        return estimate(job)
    except (KeyError, ValueError) as error:
        return str(error.args[0])


def _step_part(job: JobSpec, priced: Estimate | str) -> Part:
    if isinstance(priced, str):
        return {"part": "step", "untimed": priced}
    return {"part": "step"} | price_dict(job, priced)


def _memory_part(job: JobSpec, priced: Estimate | str) -> Part:
    memory = job_memory(job)
    fit, room = fit_of(job, memory, priced), device_room_bytes(job)
    return {
        "part": "memory",
        "ranks": [rank.as_dict() for rank in memory],
        "room_bytes": room,
        "device_bytes": None if room is None else int(device_entry(job).memory_bytes),
        "fits": fit.fits if fit else None,
        "verdict": verdict_text(job, fit) if fit else "Whether it fits is not said: choose a device.",
    }


def _timeline_part(job: JobSpec) -> Part:
    try:
        study = study_job(job, 0.0, 1)
    except PlanError as error:
        return {"part": "timeline", "undrawn": "; ".join(error.faults)}
    num_actions = sum(map(len, study.simulated.program.ranks))
    if num_actions > _MOST_DRAWN:
        most = f"a page draws at most {_MOST_DRAWN:,}; `shardwright simulate --html` draws more"
        return {"part": "timeline", "undrawn": f"the step has {counted(num_actions, 'action')}, and {most}"}
    sections = study.sections()
    bubble = study.simulated.bubble
    return {
        "part": "timeline",
        "data": drawn_data(sections),
        "legend": controls_html(sections),
        "unit": "s" if study.is_seconds else "forwards",
        "bubble_share": bubble.share if bubble else None,
        "shape": study.simulated.shape,
        "note": study.note,
    }


def _links_part(job: JobSpec, priced: Estimate | str) -> Part:
    """The traffic of the rank that sets the pace, and the places of the first ranks in their nodes."""
    story, words = tell(job), link_words(job.cluster)
    mesh, per_node = MeshShape.of(job.plan), job.cluster.devices_per_node or job.plan.world
    num_placed = min(job.plan.world, max(per_node, _MOST_PLACED // per_node * per_node))
    places = [mesh.coordinates(rank) for rank in range(min(num_placed, _MOST_PLACED))]
    seconds = None if isinstance(priced, str) else priced.step.total
    return {
        "part": "links",
        "rank": story.rank,
        "domain": words.domain,
        "inside": words.inside,
        "between": words.between,
        "step_s": seconds,
        "links": [asdict(link) for link in story.links],
        "crossings": [asdict(crossing) for crossing in story.crossings],
        "devices_per_node": per_node,
        "ranks": job.plan.world,
        "axes": {axis: size for axis, size in mesh.sizes.items() if size > 1},
        "places": places,
    }


def warm_up() -> None:
    """Import and compute what the first answer would wait for."""
    shipped()
    for _ in answer(PageState({"job": "gpt3-175b-1024"}), frozenset({"timeline"})):
        pass
