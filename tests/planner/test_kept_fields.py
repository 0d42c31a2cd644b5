"""Every value that a field of a plan may have can be kept: then plans that have it are found, or a sentence says why
none does and what else may be kept."""

import re
from typing import Any

import pytest

from shardwright.config.base import PlanError
from shardwright.config.context_facts import CONTEXT_METHODS
from shardwright.config.job import JobSpec
from shardwright.config.rank_order import full_order
from shardwright.config.recompute_facts import RECOMPUTES
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.cost.calibration import shipped
from shardwright.planner.search.constraints import Constraints, constraints_of
from shardwright.planner.search.search import search
from support.planned import small_job

pytestmark = pytest.mark.long

# Values of each field that a search may keep; some of them no plan of the small jobs has.
VALUES: dict[str, tuple[Any, ...]] = {
    "schedule": SCHEDULES.names,
    "recompute": RECOMPUTES.names,
    "recompute_operators": (["attention"], ["norm"], ["activation", "norm"], []),
    "recompute_every": (1, 2, 3, 4),
    "offload_activations": (False, True),
    "cp_method": CONTEXT_METHODS.names,
    "dispatch": ("direct", "node-aware"),
    "tp": (1, 2, 3, 8),
    "pp": (1, 2, 4, 8),
    "cp": (1, 2, 8),
    "dp": (1, 4, 5, 8),
    "ep": (1, 2, 8),
    "expert_tp": (0, 1, 2),
    "order": ("pp-dp", "dp-tp", "pp-cp"),
    "microbatch_size": (1, 3, 8),
    "sequence_parallel": (False, True),
    "virtual_stages": (1, 2, 3, 5),
    "zero": (0, 1, 2, 3),
    "zero_ranks": (0, 2, 4, 16),
    "offload_optimizer": (0.0, 0.5, 1.0),
    "offload_parameters": (False, True),
}

WAYS_OUT = ("keep one of ", "use one of ", "keep plan.", "keep less")
OF_EXPERTS = ("ep", "expert_tp", "dispatch")


def outcome(model: str, constraints: Constraints) -> JobSpec | list[str] | None:
    """The fastest plan that is found, if one fits; or the faults."""
    try:
        result = search(small_job(model), constraints, shipped(), num_shown=1).candidates
    except PlanError as error:
        return list(error.faults)
    return result[0].job if result else None


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", VALUES)
def test_each_value_is_kept_or_refused(name: str) -> None:
    for value in VALUES[name]:
        results = outcome("experts" if name in OF_EXPERTS else "dense", Constraints({name: value}))
        if isinstance(results, list):
            assert results and all(any(way in fault for way in WAYS_OUT) for fault in results), results
        if not isinstance(results, JobSpec):
            continue
        kept = getattr(results.plan, name)
        is_whole = name == "expert_tp" and {value, kept} <= {0, results.plan.tp}
        is_made_of_two = name == "virtual_stages" and results.plan.stages_per_rank == value
        is_same_order = name == "order" and kept == full_order(value)
        assert kept == value or is_whole or is_same_order or is_made_of_two, (name, value, kept)


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (["plan.schedule=pipedream"], "other numbers than one rank"),
        (["plan.schedule=auto"], "a solver"),
        (["plan.recompute=budget"], "`shardwright estimate`"),
        (["plan.recompute=layers"], "`shardwright estimate`"),
        (["plan.schedule=dualpipe", "plan.pp=1"], "plan.schedule=dualpipe beside plan.pp as kept; use one of 1f1b"),
        (["plan.pp=1", "plan.schedule=dualpipe"], "plan.pp=1 beside plan.schedule as kept; use one of 2, 4"),
        (["plan.sequence_parallel=true", "plan.tp=1"], "use one of false"),
        (["plan.recompute_every=3"], "use one of 1, 4, 2"),
        (["plan.tp=3"], "use one of 1, 2, 4"),
        (
            ["plan.tp=4", "plan.pp=4"],
            "plan.tp=4 beside plan.pp as kept (tp 4 x pp 4 = 16 ranks, of 8); use one of 1, 2",
        ),
        (["plan.tp=2", "plan.pp=2", "plan.cp=1", "plan.dp=1"], "(dp 1 x tp 2 x pp 2 x cp 1 = 4 ranks, of 8)"),
    ],
)
def test_what_no_plan_has(kept: list[str], words: str) -> None:
    """A kept value that leaves no plan is a fault, which names values that may be kept instead."""
    faults = outcome("dense", constraints_of(kept, []))
    assert isinstance(faults, list) and any(words in fault for fault in faults), faults


@pytest.mark.parametrize(
    ("keep", "between", "fault"),
    [
        (["plan.zero=1", "plan.zero=3"], [], "--keep plan.zero is given as 1 and as 3, and a plan has one of them"),
        ([], ["plan.microbatch_size=4,1"], "begins above its end; use --between plan.microbatch_size=1,4"),
    ],
)
def test_constraints_that_exclude_themselves(keep: list[str], between: list[str], fault: str) -> None:
    with pytest.raises(PlanError, match=re.escape(fault)):
        constraints_of(keep, between)
    assert constraints_of(["plan.zero=1", "plan.zero=1"], []).keep == {"zero": 1}


def test_a_way_out_can_be_typed() -> None:
    """Values are shown as --keep takes them: a list of operators, too."""
    faults = outcome("dense", constraints_of(['plan.recompute_operators=["qkv"]'], []))
    assert isinstance(faults, list) and 'plan.recompute_operators=["qkv"]' in faults[0]
    shown = faults[0].partition("use one of ")[2]
    assert constraints_of([f"plan.recompute_operators={shown.split('], ')[0]}]"], []).keep["recompute_operators"]
