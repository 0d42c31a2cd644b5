"""The result of `plan`: the best plans of a job, the reasons, and the plan to take."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from shardwright.api.asked_job import JobToPlan
from shardwright.api.shown import Shown
from shardwright.config.base import PlanError, error_text
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.float8_facts import FLOAT8_RECIPES, NO_FLOAT8
from shardwright.config.job import JobSpec
from shardwright.config.phrase import ENGLISH, say
from shardwright.config.plain_values import GivenOptions
from shardwright.config.software import software_of
from shardwright.cost.calibration import shipped
from shardwright.planner.advice.advice import Advice
from shardwright.planner.advice.objections import Objection, plans_without_objection
from shardwright.planner.advice.recommendation import explained, plans_of
from shardwright.planner.advice.sensitivity import Flip, flips
from shardwright.planner.search.constraints import Constraints, constraints_of
from shardwright.planner.search.objectives import NAMES, Name, Objective
from shardwright.report.plan_details import plan_details
from shardwright.report.plan_screen import SCREEN_LINES, plan_screens
from shardwright.report.recommendation_text import plan_dicts
from shardwright.report.rendered import rendered

_LOOKED_AT = 16  # plans that are found, of which those are shown that can be exported


@dataclass(frozen=True)
class PlanQuestion:
    """The options of the command `plan`: the question to a search."""

    top: int = 5
    keep: Sequence[str] = ()
    between: Sequence[str] = ()
    float8: str = "none"
    objective: str = "time"
    as_software: bool = False
    tokens: float = 0.0
    days: float = 0.0

    def read(self, subject: str) -> "PlanQuestion":
        """The options in plain values. Raises PlanError with a fault for each option that has none."""
        options = GivenOptions()
        wanted = PlanQuestion(
            options.whole(say("top, how many plans are shown,"), self.top, least=1),
            options.texts("keep", self.keep, "plan.tp=2"),
            options.texts("between", self.between, "plan.tp=1,4"),
            options.one_of("float8", self.float8, (NO_FLOAT8, *FLOAT8_RECIPES)),
            options.one_of("objective", self.objective, NAMES),
            bool(self.as_software),
            options.number("tokens", self.tokens, 1e12),
            options.number("days", self.days, 30.0),
        )
        options.check(subject)
        return wanted

    def constraints(self) -> Constraints:
        """The constraints of the search. Raises PlanError."""
        return constraints_of(self.keep, self.between, self.float8)


@dataclass(frozen=True, repr=False)
class FoundPlans(Shown):
    """The best plans for a job's model, batch and cluster. Their reasons are computed when they are first asked for."""

    subject: str
    to_plan: JobToPlan
    advice: Advice
    constraints: Constraints

    @property
    def best(self) -> JobSpec | None:
        """The job under the recommended plan; None if no plan fits."""
        recommendation = self.advice.recommendation
        return None if recommendation is None else recommendation.plan.job

    @cached_property
    def explained(self) -> Advice:
        """The plans with their reasons. Raises PlanError."""
        try:
            return explained(
                self.advice,
                self.to_plan.own_job,
                self.constraints,
                constants=shipped(),
                own_faults=self.to_plan.own_faults,
            )
        except KeyError as error:
            raise PlanError(self.subject, [error_text(error)]) from None

    @cached_property
    def flips(self) -> list[Flip]:
        """The changes that would make the second plan win; none if there is no second."""
        plans = self.advice.plans
        return flips(plans[0].job, plans[1].job, shipped()) if len(plans) > 1 else []

    @property
    def text(self) -> str:
        return self.screen()

    def in_language(self, language: str) -> str:
        return self.screen(language=language)

    def screen(self, with_details: bool = False, coloured: bool = False, language: str = ENGLISH) -> str:
        """The answer on one screen; `with_details` adds the search, every reason and what would change the answer."""
        advice = self.explained
        for parts in plan_screens(advice, self.to_plan.notes):
            text = rendered(parts, coloured, language)
            if len(text.splitlines()) <= SCREEN_LINES:
                break
        if with_details and advice.plans:
            text = f"{text}\n\n{rendered(plan_details(advice, self.flips), coloured, language)}"
        return text

    def to_dict(self) -> dict[str, Any]:
        """The plans of `plan --json`, in a list called "plans"."""
        return {"plans": self.dicts()}

    def dicts(self) -> list[dict[str, Any]]:
        """The plans that were found, fastest first."""
        return plan_dicts(self.advice)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each plan; names within a section are joined by a dot, as in plan.tp."""
        return [flat_keys(plan) for plan in self.dicts()]


def found_plans(
    subject: str,
    to_plan: JobToPlan,
    question: PlanQuestion,
    restrict: Callable[[Constraints], Constraints] | None = None,
    objection: Callable[[JobSpec], Objection | None] | None = None,
) -> FoundPlans:
    """Search for a job's best plans. `restrict` adds further constraints, and a plan to which there is an
    `objection` is not shown. Raises PlanError."""
    question = question.read(subject)
    constraints = question.constraints().with_kept(to_plan.kept)
    if restrict is not None:
        constraints = restrict(constraints)
    if question.as_software:
        constraints = constraints.as_software(software_of(to_plan.job.cluster.software))
    objective = Objective(cast(Name, question.objective), question.tokens, question.days)
    objective = objective.with_tokens_of(to_plan.job)
    try:
        if objection is None:
            advice = plans_of(to_plan.job, constraints, shipped(), objective, num_shown=question.top)
        else:
            num_shown = max(question.top, _LOOKED_AT)
            advice, fault = plans_without_objection(
                to_plan.job, constraints, shipped(), objective, num_shown, objection=objection
            )
            if fault is not None and not advice.plans:
                lacking = say("no plan that was found can be written as it is: {objection}", objection=fault.text)
                raise PlanError(subject, [lacking])
    except KeyError as error:
        raise PlanError(subject, [error_text(error)]) from None
    advice = replace(advice, plans=advice.plans[: question.top])
    return FoundPlans(subject, to_plan, advice, constraints)
