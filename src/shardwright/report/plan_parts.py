"""The parts of a plan's prediction as JSON, which the components in `report/page` show on the planning page and in the
reports of runs. The quickest to compute comes first in PARTS."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from shardwright.config.base import PlanError, error_text
from shardwright.config.job import JobSpec
from shardwright.config.link_words import link_words
from shardwright.config.phrase import ENGLISH, each, fixed, say, sentences_of
from shardwright.config.software import software_of
from shardwright.cost.calibration import shipped
from shardwright.explain.step_traffic import link_uses, step_traffic
from shardwright.layers.memo import Memo
from shardwright.memory.job_memories import job_accounts
from shardwright.planner.own_plan import PricedStep, priced_step
from shardwright.report.fit_verdict import Fit, fit_of, verdict_sentences
from shardwright.report.plans_text import plan_words
from shardwright.report.prediction_notes import batch_notes, job_notes
from shardwright.report.step_cost import step_dict
from shardwright.report.timeline.page import controls_html, drawn_data
from shardwright.report.timeline.step_drawing import StepDrawing, step_drawing
from shardwright.sharding.memory_account import RankMemory
from shardwright.sharding.mesh import MeshShape
from shardwright.sharding.stage_parameters import num_active_parameters, num_parameters
from shardwright.simulate.closed_form import StepTime
from shardwright.simulate.full_step import simulated_step

Part = dict[str, Any]
_MOST_DRAWN = 60_000  # actions of a timeline that is drawn anew with each change
_MOST_PLACED = 256  # ranks that are drawn in their nodes


@dataclass(frozen=True)
class PredictedPlan:
    """A checked job, with its step and its price, which are computed when they are first asked for. `notes` are about
    values that nobody stated. `unpriced` is another plan with the same step, if the caller has one.
    Legends are in a language; other texts are phrases."""

    job: JobSpec
    notes: Sequence[str] = ()
    unpriced: "PredictedPlan | None" = None
    language: str = ENGLISH

    @cached_property
    def memo(self) -> Memo:
        """The prices of pieces that the step and the timeline are made of."""
        return self.unpriced.memo if self.unpriced is not None else Memo()

    @cached_property
    def step(self) -> StepTime | str:
        """The predicted time of the step; or the reason why there is none."""
        if self.unpriced is not None:
            return self.unpriced.step
        if self.job.cluster.device == "unknown":
            return say("time, money and the verdict on memory need a device, and cluster.device is unknown")
        try:
            return simulated_step(self.job, shipped(), self.memo)
        except (KeyError, ValueError) as error:
            return error_text(error)

    @property
    def known_step(self) -> StepTime | None:
        """The time of the step, if it is computed already; None if there is none, too."""
        step = vars(self if self.unpriced is None else self.unpriced).get("step")
        return None if isinstance(step, str) else step

    def take_step(self, step: StepTime) -> None:
        """Take the time of the step from a process that has computed it."""
        vars(self if self.unpriced is None else self.unpriced).setdefault("step", step)

    @cached_property
    def priced(self) -> PricedStep | str:
        """The predicted time and money; or the reason why there is none."""
        if isinstance(self.step, str):
            return self.step
        try:
            return priced_step(self.job, self.step)
        except (KeyError, ValueError) as error:
            return error_text(error)


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
    return {"untimed": plan.priced} if isinstance(plan.priced, str) else step_dict(plan.job, plan.priced)


def _memory_part(plan: PredictedPlan) -> Part:
    job = plan.job
    # The account of this runtime does not depend on the step; for other software the prediction takes its place.
    priced = "" if software_of(job.cluster.software).is_own else plan.priced
    accounts = job_accounts(job) if isinstance(priced, str) else []
    fit = fit_of(job, accounts, priced)
    return {
        "ranks": _memory_rows(accounts, fit),
        "offered_bytes": fit.offered_bytes if fit else None,
        "fits": fit.fits if fit else None,
        "verdict": _verdict(job, fit),
    }


def _verdict(job: JobSpec, fit: Fit | None) -> str:
    if fit is None:
        return say("Nothing says if it fits: choose a device.")
    return sentences_of(verdict_sentences(job, fit))


def _memory_rows(accounts: Sequence[RankMemory], fit: Fit | None) -> list[Part]:
    """The bytes of each rank's process by kind; without a device, those that its plan holds."""
    if fit is None:
        return [account.as_dict() | {"process_bytes": account.total_bytes} for account in accounts]
    if fit.predicted:
        return [
            {f"{kind}_bytes": int(size) for kind, size in memory.as_dict().items()}
            | {"process_bytes": int(memory.process)}
            for memory in fit.predicted
        ]
    return [
        account.as_dict() | {"overhead_bytes": fit.beside_bytes, "process_bytes": need.device_bytes}
        for account, need in zip(accounts, fit.needs, strict=True)
    ]


def _timeline_part(plan: PredictedPlan) -> Part:
    try:
        return timeline_part(step_drawing(plan.job, plan.step, plan.memo), plan.language)
    except PlanError as error:
        return {"undrawn": each(error.faults)}


def timeline_part(drawing: StepDrawing, language: str = ENGLISH) -> Part:
    """The drawn timeline of a step, with its legend in a language."""
    num_actions = sum(map(len, drawing.program.ranks))
    if num_actions > _MOST_DRAWN:
        fault = say(
            "the step has {actions:,} actions, and a page draws at most {most:,}; `shardwright simulate --html` draws "
            "more",
            actions=num_actions,
            most=_MOST_DRAWN,
        )
        return {"undrawn": fault}
    sections, is_seconds = [drawing.section], drawing.drawn.is_seconds
    return {
        "data": drawn_data(sections),
        "legend": controls_html(sections, language),
        "unit": "s" if is_seconds else "forwards",
        "bubble_share": drawing.bubble_share,
        "shape": drawing.shape,
        "axes": drawing.axes,
        "note": drawing.drawn.note,
    }


def _links_part(plan: PredictedPlan) -> Part:
    """The traffic of the rank that sets the pace, and the places of the first ranks in their nodes."""
    job = plan.job
    step = None if isinstance(plan.step, str) else plan.step
    traffic, words = step_traffic(job, step), link_words(job.cluster)
    step_s = None if step is None else float(step.total)
    mesh, per_node = MeshShape.of(job.plan), job.cluster.devices_per_node or job.plan.world
    num_placed = min(job.plan.world, max(per_node, _MOST_PLACED // per_node * per_node))
    places = [mesh.coordinates(rank) for rank in range(min(num_placed, _MOST_PLACED))]
    return {
        "rank": traffic.rank,
        "domain": fixed(words.domain),
        "domains": fixed(words.domains),
        "inside": fixed(words.inside),
        "between": fixed(words.between),
        "step_s": step_s,
        "uses": [asdict(use) for use in link_uses(job, traffic.links, traffic.crossings, step_s)],
        "crossings": [asdict(crossing) | {"phase": fixed(crossing.phase)} for crossing in traffic.crossings],
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
