"""The answer to a state of the page, in parts: what is quick to compute comes first, and the page shows it at once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

from shardwright.config.base import PlanError
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.job import JobSpec
from shardwright.config.link_words import link_words
from shardwright.config.load import validate_fields
from shardwright.config.units import counted
from shardwright.cost.calibration import shipped
from shardwright.explain.story import tell
from shardwright.memory.job_memories import job_accounts
from shardwright.planner.own_plan import Estimate, estimate
from shardwright.report.fit_verdict import device_entry, device_room_bytes, fit_of, verdict_text
from shardwright.report.plans_text import plan_words
from shardwright.report.prediction_notes import batch_notes, job_notes
from shardwright.report.step_cost import price_dict
from shardwright.report.timeline.job_study import study_job
from shardwright.report.timeline.page import controls_html, drawn_data
from shardwright.sharding.mesh import MeshShape
from shardwright.sharding.stage_parameters import num_active_parameters, num_parameters
from shardwright.studio.page_state import SECTIONS, PageState

Part = dict[str, Any]
_MOST_DRAWN = 60_000  # actions of a timeline that is drawn anew with each change
_MOST_PLACED = 256  # ranks that are drawn in their nodes


@dataclass(frozen=True)
class Prediction:
    """A state's job and its prediction, computed when they are first asked for."""

    state: PageState

    @cached_property
    def job(self) -> JobSpec:
        """The checked job. Raises PlanError."""
        return self.state.job()

    @cached_property
    def priced(self) -> Estimate | str:
        """The predicted time and money; or the reason why there is none."""
        if self.job.cluster.device == "unknown":
            return "time, money and the verdict on memory need a device: choose one"
        try:
            return estimate(self.job)
        except (KeyError, ValueError) as error:
            return str(error.args[0])


class PlanAnswers:
    """The answers to states. The last ones are kept, for a page asks for a state's parts one after another, and goes
    back to states that it has left."""

    def __init__(self) -> None:
        self._prediction = lru_cache(maxsize=16)(Prediction)
        self._known_part = lru_cache(maxsize=64)(self._part)

    def parts(self, state: PageState, wanted: Sequence[str]) -> Iterator[Part]:
        """The parts of `wanted`, in their order. If there are faults, they come in place of all but `values`."""
        try:
            if "values" in wanted:
                yield {"part": "values", "values": _values(state)}
            prediction = self._prediction(state)
            _ = prediction.job
        except PlanError as error:
            yield {"part": "faults", "faults": error.faults, "way_out": error.way_out}
            return
        for name in wanted:
            if name in PARTS:
                yield self._known_part(state, name)

    def _part(self, state: PageState, name: str) -> Part:
        return {"part": name} | PARTS[name](self._prediction(state))


def _values(state: PageState) -> Part:
    """The values of all fields of the page, whether or not they can run. Raises PlanError with faults of fields."""
    spec, faults = validate_fields(state.fields())
    if faults:
        raise PlanError(state.asked.subject, faults)
    values = flat_keys(spec.model_dump(mode="json", include=set(SECTIONS)))
    return values | {"device": spec.cluster.device, "devices": spec.cluster.num_devices or spec.plan.world}


def _job_part(prediction: Prediction) -> Part:
    job = prediction.job
    return {
        "name": job.name,
        "words": plan_words(job.plan),
        "parameters": num_parameters(job.model),
        "active_parameters": num_active_parameters(job.model),
        "tokens_per_step": job.tokens_per_step,
        "tokens_of_run": job.tokens_of_run,
        "ranks": job.plan.world,
        "software": job.cluster.software,
        "notes": [*prediction.state.asked.notes, *job_notes(job), *batch_notes(job)],
    }


def _step_part(prediction: Prediction) -> Part:
    priced = prediction.priced
    return {"untimed": priced} if isinstance(priced, str) else price_dict(prediction.job, priced)


def _memory_part(prediction: Prediction) -> Part:
    job = prediction.job
    memory = job_accounts(job)
    fit, room = fit_of(job, memory, prediction.priced), device_room_bytes(job)
    return {
        "ranks": [rank.as_dict() for rank in memory],
        "room_bytes": room,
        "device_bytes": None if room is None else int(device_entry(job).memory_bytes),
        "fits": fit.fits if fit else None,
        "verdict": verdict_text(job, fit) if fit else "Whether it fits is not said: choose a device.",
    }


def _timeline_part(prediction: Prediction) -> Part:
    try:
        study = study_job(prediction.job, 0.0, 1)
    except PlanError as error:
        return {"undrawn": "; ".join(error.faults)}
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


def _links_part(prediction: Prediction) -> Part:
    """The traffic of the rank that sets the pace, and the places of the first ranks in their nodes."""
    job, priced = prediction.job, prediction.priced
    story, words = tell(job), link_words(job.cluster)
    mesh, per_node = MeshShape.of(job.plan), job.cluster.devices_per_node or job.plan.world
    num_placed = min(job.plan.world, max(per_node, _MOST_PLACED // per_node * per_node))
    places = [mesh.coordinates(rank) for rank in range(min(num_placed, _MOST_PLACED))]
    seconds = None if isinstance(priced, str) else priced.step.total
    return {
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


PARTS: dict[str, Callable[[Prediction], Part]] = {
    "job": _job_part,
    "step": _step_part,
    "memory": _memory_part,
    "timeline": _timeline_part,
    "links": _links_part,
}


def warm_up() -> None:
    """Import and compute what the first answer would wait for."""
    shipped()
    for _ in PlanAnswers().parts(PageState({"job": "quickstart"}), tuple(PARTS)):
        pass
