"""Many plans at once: the variant that they share, and a column of numbers for each of their degrees.

The cost model prices a block in one call. The variant chooses formulas (a schedule, a policy of recomputation), and the
columns are the numbers in them.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.config.job import JobSpec
from shardwright.config.plan import UNSEARCHED, PlanSpec
from shardwright.config.rank_order import ORDERS
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.cost.from_job import run_of
from shardwright.layers.memo import Memo
from shardwright.layers.query import PlanGrid, Run, schedule_column

Column = NDArray[Any]
Columns = dict[str, Column]  # by name of a field of PlanSpec, and global_batch_size; all of one length

# Numbers of a plan: DEGREES place its ranks and divide the work, SHARING divides the state. An order of axes is
# its index in ORDERS.
DEGREES = (
    "global_batch_size",
    "tp",
    "pp",
    "cp",
    "dp",
    "ep",
    "expert_tp",
    "order",
    "microbatch_size",
    "sequence_parallel",
)
SHARING = ("zero", "zero_ranks", "offload_optimizer", "offload_parameters")
NUMBERS = (*DEGREES, "virtual_stages", *SHARING)
_KIND_DEGREES = ("tp", "pp", "cp", "ep")  # plans of one kind agree in these; the fastest stands for its kind

# Names of these numbers in a PlanGrid. Virtual stages are not among them: they depend on the schedule too.
_GRID_FIELDS = {name: name for name in (*DEGREES, *SHARING)} | {
    "global_batch_size": "global_batch",
    "microbatch_size": "microbatch",
    "order": "order_number",
}


RECOMPUTATION = ("recompute", "recompute_operators", "recompute_every", "offload_activations")


@dataclass(frozen=True)
class PlanVariant:
    """The fields of a plan that choose a formula: plans with equal ones are priced in one call. Fields are those of
    PlanSpec; `float8` is a field of the precision."""

    schedule: str = "1f1b"
    recompute: str = "none"
    recompute_operators: tuple[str, ...] = ("attention",)
    recompute_every: int = 1
    offload_activations: bool = False
    cp_method: str = "ring"
    dispatch: str = "direct"
    float8: str = "none"

    @cached_property
    def recomputation(self) -> tuple[Any, ...]:
        """The values of the fields about recomputation."""
        return tuple(getattr(self, name) for name in RECOMPUTATION)

    @property
    def without_choices(self) -> "PlanVariant":
        """The variant with 1F1B and no recomputation, which has the same methods otherwise."""
        return PlanVariant(cp_method=self.cp_method, dispatch=self.dispatch, float8=self.float8)

    def fields(self) -> dict[str, Any]:
        """The variant as fields of PlanSpec."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "float8"}
        return fields | {"recompute_operators": list(self.recompute_operators)}


@dataclass(frozen=True)
class PlanBlock:
    """Plans of one variant. Columns are those of NUMBERS, all of one length. If there is a column `schedule` too,
    plans differ in their schedules, and it has the place of each in SCHEDULES.names."""

    variant: PlanVariant
    columns: Columns

    @property
    def schedule(self) -> Column:
        """The place in SCHEDULES.names of each plan's schedule."""
        if "schedule" in self.columns:
            return self.columns["schedule"]
        return np.full(len(self), SCHEDULES.names.index(self.variant.schedule))

    @property
    def num_copies(self) -> Column:
        """The number of copies of each stage in a pipeline, for each plan."""
        return schedule_column(self.schedule, lambda facts: facts.num_copies)

    @property
    def is_hosted(self) -> Column:
        """Mask of the plans that keep optimizer state or parameters in host memory."""
        return np.asarray((self.columns["offload_optimizer"] > 0) | self.columns["offload_parameters"])

    def __len__(self) -> int:
        return len(self.columns["dp"])

    def where(self, mask: Column) -> "PlanBlock":
        """The plans that a mask or indices select."""
        return PlanBlock(self.variant, select(self.columns, mask))

    def plan(self, index: int, job: JobSpec) -> JobSpec:
        """The job under one of the plans. It is not checked again, because the space has legal plans only."""
        row = {name: self.columns[name][index].item() for name in NUMBERS}
        batch = row.pop("global_batch_size")
        carried = {name: getattr(job.plan, name) for name in UNSEARCHED}
        if row["expert_tp"] == row["tp"]:
            row["expert_tp"] = 0
        row["offload_optimizer"] = float(row["offload_optimizer"])
        row["order"] = str(ORDERS[row["order"]])
        row["schedule"] = SCHEDULES.names[self.schedule[index]]
        if row["cp"] == 1:  # no ranks share a sequence, so that the method has no effect
            row["cp_method"] = job.plan.cp_method
        plan = PlanSpec.model_validate(carried | self.variant.fields() | row)
        return job.model_copy(
            update={
                "plan": plan,
                "batch": job.batch.with_size(batch),
                "precision": job.precision.with_float8(self.variant.float8),
            }
        )

    def run(self, job: JobSpec, memo: Memo) -> Run:
        """All plans as the cost model takes them: the numbers of the PlanGrid are columns."""
        variant = replace(self.variant, schedule="1f1b")
        run = memo.once(("run", variant), lambda: _run_of_variant(job, variant))
        columns, schedule = self.columns, self.schedule
        grid_columns = {grid_field: columns[name] for name, grid_field in _GRID_FIELDS.items()}
        grid_columns["schedule_number"] = schedule
        pieces = schedule_column(schedule, lambda facts: facts.stages_per_rank)
        grid_columns["virtual"] = np.where(pieces > 0, pieces, columns["virtual_stages"])
        return replace(run, grid=run.grid.having(grid_columns).as_arrays())


def _run_of_variant(job: JobSpec, variant: PlanVariant) -> Run:
    """A run of one plan of a variant, on one device."""
    carried = {name: getattr(job.plan, name) for name in UNSEARCHED}
    plan = PlanSpec.model_validate(carried | variant.fields())
    precision = job.precision.with_float8(variant.float8)
    return run_of(job.model_copy(update={"plan": plan, "precision": precision}))


def rank_grid(columns: Columns) -> PlanGrid:
    """The placement of the plans' ranks, and nothing else of the plans."""
    return PlanGrid(
        dp=columns["dp"],
        tp=columns["tp"],
        pp=columns["pp"],
        cp=columns["cp"],
        ep=columns["ep"],
        expert_tp=columns["expert_tp"],
        order_number=columns["order"],
    )


def select(columns: Columns, rows: Column) -> Columns:
    """The rows that a mask or indices select."""
    indices = np.flatnonzero(rows) if rows.dtype == bool else rows  # a mask would be counted again for each column
    return {name: values.take(indices) for name, values in columns.items()}


def kind_codes(columns: Columns) -> Column:
    """A number for each row that rows of one kind share."""
    codes = np.zeros(len(columns["tp"]), np.int64)
    for name in _KIND_DEGREES:
        codes = codes * (1 << 15) + columns[name]
    return codes


def cross(columns: Columns, choices: Columns) -> Columns:
    """Combine each row of `columns` with each row of `choices`."""
    num_rows = len(next(iter(columns.values())))
    num_choices = len(next(iter(choices.values())))
    return {name: np.repeat(values, num_choices) for name, values in columns.items()} | {
        name: np.tile(values, num_rows) for name, values in choices.items()
    }


def join_blocks(blocks: list[PlanBlock]) -> PlanBlock:
    """Join blocks of one variant; there is at least one block."""
    names = blocks[0].columns
    return PlanBlock(
        blocks[0].variant, {name: np.concatenate([block.columns[name] for block in blocks]) for name in names}
    )
