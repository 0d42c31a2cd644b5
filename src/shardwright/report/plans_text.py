"""Plans in words, in numbers for people, and as JSON."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardwright.config.job import JobSpec
from shardwright.config.model import ModelSpec
from shardwright.config.phrase import say
from shardwright.config.plan import PlanSpec
from shardwright.config.rank_order import order_words
from shardwright.config.software import software_of
from shardwright.config.software_support import missing_features
from shardwright.config.units import DAY_S, days_column, number_text
from shardwright.cost.money import Money, step_money
from shardwright.planner.advice.advice import Advice
from shardwright.planner.advice.neighbours import recompute_words
from shardwright.planner.advice.priced_plan import PricedPlan
from shardwright.planner.own_plan import ramp_extra_s
from shardwright.planner.search.objectives import Objective
from shardwright.report.document import AlignedRows, Lines, Part

if TYPE_CHECKING:  # loaded only when a plan is explained
    from shardwright.planner.advice.reasons import Reason


def plan_dict(plan: PricedPlan, objective: Objective) -> dict[str, Any]:
    """One plan of `--json`: all fields of the plan, seconds, bytes, and US dollars (null if the price is unknown).
    `run` is a run of the objective's tokens; `training_share` of its days trains, and is 1 if the objective counts no
    failures."""
    time, memory = asdict(plan.time), plan.memory.as_dict()
    return {
        "plan": plan.job.plan.model_dump(),
        "float8": plan.job.precision.float8,
        "global_batch_size": plan.job.batch.global_batch_size,
        "num_devices": plan.job.plan.world,
        "step_s": float(plan.time.total),
        "closed_form_step_s": float(plan.closed.total),
        "pessimistic_step_s": float(plan.cautious.total),
        "tokens_per_s_per_device": plan.tokens_per_s_per_device,
        "mfu": float(plan.time.mfu),
        "hfu": float(plan.time.hfu),
        "cost_per_step": plan.money.usd,
        "run": {
            "tokens": objective.run_tokens,
            "days": run_days(plan, objective),
            "training_share": objective.training_share(plan.job),
            **asdict(plan_cost(plan, objective)),
        },
        "memory": {name: float(value) for name, value in memory.items()} | {"process": float(plan.memory.process)},
        "time": {name: float(value) for name, value in time.items() if name not in ("mfu", "hfu")},
        "fits": plan.fits,
        "fit_chance": plan.fit_chance,
        "even_stages_step_s": plan.even_s,
        "software_lacks": list(lacking(plan)),
    }


def _steps(plan: PricedPlan, objective: Objective) -> float:
    """The number of full-batch steps that take as long as the objective's run, with failures if it counts them; a batch
    that grows is smaller at first."""
    full_s = float(plan.time.total)
    steps = objective.run_tokens / plan.job.tokens_per_step + ramp_extra_s(plan.job, full_s) / full_s
    return steps / objective.training_share(plan.job)


def run_days(plan: PricedPlan, objective: Objective) -> float:
    """Days of a run; with the time lost to failures only if the objective counts it."""
    return _steps(plan, objective) * float(plan.time.total) / DAY_S


def plan_cost(plan: PricedPlan, objective: Objective) -> Money:
    """The price of a run; with the time lost to failures only if the objective counts it."""
    return plan.money.times(_steps(plan, objective))


def misfit_words(reason: "Reason") -> str:
    """For a reason with an excess: that the other plan does not fit, or may not."""
    return say("may not fit") if reason.is_tight else say("does not fit")


def lacking(plan: PricedPlan) -> tuple[str, ...]:
    return missing_features(software_of(plan.job.cluster.software), plan.job)


def sure_text(share: float | None) -> str:
    """A confidence as a percentage, rounded down: one below the bound that tells plans apart must not read as the
    bound. Empty for the first plan, which has none."""
    return "" if share is None else f"{math.floor(100 * share + 1e-9)} %"


_FLAGS = ("sequence_parallel", "offload_parameters", "offload_activations")
# Words for parts that a plan lacks; without a part that is not here another part says so.
_ABSENT = {
    **dict.fromkeys(("cp", "ep"), "{part} 1"),
    "recompute": "recompute none",
    "order": "usual order",
    **dict.fromkeys(
        ("sequence_parallel", "offload_parameters", "offload_activations", "offload_optimizer"), "no {part}"
    ),
    "dispatch": "direct",
}


def plan_words(plan: PlanSpec) -> str:
    """A plan in one line: its degrees, and the other fields that differ from their defaults."""
    return ", ".join(_words_of_parts(plan).values())


def _words_of_parts(plan: PlanSpec) -> dict[str, str]:
    """The words of a plan by its parts."""
    axes = ["tp", "pp", "dp", *(axis for axis in ("cp", "ep") if getattr(plan, axis) > 1)]
    words = {axis: f"{axis} {getattr(plan, axis)}" for axis in axes}
    if plan.block < plan.stage_ranks:
        words["order"] = f"order {order_words(plan)}"
    if plan.pp > 1:
        words["schedule"] = plan.schedule + (f" v {plan.virtual_stages}" if plan.virtual_stages > 1 else "")
    words["microbatch"] = f"mb {plan.microbatch_size}"
    words["zero"] = f"zero {plan.zero}" + (f" over {plan.zero_ranks}" if plan.zero_ranks else "")
    if plan.recompute != "none":
        words["recompute"] = f"recompute {recompute_words(plan)}"
    without_effect = () if plan.tp > 1 else ("sequence_parallel",)
    words |= {name: name for name in _FLAGS if getattr(plan, name) and name not in without_effect}
    if plan.offload_optimizer:
        share = f" {plan.offload_optimizer:g}" if plan.offload_optimizer < 1 else ""
        words["offload_optimizer"] = f"offload_optimizer{share}"
    if plan.cp > 1:
        words["cp_method"] = plan.cp_method
    if plan.dispatch != "direct":
        words["dispatch"] = plan.dispatch
    return words


def changed_words(plan: PricedPlan, first: PricedPlan) -> str:
    """A plan in one line by its differences from the first one, of which line 1 tells; marked as by `marked_words`."""
    words, first_words = (_words_of_parts(one.job.plan) for one in (plan, first))
    layout, first_layout = (one.job.plan.layout for one in (plan, first))
    recipe, first_recipe = (one.job.precision.float8 for one in (plan, first))
    changes = [text for part, text in words.items() if first_words.get(part) != text]
    changes += [_ABSENT[part].format(part=part) for part in first_words if part not in words and part in _ABSENT]
    changes += [f"fp8 {recipe}"] * (recipe != first_recipe)
    words_changed: str = ", ".join(changes)
    if layout != first_layout:
        layers = say("uneven") if layout else say("even")
        words_changed = say("{plan}, {layers}", plan=words_changed, layers=layers) if changes else layers
    if not words_changed:
        return marked_words(plan)
    text = say("1 with {changes}", changes=words_changed)
    return say("{plan} *", plan=text) if lacking(plan) else text


def model_name(job: JobSpec) -> str:
    """The name of a job's model; of the job itself, if its model has none."""
    return job.name if job.model.name == ModelSpec.model_fields["name"].default else job.model.name


def job_words(job: JobSpec) -> str:
    """A job's plan in one line, with its fp8 recipe if it has one."""
    recipe = job.precision.float8
    return plan_words(job.plan) + (f", fp8 {recipe}" if recipe != "none" else "")


def layers_words(layout: Sequence[int]) -> str:
    """The layers of stages, first to last, with equal neighbours counted: "1 stage of 7, 14 of 8, 1 of 7"."""
    (first, *runs) = [(layers, len(list(stages))) for layers, stages in itertools.groupby(layout)]
    beginning = say("1 stage of {layers}", layers=first[0])
    if first[1] > 1:
        beginning = say("{stages} stages of {layers}", stages=first[1], layers=first[0])
    others = [say("{stages} of {layers}", stages=count, layers=layers) for layers, count in runs]
    return say("{listed}", listed=(beginning, *others))


def marked_words(plan: PricedPlan) -> str:
    """A job's plan in one line; uneven stages are named, and a star marks one that needs what the software lacks."""
    words = job_words(plan.job)
    if plan.job.plan.layout:
        words = say("{plan}, uneven", plan=words)
    return say("{plan} *", plan=words) if lacking(plan) else words


def sizes_part(advice: Advice) -> Part:
    """A table of the sizes of the cluster that the objective compared; the chosen size is marked."""
    tokens, tried, chosen = advice.objective.run_tokens, advice.tried, advice.job.cluster.num_devices
    time_heading, times = days_column([0.0 if s.token_s == math.inf else tokens * s.run_token_s / DAY_S for s in tried])
    rows: list[list[str]] = [[say("devices"), time_heading, say("device-hours"), say("money"), "kWh", ""]]
    for size, run_time in zip(tried, times, strict=True):
        note = "" if advice.objective.in_time(size.run_token_s) else say("too slow")
        if size.num_devices == chosen:
            note = say("chosen")
        if size.token_s == math.inf:
            rows.append([f"{size.num_devices:,}", "", "", "", "", say("no plan fits")])
            continue
        money = step_money(advice.job.cluster, tokens * size.run_token_s, size.num_devices)
        kwh = say("unknown") if money.kwh is None else number_text(money.kwh)
        rows.append(
            [f"{size.num_devices:,}", run_time, number_text(money.device_hours), usd_text(money.usd), kwh, note]
        )
    return Lines((say("The best plan at each size that was compared"), AlignedRows(rows, left=(5,))))


def step_text(seconds: Any, of_step: float | None = None) -> str:
    """Seconds as "12.345 s", or as "12.34 ms" if the step is shorter than a second, so that plans compare easily."""
    step_s = float(seconds) if of_step is None else of_step
    return f"{float(seconds):.3f} s" if step_s >= 1 else f"{1e3 * float(seconds):.2f} ms"


def usd_text(usd: Any) -> str:
    """US dollars as "unknown", "$0.36" or "$1,234"."""
    return say("unknown") if usd is None else f"${float(usd):,.0f}" if usd >= 100 else f"${float(usd):,.2f}"
