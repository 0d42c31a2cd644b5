"""The searches of the page: for the best plans, and for the nearest plans that fit. They run in a process of their own,
which ends when nobody waits for it: `python -m shardwright.studio.plan_search` reads a question and prints its answers.
"""

import asyncio
import json
import shlex
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from time import monotonic
from typing import Any

from shardwright.api.asked_job import with_own_plan
from shardwright.api.found_plans import FoundPlans, PlanQuestion, found_plans
from shardwright.config.base import PlanError, error_text
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.job import JobSpec
from shardwright.config.load import job_to_plan, validate_fields
from shardwright.config.phrase import ENGLISH, in_language, say, spoken
from shardwright.planner.advice.priced_plan import PricedPlan
from shardwright.report.nearest_text import NearestPlans, nearest_dicts
from shardwright.report.plans_text import job_words
from shardwright.studio.dropped_file import state_texts
from shardwright.studio.page_state import PageState

_BEAT_S = 0.25  # between two lines that say how long a search has taken
_MOST_LINE = 2**26  # bytes of one answer
# The fields of a job that a search chooses.
_CHOSEN: dict[str, Any] = {"plan": True, "precision": {"float8"}, "batch": {"global_batch_size"}}


def best_plans(state: PageState, keep: bool, language: str = ENGLISH) -> Iterator[dict[str, Any]]:
    """The best plans, as fields to set where the page has none of a plan; then their reasons. With `keep` those fields
    of the plan stay that the page sets. Raises PlanError."""
    subject = state.asked.subject
    to_plan = with_own_plan(job_to_plan(state.fields, subject))
    plans = found_plans(subject, to_plan, PlanQuestion(top=8, keep=state.kept if keep else ()))
    base = validate_fields(state.without_plan().fields)[0]
    yield {"plans": [_row(plans, plan, base) for plan in _shown(plans)]}
    yield {"reasons": plans.in_language(language)}


def _shown(plans: FoundPlans) -> list[PricedPlan]:
    """The recommended plan, and after it the others, fastest first."""
    recommendation = plans.advice.recommendation
    if recommendation is None:
        return list(plans.advice.plans)
    return [recommendation.plan, *(plan for plan in plans.advice.plans if plan is not recommendation.plan)]


def _row(plans: FoundPlans, plan: PricedPlan, base: JobSpec) -> dict[str, Any]:
    recommendation = plans.advice.recommendation
    return {
        "words": job_words(plan.job),
        "recommended": recommendation is not None and plan is recommendation.plan,
        "step_s": float(plan.time.total),
        "mfu": float(plan.time.mfu),
        "process_bytes": float(plan.memory.process),
        "state": changed_texts(base, plan.job),
    }


def changed_texts(base: JobSpec, job: JobSpec) -> dict[str, str]:
    """The fields of a job that differ from those of another one, as the texts of a state, and its degree of data
    parallelism."""
    values, base_values = (flat_keys(spec.model_dump(mode="json", include=_CHOSEN)) for spec in (job, base))
    changed = {key: value for key, value in values.items() if value != base_values.get(key)}
    return state_texts(changed) | {"plan.dp": str(job.plan.dp)}


def nearest_plans_that_fit(state: PageState) -> Iterator[dict[str, Any]]:
    """The nearest plans that fit, as fields to set. Raises PlanError."""
    job = state.job()
    rows = nearest_dicts(job, NearestPlans(job).plans)
    yield {"nearest": [row | {"state": _set_texts(row["set"])} for row in rows]}


def _set_texts(options: str) -> dict[str, str]:
    """The fields of "--set plan.tp=4 --set plan.dp=2" as the texts of a state."""
    pairs = (word.partition("=") for word in shlex.split(options) if word != "--set")
    return {key: text for key, _, text in pairs}


async def answers(question: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The answers to a question; until they come, the seconds that it has taken. Its process ends with the reader."""
    words = [sys.executable, "-m", __name__]
    pipe, started = asyncio.subprocess.PIPE, monotonic()
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, limit=_MOST_LINE)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(question).encode())
        process.stdin.close()
        line = asyncio.ensure_future(process.stdout.readline())
        while True:
            await asyncio.wait([line], timeout=_BEAT_S)
            if not line.done():
                yield {"seconds": monotonic() - started}
                continue
            if not line.result():
                break
            yield json.loads(line.result())
            line = asyncio.ensure_future(process.stdout.readline())
        if await process.wait():
            yield {"faults": [in_language(say("the search ended early; the terminal says why"), question["language"])]}
    finally:
        with suppress(ProcessLookupError):
            process.kill()


def main() -> None:
    """Read a question as JSON from standard input, and print a line of JSON for each answer."""
    question = json.load(sys.stdin)
    state, language = PageState.read(question["state"]), question["language"]
    try:
        parts = (
            nearest_plans_that_fit(state)
            if question["asks"] == "fitting"
            else best_plans(state, bool(question["keep"]), language)
        )
        for part in parts:
            print(json.dumps(spoken(part, language)), flush=True)
    except PlanError as error:
        print(json.dumps(spoken({"faults": error.faults}, language)), flush=True)
    except KeyError as error:
        print(json.dumps(spoken({"faults": [error_text(error)]}, language)), flush=True)


if __name__ == "__main__":
    main()
