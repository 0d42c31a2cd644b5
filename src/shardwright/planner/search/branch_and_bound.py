"""The best plans of the whole space, by branch and bound.

1. Price a first guess. For each kind of plan it takes the degrees with the lowest bounds, under 1F1B with no or with
   full recomputation, and the sharding that wins most often. Its fitting plans set limits: for each kind the best time
   so far, and for all kinds the time of the last kind that is shown. Of a large space a few rows are priced before.
2. Bound each row of degrees under each policy of recomputation (`bounds.mean_rank_token_s`). Drop rows above limits.
3. Combine the other rows with all schedules and virtual stages. Price these plans unsharded, memory before time. Drop
   plans above limits, and plans whose activations have no room with any sharding of the state.
4. Price the remaining plans with every sharding, memory before time, and lower the limits as better plans appear. A
   plan that offloads is priced only if it does not fit otherwise, for offloading makes no plan faster, and if it may be
   shown with the time of its update, which waits for the host.

A list shows plans of different kinds. Plans of one kind have the same tp, pp, cp and ep, and the fastest stands for
them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from shardwright.config.recompute_facts import RECOMPUTES
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.cost.calibration import rates_of
from shardwright.cost.from_job import run_of
from shardwright.memory.rank_estimate import peak_memory
from shardwright.planner.search import bounds, space
from shardwright.planner.search.layer_rows import LayerRows
from shardwright.planner.search.plan_block import (
    Column,
    Columns,
    PlanBlock,
    PlanVariant,
    join_blocks,
    kind_codes,
    select,
)
from shardwright.planner.search.plan_price import fits, laid_out_token_s
from shardwright.planner.search.results import Best, PlanPlace, SearchTally
from shardwright.planner.search.search_progress import Phase, tell, tell_bound
from shardwright.planner.search.search_scope import SearchScope

# Plans that are priced in one call, before sharding multiplies them: their columns stay in the cache of a core.
_ROWS = 2048
_MOST_UNBOUNDED = 128  # so few plans are priced without own bounds, which would take as long
_MOST_ROWS = 2**15  # rows whose bounds are computed in one call: each needs some thousand bytes
_DEPTH = 8  # plans of a kind that are simulated, each with another order of work
_MANY_LAYERS = 2**13  # so many rows of layers take a second to bound: some are priced before
_SAMPLE_ROWS = 256  # of these
_FIRST_SHARE = 7  # of so many tasks the first one, with the lowest bounds, has most of the plans that remain the best
_GUESSED = 32  # rows of a kind that are priced to have a first limit
_BOUND_COLUMNS = ("mean_s", "paired_s", "least_bytes", "turn_s", "row", "layer")  # used only for bounds


Kinds = list[list[PlanPlace]]  # the best plans of each kind, the fastest kind first


def ranked_kinds(
    scope: SearchScope, on_first_kinds: Callable[[Kinds], object] = lambda kinds: None
) -> tuple[Kinds, SearchTally]:
    """Rank plans of at least `num_shown` kinds by closed forms, each with its best layout, and count the work. After
    the first tasks `on_first_kinds` gets the best kinds so far: most of them stay."""
    branch_and_bound = _BranchAndBound(scope)
    if bounds.has_room_for_state(scope.job, scope.constraints, scope.room, scope.constants):
        if not scope.hosted_only:  # a guess keeps all state on the device
            branch_and_bound.price_first_guess()
        branch_and_bound.search_all(on_first_kinds)
    return branch_and_bound.kinds(), branch_and_bound.tally


@dataclass(frozen=True)
class _Admitted:
    """Rows that a variant admits, at `places`, with lower bounds on seconds a token: without ZeRO-3 and under it."""

    variant: PlanVariant
    rows: Columns
    places: Column
    below_s: Column
    gathered_s: Column


class _BranchAndBound:
    """Branch and bound over one space: time limits of kinds, which fall while plans are priced.

    Blocks have the numbers of a plan and a column `kind`. Bounds are columns of `rows`. Each is a lower bound, in
    seconds a token or in bytes of a process:

    - `mean_s`: the compute time of the mean rank; `paired_s`: the same if forwards run beside backwards;
    - `turn_s`: the messages between the stages of a rank that has several;
    - `exchange_s`: the communication of replicas in a step without ZeRO-3; `zero3_s`: under ZeRO-3;
    - `least_bytes`: the activations kept for the backward, `device_bytes`: with the least state of a plan that does not
      offload; 0 if there are no bounds on them;
    - `below_s`, `gathered_s`: the whole step, without ZeRO-3 and under it, from all of these.
    """

    def __init__(self, scope: SearchScope) -> None:
        job, constraints, rows = scope.job, scope.constraints, scope.rows
        self.job, self.constraints, self.constants = job, constraints, scope.constants
        self.room, self.memo, self.corrections = scope.room, scope.memo, scope.corrections
        self.most_token_s, self.hosted_only = scope.most_token_s, scope.hosted_only
        self.rates = rates_of(run_of(job), scope.constants)
        kinds, kind_of_row = np.unique(kind_codes(rows), return_inverse=True)
        self.layers, layer = LayerRows.of(rows)
        self.rows = rows | {"kind": kind_of_row.reshape(-1), "layer": layer, "row": np.arange(len(layer))}
        self.rows |= dict.fromkeys(("exchange_s", "zero3_s", "turn_s"), np.zeros(len(layer)))  # until they are computed
        self.variants = space.variants_of(job, constraints, rows)
        self.tally = SearchTally(sum(space.count_by_variant(job, constraints, rows).values()))
        self.num_shown = min(scope.num_shown, len(kinds))
        self.shown = Best.of_kinds(len(kinds), _DEPTH)

    def limits_s(self, kind: Column) -> Column:
        """The seconds a token that a plan of each kind must stay below to be shown."""
        last_shown_s = np.partition(self.shown.token_s, self.num_shown - 1)[self.num_shown - 1]
        return np.minimum(min(last_shown_s, self.most_token_s), self.shown.last_s[kind])

    def price_first_guess(self) -> None:
        """Price one sharding of the rows of each kind that have the lowest bounds, so that there are limits."""
        simple = [
            guess for guess in self.variants if guess.schedule == "1f1b" and RECOMPUTES[guess.recompute].is_guessed
        ]
        simple = simple or self.variants
        tried = [(simple[0], self.rows), (simple[-1], self.rows)]
        if len(self.layers) > _MANY_LAYERS:  # full recomputation, which fits most often, by the usual methods
            usual = [variant for variant in simple if variant.without_choices == simple[0].without_choices]
            tried.insert(0, (usual[-1], space.evenly_spread(self.rows, _SAMPLE_ROWS)))
        for variant, all_rows in tried:
            rows = self._admitted_with_time_bounds(all_rows, variant)
            if not len(rows["dp"]):
                continue
            block = space.with_variant(self.job, self.constraints, select(rows, self._lowest_bounds(rows)), variant)
            allowed = [zero for zero in (1, 3, 2, 0) if self.constraints.allows("zero", zero)]
            columns = block.columns | {
                "zero": np.full(len(block), allowed[0]),
                "offload_optimizer": np.full(len(block), float(self.constraints.keep.get("offload_optimizer", 0.0))),
            }
            if "zero_ranks" not in self.constraints.keep and "offload_parameters" not in self.constraints.keep:
                self._price(PlanBlock(variant, columns))

    def _lowest_bounds(self, rows: Columns) -> Column:
        """Indices of the rows with the lowest bounds, some of each kind."""
        least = np.minimum(*self._least_s(rows, rows["paired_s"]))
        order = np.lexsort((least, rows["kind"]))
        kinds, kind_begins = np.unique(rows["kind"][order], return_index=True)
        place = np.arange(len(order)) - kind_begins[np.searchsorted(kinds, rows["kind"][order])]
        return order[place < _GUESSED]

    def search_all(self, on_first_kinds: Callable[[Kinds], object]) -> None:
        """Search all variants, those with the lowest bound first. Plans that differ in schedule are priced together."""
        tasks: list[tuple[float, list[_Admitted]]] = []
        tell(Phase.PRICING, 0.0)
        without_recompute = self._without_recompute()
        for common, alike in bounds.variants_by_bound(self.variants).items():
            method = common.without_choices
            if method not in without_recompute:
                continue
            rows = without_recompute[method]  # a lower bound on every policy of recomputation
            if common != method:
                rows = self._below_limits(rows, *self._least_s(rows, rows["paired_s"]))
                rows = self._with_time_bounds(rows, common)
            if len(rows["dp"]):
                rows["least_bytes"], rows["device_bytes"] = self._least_bytes(rows, common)
                tasks += self._tasks(alike, rows)
        tasks.sort(key=lambda task: task[0], reverse=True)
        num_tasks = len(tasks)
        while tasks:
            tell(Phase.PRICING, 1 - len(tasks) / num_tasks)
            _, parts = tasks.pop()  # finished tasks are not kept: they may be gigabytes
            blocks = [block for part in parts if len(block := self._with_virtual_stages(part))]
            if blocks:
                self._explore(join_blocks(blocks))
            if len(tasks) == num_tasks - num_tasks // _FIRST_SHARE:
                on_first_kinds(self.kinds())

    def _without_recompute(self) -> dict[PlanVariant, Columns]:
        """For each method its rows that may be shown if nothing is recomputed, with their bounds."""
        bounded = {
            method: self._admitted_with_time_bounds(self.rows, method)
            for method in dict.fromkeys(variant.without_choices for variant in self.variants)
        }
        rows_of_method = {method: rows for method, rows in bounded.items() if len(rows["dp"])}
        if not rows_of_method:
            return rows_of_method
        # Exchanges of replicas and messages of the pipeline do not depend on the variant.
        is_possible = np.zeros(len(self.rows["dp"]), dtype=bool)
        for method_rows in rows_of_method.values():
            is_possible[method_rows["row"]] = True
        possible_rows = select(self.rows, is_possible)
        hybrid = space.hybrid_ranks(self.job, self.constraints, possible_rows)
        columns = {
            "exchange_s": bounds.exchange_token_s(self.job, possible_rows, hybrid, self.constants, memo=self.memo),
            "turn_s": bounds.turn_token_s(self.job, possible_rows, self.rates),
            "hybrid": hybrid,
        }
        place = np.cumsum(is_possible) - 1
        for method, method_rows in rows_of_method.items():
            method_rows |= select(columns, place[method_rows["row"]])
            method_rows["zero3_s"] = bounds.zero3_token_s(
                self.job, method_rows, method, method_rows.pop("hybrid"), constants=self.constants, memo=self.memo
            )
        return rows_of_method

    def _admitted_with_time_bounds(self, rows: Columns, variant: PlanVariant) -> Columns:
        """The rows that a variant admits, as `_with_time_bounds` has them. Most rows of a model with experts are
        excluded before their experts are priced."""
        rows = space.admitted(self.job, self.constraints, rows, variant)
        if self.job.model.moe.experts and len(rows["dp"]):
            layers, place = self.layers.used_by(rows)
            least_s = bounds.before_experts_s(self.job, layers, variant, self.constants, memo=self.memo)
            least_token_s = bounds.mean_rank_token_s(self.job, rows, least_s[place])
            rows = self._below_limits(rows, *self._least_s(rows, least_token_s))
        return self._with_time_bounds(rows, variant)

    def _with_time_bounds(self, rows: Columns, variant: PlanVariant) -> Columns:
        """The rows that may be shown, with the compute time of their mean rank, plain and with paired microbatches."""
        if not len(rows["dp"]):
            return rows
        self.tally.num_bounds += len(rows["dp"])
        layers, place = self.layers.used_by(rows)
        layers_s = bounds.microbatch_s(self.job, layers, variant, self.constants, memo=self.memo)
        mean_s, paired_s = (bounds.mean_rank_token_s(self.job, rows, seconds[place]) for seconds in layers_s)
        return self._below_limits(rows | {"mean_s": mean_s, "paired_s": paired_s}, *self._least_s(rows, paired_s))

    def _least_bytes(self, rows: Columns, variant: PlanVariant) -> tuple[Column, Column]:
        """Lower bounds on the bytes of a process: (of any, of one that offloads nothing); 0 if there are none."""
        if not bounds.keeps_as_much(self.job, variant):
            return np.zeros(len(rows["dp"])), np.zeros(len(rows["dp"]))
        return bounds.least_bytes(self.job, rows, variant, self.constants, memo=self.memo)

    def _below_limits(self, rows: Columns, below_s: Column, gathered_s: Column) -> Columns:
        """The rows whose bounds are below their limits."""
        return select(rows, np.minimum(below_s, gathered_s) < self.limits_s(rows["kind"]))

    def _least_s(self, rows: Columns, token_s: Column, factor: Column | float = 1.0) -> tuple[Column, Column]:
        """Lower bounds on the seconds a token of a step: (without ZeRO-3, under ZeRO-3)."""
        return bounds.step_token_s(self.job, rows, token_s, self.rates, factor=factor)

    def _tasks(self, alike: list[PlanVariant], rows: Columns) -> list[tuple[float, list[_Admitted]]]:
        """Tasks of the search: the rows that some variants admit, and the lowest bound among them.

        Variants that hide the dispatch of tokens to experts are a task of their own, for they are priced apart.
        """
        tasks = []
        for is_hidden in (False, True):
            parts = [
                self._admitted(variant, rows)
                for variant in alike
                if is_hidden == (self.job.model.moe.experts > 0 and bounds.is_paired(variant.schedule))
            ]
            parts = [part for part in parts if len(part.places)]
            least = [np.minimum(part.below_s, part.gathered_s).min() for part in parts]
            tasks += [(float(min(least)), parts)] if parts else []
        return tasks

    def _admitted(self, variant: PlanVariant, rows: Columns) -> _Admitted:
        """The rows that a variant's schedule admits and that may be shown, among rows that its methods admit."""
        mean_s = rows["paired_s" if bounds.is_paired(variant.schedule) else "mean_s"]
        pieces = SCHEDULES[variant.schedule].stages_per_rank
        factor = bounds.bubble_factor(
            rows, variant.schedule, pieces or np.maximum(1, self.job.model.layers // rows["pp"])
        )
        messages_s = bounds.messages_token_s(rows, variant.schedule, pieces or 2)
        below, gathered = self._least_s(rows, factor * mean_s + messages_s, factor)
        is_possible = space.admits_schedule(rows, variant.schedule, self.constraints)
        is_possible &= np.minimum(below, gathered) < self.limits_s(rows["kind"])
        if bounds.keeps_as_much(self.job, variant):
            is_possible &= rows["least_bytes"] <= self.room
        places = np.flatnonzero(is_possible)
        return _Admitted(variant, rows, places, below[places], gathered_s=gathered[places])

    def _with_virtual_stages(self, part: _Admitted) -> PlanBlock:
        """The plans of some rows that may be shown, with bounds that know their number of virtual stages."""
        variant, rows = part.variant, select(part.rows, part.places)
        rows |= {"below_s": part.below_s, "gathered_s": part.gathered_s}
        rows = self._below_limits(rows, rows["below_s"], rows["gathered_s"])
        block = space.with_variant(self.job, self.constraints, rows, variant)
        columns = block.columns
        if SCHEDULES[variant.schedule].stages_per_rank == 0:
            virtual = columns["virtual_stages"]
            factor = bounds.bubble_factor(columns, variant.schedule, virtual)
            messages_s = bounds.messages_token_s(columns, variant.schedule, virtual)
            below, gathered = self._least_s(columns, factor * columns["mean_s"] + messages_s, factor)
            columns = self._below_limits(columns | {"below_s": below, "gathered_s": gathered}, below, gathered)
            block = PlanBlock(variant, columns)
        columns = {name: values for name, values in columns.items() if name not in _BOUND_COLUMNS}
        if not bounds.keeps_as_much(self.job, variant):
            columns["device_bytes"] = np.zeros_like(columns["device_bytes"])
        return PlanBlock(replace(variant, schedule="1f1b"), columns | {"schedule": block.schedule})

    def _explore(self, block: PlanBlock) -> None:
        """Exclude the plans of an unsharded block that can't be shown, and price the others in every sharding."""
        if len(block) > _MOST_UNBOUNDED:
            parts = np.array_split(np.arange(len(block)), -(-len(block) // _MOST_ROWS))
            block = join_blocks([self._with_own_bounds(block.where(part)) for part in parts])
        least = np.minimum(block.columns["below_s"], block.columns["gathered_s"])
        order = np.argsort(least, kind="stable")
        if len(block) > _MOST_UNBOUNDED:  # the first of each kind before the others, for they lower the limits
            _, leaders = np.unique(block.columns["kind"][order], return_index=True)
            order = np.concatenate([order[leaders], np.delete(order, leaders)])
            sizes = [len(leaders), *[_ROWS] * (len(order) // _ROWS + 1)]
        else:
            sizes = [len(block)]
        too_large: list[PlanBlock] = []
        for indices in np.split(order, np.cumsum(sizes)[:-1]):
            part = block.where(self._rows_below_limits(block, indices))
            sharded = space.with_sharing(self.job, self.constraints, part)
            sharded, offloaded = self._with_room(self._sharded_below_limits(sharded))
            too_large += [offloaded, self._price(sharded)]
        offloaded = space.with_offload(self.constraints, self._sharded_below_limits(join_blocks(too_large)))
        for begin in range(0, len(offloaded), _MOST_ROWS):
            part = offloaded.where(np.arange(begin, min(begin + _MOST_ROWS, len(offloaded))))
            self._price(self._updated_below_limits(self._with_room(part)[0]))

    def _with_own_bounds(self, block: PlanBlock) -> PlanBlock:
        """The plans that may be shown, with bounds from each plan's own unsharded price."""
        self.tally.num_bounds += len(block)
        block = self._offloaded_below_limits(block, block.columns["device_bytes"] > self.room)
        if not len(block):
            return block
        memory = peak_memory(block.run(self.job, self.memo), self.constants, self.memo)
        block = PlanBlock(block.variant, block.columns | bounds.unsharded_parts(self.job, memory))
        block = block.where(block.columns["rest_bytes"] <= self.room)
        block = self._offloaded_below_limits(block, bounds.must_offload(self.job, block, self.room, self.memo))
        if not len(block):
            return block
        unsharded_s = bounds.unsharded_token_s(self.job, block, self.constants, self.memo)
        below, gathered = self._least_s(block.columns, unsharded_s)
        gathered = np.maximum(gathered, block.columns["gathered_s"])
        block = PlanBlock(block.variant, block.columns | {"below_s": below, "gathered_s": gathered})
        return block.where(self._rows_below_limits(block, np.arange(len(block))))

    def _offloaded_below_limits(self, block: PlanBlock, must_offload: Column) -> PlanBlock:
        """The plans of an unsharded block without those that must offload to have room, and then may not be shown with
        the time of their update."""
        places, share = np.flatnonzero(must_offload), space.offloaded_share(self.constraints)
        if not share:  # no plan may offload
            return block.where(~must_offload)
        if len(places) <= _MOST_UNBOUNDED:
            return block
        part = block.where(places)
        hybrid = space.hybrid_ranks(self.job, self.constraints, part.columns)
        update_s = bounds.offloaded_token_s(self.job, part, hybrid, share, constants=self.constants, memo=self.memo)
        least_s = np.minimum(part.columns["below_s"], part.columns["gathered_s"]) + update_s
        return block.where(np.delete(np.arange(len(block)), places[least_s >= self.limits_s(part.columns["kind"])]))

    def _rows_below_limits(self, block: PlanBlock, rows: Column) -> Column:
        """The indices, among `rows` of an unsharded block, of plans that may still be shown."""
        below_s, gathered_s, kind = (block.columns[name][rows] for name in ("below_s", "gathered_s", "kind"))
        return rows[np.minimum(below_s, gathered_s) < self.limits_s(kind)]

    def _sharded_below_limits(self, block: PlanBlock) -> PlanBlock:
        """The plans of a sharded block that may still be shown."""
        columns = block.columns
        least = np.where(columns["zero"] == 3, columns["gathered_s"], columns["below_s"])
        return block.where(least < self.limits_s(columns["kind"]))

    def _updated_below_limits(self, block: PlanBlock) -> PlanBlock:
        """The plans of a sharded block that may still be shown, with the time of their updates in their bounds."""
        if not len(block):
            return block
        update_s = bounds.update_token_s(self.job, block, self.rates, self.constants, self.memo)
        columns = block.columns
        updated = {name: columns[name] + update_s for name in ("below_s", "gathered_s")}
        return self._sharded_below_limits(PlanBlock(block.variant, columns | updated))

    def _with_room(self, block: PlanBlock) -> tuple[PlanBlock, PlanBlock]:
        """Two parts of a sharded block: (plans that may fit as they are, plans that may fit if they offload more)."""
        if "rest_bytes" not in block.columns or not len(block):
            return block, block.where(np.zeros(len(block), dtype=bool))
        least, as_it_is = bounds.state_bytes(self.job, block, self.memo)
        return block.where(as_it_is <= self.room), block.where((least <= self.room) & (as_it_is > self.room))

    def _price(self, block: PlanBlock) -> PlanBlock:
        """Price a block, memory before time, note the best plans, and return those that do not fit."""
        if not len(block):
            return block
        memory = peak_memory(block.run(self.job, self.memo), self.constants, self.memo)
        is_fitting = fits(self.job, self.corrections.applied(block, memory), self.room)
        fitting, too_large = block.where(is_fitting), block.where(~is_fitting)
        self.tally.num_priced += len(block)
        self.tally.num_fit += len(fitting)
        if self.hosted_only:
            fitting = fitting.where(fitting.is_hosted)
        if not len(fitting):
            return too_large
        token_s = laid_out_token_s(self.job, fitting, self.constants, self.memo)
        self.shown.take(fitting, token_s, np.flatnonzero(token_s < self.limits_s(fitting.columns["kind"])))
        if self.corrections.is_empty and (best := self.shown.next_best()) is not None:
            tell_bound(lambda: best.plan(self.job), best.token_s)
        return too_large

    def kinds(self) -> Kinds:
        """The best plans of each kind, with lower bounds on their time; the fastest kind first."""
        return sorted(map(self.shown.plans_of_kind, self.shown.places), key=lambda places: places[0].token_s)
