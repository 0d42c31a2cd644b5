"""Many plans at once: what they share in words, and a column of numbers for each of their degrees.

A block is what the cost model prices in one call. Its words choose formulas (a schedule, a policy of recomputation) and
its columns go into them.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.config.job import JobSpec
from shardwright.config.plan import STAGES_PER_RANK, UNSEARCHED, PlanSpec
from shardwright.config.rank_order import ORDERS
from shardwright.cost.from_job import run_of
from shardwright.workload.memo import Memo
from shardwright.workload.query import SCHEDULE_NAMES, PlanGrid, Run

Column = NDArray[Any]
Columns = dict[str, Column]  # by name of a field of PlanSpec, and global_batch_size; all of one length

# Numbers of a plan that say how its ranks stand and what each computes, and those that say who holds what. An order of
# axes is its place in ORDERS.
DEGREES = (
    "global_batch_size", "tp", "pp", "cp", "dp", "ep", "expert_tp", "order", "microbatch_size", "sequence_parallel",
)  # fmt: skip
SHARING = ("zero", "zero_ranks", "offload_optimizer", "offload_parameters")
NUMBERS = (*DEGREES, "virtual_stages", *SHARING)

# Names of these numbers in the cut of a run; virtual stages depend on the schedule too.
_OF_CUT = {name: name for name in (*DEGREES, *SHARING)} | {
    "global_batch_size": "global_batch",
    "microbatch_size": "microbatch",
    "order": "order_number",
}

# Stages a rank by schedule, in the order of SCHEDULE_NAMES; 0 is for the plan to say.
_PIECES = np.array([STAGES_PER_RANK.get(name, 1) for name in SCHEDULE_NAMES])


@dataclass(frozen=True)
class Words:
    """What of a plan is not a number, or chooses a formula. Fields are those of PlanSpec; `float8` is of precision."""

    schedule: str = "1f1b"
    recompute: str = "none"
    recompute_operators: tuple[str, ...] = ("attention",)
    recompute_every: int = 1
    offload_activations: bool = False
    cp_method: str = "ring"
    dispatch: str = "direct"
    float8: str = "none"

    def fields(self) -> dict[str, Any]:
        """The words as fields of PlanSpec."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "float8"}
        return found | {"recompute_operators": list(self.recompute_operators)}


@dataclass(frozen=True)
class PlanBlock:
    """Plans with the same words, but for their schedules where there is a column `schedule`: of each plan its place in
    SCHEDULE_NAMES. The other columns are those of NUMBERS; all are of one length."""

    words: Words
    columns: Columns

    @property
    def schedule(self) -> Column:
        """The place in SCHEDULE_NAMES of each plan's schedule."""
        if "schedule" in self.columns:
            return self.columns["schedule"]
        return np.full(len(self), SCHEDULE_NAMES.index(self.words.schedule))

    def __len__(self) -> int:
        return len(self.columns["dp"])

    def where(self, mask: Column) -> "PlanBlock":
        """The plans of a mask, or of indices."""
        return PlanBlock(self.words, taken(self.columns, mask))

    def plan(self, index: int, job: JobSpec) -> JobSpec:
        """The job under one of the plans. It is not checked again: the space holds legal plans only."""
        row = {name: self.columns[name][index].item() for name in NUMBERS}
        batch = row.pop("global_batch_size")
        carried = {name: getattr(job.plan, name) for name in UNSEARCHED}
        if row["expert_tp"] == row["tp"]:
            row["expert_tp"] = 0
        row["offload_optimizer"] = float(row["offload_optimizer"])
        row["order"] = str(ORDERS[row["order"]])
        row["schedule"] = SCHEDULE_NAMES[self.schedule[index]]
        plan = PlanSpec.model_validate(carried | self.words.fields() | row)
        return job.model_copy(
            update={
                "plan": plan,
                "batch": job.batch.with_size(batch),
                "precision": job.precision.with_float8(self.words.float8),
            }
        )

    def run(self, job: JobSpec, memo: Memo) -> Run:
        """All plans as the cost model takes them: numbers of the cut are columns."""
        words = replace(self.words, schedule="1f1b")
        run = memo.once(("run", words), lambda: _one(job, words))
        columns, schedule = self.columns, self.schedule
        of_cut = {of_cut: columns[name] for name, of_cut in _OF_CUT.items()} | {"schedule_number": schedule}
        of_cut["virtual"] = np.where(_PIECES[schedule] > 0, _PIECES[schedule], columns["virtual_stages"])
        return replace(run, cut=run.cut.having(of_cut).as_arrays())


def _one(job: JobSpec, words: Words) -> Run:
    """A plan with some words, on one device."""
    carried = {name: getattr(job.plan, name) for name in UNSEARCHED}
    plan = PlanSpec.model_validate(carried | words.fields())
    precision = job.precision.with_float8(words.float8)
    return run_of(job.model_copy(update={"plan": plan, "precision": precision}))


def standing_ranks(columns: Columns) -> PlanGrid:
    """How the ranks of plans stand, and nothing else of them."""
    return PlanGrid(
        dp=columns["dp"], tp=columns["tp"], pp=columns["pp"], cp=columns["cp"], ep=columns["ep"],
        expert_tp=columns["expert_tp"], order_number=columns["order"],
    )  # fmt: skip


def taken(columns: Columns, rows: Column) -> Columns:
    """Some rows of columns, by a mask or by indices."""
    return {name: values[rows] for name, values in columns.items()}


def crossed(columns: Columns, choices: Columns) -> Columns:
    """Each row of the first with each row of the second."""
    first = len(next(iter(columns.values())))
    second = len(next(iter(choices.values())))
    return {name: np.repeat(values, second) for name, values in columns.items()} | {
        name: np.tile(values, first) for name, values in choices.items()
    }


def together(blocks: list[PlanBlock]) -> PlanBlock:
    """Blocks of the same words as one; there is at least one."""
    names = blocks[0].columns
    return PlanBlock(
        blocks[0].words, {name: np.concatenate([block.columns[name] for block in blocks]) for name in names}
    )
