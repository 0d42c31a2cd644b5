"""The answer to "which plan": the best plans with their prices, the reasons, and the user's own plan."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardwright.config.job import JobSpec
from shardwright.planner.advice.priced_plan import PricedPlan
from shardwright.planner.advice.simplicity import Simplicity
from shardwright.planner.search.objectives import Objective
from shardwright.planner.search.results import SearchTally, TriedSize
from shardwright.planner.search.step_times import StepTimes

if TYPE_CHECKING:  # these modules are loaded only when a plan is explained
    from shardwright.planner.advice.reasons import Reason
    from shardwright.planner.advice.repair import Misfit
    from shardwright.planner.advice.rules import RuleOfThumb
    from shardwright.planner.search.sample import Standing


@dataclass(frozen=True)
class OwnPlan:
    """The user's own plan: its price, its standing in the space, and the reason why it does not fit, if so."""

    priced: PricedPlan
    standing: "Standing"
    misfit: "Misfit | None"


@dataclass(frozen=True)
class RefusedPlan:
    """The user's own plan if its cluster, batch or model does not allow it, and the faults."""

    job: JobSpec
    faults: tuple[str, ...]


@dataclass(frozen=True)
class SimplerPlan:
    """A plan that is simpler than the recommended one and can't be told apart from it: the confidence that the
    recommended one is faster, and how simple both are."""

    plan: PricedPlan
    confidence: float
    simplicity: Simplicity
    recommended_simplicity: Simplicity


@dataclass(frozen=True)
class Recommendation:
    """The plan to take, which no known plan beats, and a simpler one that may be as fast, if there is one."""

    plan: PricedPlan
    simpler: SimplerPlan | None = None


@dataclass(frozen=True)
class Advice:
    """The best plans, best first; the reasons why the first is best; and the user's own plan.

    `recommendation` is the first plan and, if there is one, a simpler one. `tried` are the sizes of the cluster among
    which the objective chose. `left_out` names the strategies
    that were not searched because a number is unknown. `times` has the steps that the search simulated.
    """

    job: JobSpec
    plans: list[PricedPlan]
    tally: SearchTally
    own: OwnPlan | None = None
    refused: RefusedPlan | None = None
    reasons: "list[Reason]" = field(default_factory=list)
    binding: str = ""
    rules: "list[RuleOfThumb]" = field(default_factory=list)
    recommendation: Recommendation | None = None
    left_out: list[str] = field(default_factory=list)
    tried: tuple[TriedSize, ...] = ()
    objective: Objective = field(default_factory=Objective)
    times: StepTimes | None = field(default=None, repr=False, compare=False)
