"""The plans of `plan` under software that many people run, beside this runtime: a row a software."""

from collections.abc import Sequence

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.software import software_of
from shardwright.config.software_generations import usual_software
from shardwright.config.software_support import missing_features
from shardwright.cost.calibration import shipped
from shardwright.cost.from_job import run_of
from shardwright.layers.memo import Memo
from shardwright.planner.advice.priced_plan import PricedPlan
from shardwright.report.document import AlignedRows, Lines, Part, paragraph
from shardwright.report.plans_text import step_text
from shardwright.simulate.batch_pricing import Price, prices
from shardwright.simulate.full_step import simulated_steps

_LACKING = say("lacks it")
_UNPRICED = say("no price")  # the software has the plan, and the cost model can't price it there


def software_beside(plans: Sequence[PricedPlan]) -> Part | None:
    """The steps of plans of this runtime under each usual software, simulated in full, a column a plan;
    None for plans of another one, and with adapters, which are described for this runtime alone.

    A software that lacks something that a plan has, or for which it has no price, has no number for it; one that lacks
    something of each plan has a sentence in place of a row.
    """
    if not plans or not software_of(plans[0].job.cluster.software).is_own or plans[0].job.model.is_adapted:
        return None
    jobs = [plan.job for plan in plans]
    lacking = {name: [missing_features(software_of(name), job) for job in jobs] for name in usual_software()}
    heading = [say("step as"), *(say("plan {number}", number=place) for place, _ in enumerate(plans, 1))]
    rows = [[name, *_steps(jobs, name, missing)] for name, missing in lacking.items() if not all(missing)]
    sentences = [_has_none(name, missing) for name, missing in lacking.items() if all(missing)]
    return Lines([*([AlignedRows([heading, *rows])] if rows else []), *map(paragraph, sentences)])


def _has_none(name: str, missing: Sequence[Sequence[str]]) -> str:
    """The sentence of a software that has none of the plans, from what it lacks of each."""
    common = tuple(feature for feature in missing[0] if all(feature in others for others in missing))
    if common:
        return say("{software} has none of these plans, for it lacks {features}.", software=name, features=common)
    return say("{software} has none of these plans: it lacks something of each.", software=name)


def _steps(jobs: Sequence[JobSpec], name: str, missing: Sequence[Sequence[str]]) -> list[str]:
    """The steps of jobs as one software runs them, in words; `missing` has what it lacks of each."""
    memo = Memo()
    with_it = [
        job.model_copy(update={"cluster": job.cluster.model_copy(update={"software": name})})
        for job, lacking in zip(jobs, missing, strict=True)
        if not lacking
    ]
    words: dict[str, str] = {job.plan.model_dump_json(): _UNPRICED for job in with_it}
    priced = [
        (job, price.time)
        for job, price in zip(with_it, prices(list(map(run_of, with_it)), shipped(), memo), strict=True)
        if isinstance(price, Price)
    ]
    times = simulated_steps([job for job, _ in priced], [time for _, time in priced], shipped(), memo)
    words |= {job.plan.model_dump_json(): step_text(time.total) for (job, _), time in zip(priced, times, strict=True)}
    return [words.get(job.plan.model_dump_json(), _LACKING) for job in jobs]
