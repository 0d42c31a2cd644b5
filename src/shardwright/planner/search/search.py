"""The best plans of the whole space, by branch and bound.

1. Price a first guess, of each kind the degrees with the lowest bounds: 1F1B with nothing or all computed again, and
   sharding that most often wins. What fits of it sets marks: for each kind of plan its best time, and for all of them
   the time of the last kind shown.
2. Bound each row of degrees under each policy of recomputation (`bounds.mean_rank_token_s`). What is above its mark,
   goes.
3. Make what is left into plans with all schedules and virtual stages, and price them with nothing sharded, memory
   before time. What has no room for its activations however its state is sharded, or is above its mark, goes.
4. Price what is left with every way of sharding, and lower the marks as better plans are found. Plans that offload are
   priced where the same plan without does not fit, for they are not faster.

Shown are plans of different kinds: of those with the same tp, pp, cp and ep the fastest alone. Of this runtime what is
found is judged by the account of its memory; where that refutes some of it, the search begins anew (corrections.py).
"""

import time
from dataclasses import dataclass, replace

import numpy as np

from shardwright.config.base import PlanError
from shardwright.config.host_memory import host_room_bytes
from shardwright.config.job import JobSpec
from shardwright.config.plan import STAGES_PER_RANK
from shardwright.config.rank_order import ORDERS
from shardwright.cost.calibration import Constants, rates_of
from shardwright.cost.from_job import run_of
from shardwright.cost.memory import peak_memory
from shardwright.planner.search import bounds, space
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.corrections import Corrections
from shardwright.planner.search.empty_space import empty_space_faults
from shardwright.planner.search.known_strategies import within_known
from shardwright.planner.search.plan_block import Column, Columns, PlanBlock, Words, taken, together
from shardwright.planner.search.plan_price import fits, prices, room_bytes
from shardwright.planner.search.played_plans import PlayedPlans
from shardwright.planner.search.results import Best, Found, FoundPlace, SearchTally
from shardwright.workload.arrays import distinct
from shardwright.workload.memo import Memo

# Plans that are priced in one call, so that their columns stay in the cache of a core, before they are shared out; and
# so few that a bound would take as long as their price.
_ROWS = 2048
_FEW = 128
_MOST_ROWS = 2**15  # of which bounds are computed in one call: each takes some thousand bytes meanwhile
SURE_STATE = 0.9  # share of the least bytes of state that is surely needed: vocabularies and shards are rounded up
_ROUNDS = 4  # searches at most, each with what was learned of memory by the one before
_DEPTH = 8  # plans of a kind whose steps are simulated, each in another order of work
_GUESSED = 32  # rows of a kind that are priced to have a first mark
_KIND = ("tp", "pp", "cp", "ep")
_OF_ROWS = ("mean_s", "paired_s", "least_bytes", "turn_s", "row", "layer")  # columns that no plan needs any more
_LAYER = ("tp", "cp", "ep", "expert_tp", "microbatch_size", "sequence_parallel")  # workload.memo.layer_columns


def _method_of(words: Words) -> Words:
    """The words of plans that differ in schedule and recomputation alone: with 1F1B and nothing computed again."""
    return Words(cp_method=words.cp_method, dispatch=words.dispatch, float8=words.float8)


def search(
    job: JobSpec, constraints: Constraints, constants: Constants, num_shown: int = 16, room: float | None = None,
    memo: Memo | None = None,
) -> Found:  # fmt: skip
    """The fastest plans that fit in `room` bytes of a device, all of it where None, of `num_shown` kinds. `memo` has
    what was computed before of the same model and cluster with these constants.

    PlanError where the cluster is not known, or constraints leave nothing.
    """
    started = time.perf_counter()
    _check(job)
    constraints, _ = within_known(job, constraints)
    rows = space.degrees(job, constraints)
    if faults := empty_space_faults(job, constraints, rows):
        raise PlanError(f"plans for {job.model.name} on {job.cluster.num_devices:,} devices", faults)
    room = room_bytes(job) if room is None else room
    memo, corrections = memo or Memo(), Corrections()
    plays = PlayedPlans(job, constraints, constants, rows, room=room, memo=memo)
    for _ in range(_ROUNDS):
        kinds, tally = ranked_kinds(job, constraints, constants, rows, num_shown, room, memo, corrections)
        candidates = plays.fastest(kinds, num_shown)
        refuted, plays.refuted = list(plays.refuted.values()), {}
        if not corrections.learned(job, refuted, constants, room):
            break
    tally.num_played = plays.num_played
    tally.seconds = time.perf_counter() - started
    return Found(candidates, tally)


def ranked_kinds(
    job: JobSpec, constraints: Constraints, constants: Constants, rows: Columns, num_shown: int, room: float,
    memo: Memo, corrections: Corrections,
) -> tuple[list[list[FoundPlace]], SearchTally]:  # fmt: skip
    """The best plans of `num_shown` kinds and more by closed forms, by what they may take with their best layout; and
    how much was looked at. `rows` are the degrees of the space."""
    found = _Search(job, constraints, constants, rows, num_shown, room=room, memo=memo, corrections=corrections)
    if SURE_STATE * bounds.least_state_bytes(job, constants) <= room + host_room_bytes(job.cluster):
        found.guess()
        found.expand()
    return found.kinds(), found.tally


def _check(job: JobSpec) -> None:
    faults = []
    if job.cluster.parts:
        faults.append(
            "cluster.parts has devices of several kinds, and this search is of one; `shardwright layout JOB --search` "
            "finds a plan for parts"
        )
    elif job.cluster.device == "unknown":
        faults.append("cluster.device is unknown, so no plan has a price; set it to a device of the catalog")
    if job.cluster.num_devices == 0:
        faults.append(
            "cluster.devices_per_node is 0, so nobody knows how many devices there are; set it, and cluster.nodes, "
            "or say --devices N"
        )
    if faults:
        raise PlanError(f"job {job.name}", faults)


@dataclass(frozen=True)
class _Admitted:
    """The rows at some places that words admit, with the least seconds by token of a step below ZeRO-3 and under it."""

    words: Words
    rows: Columns
    places: Column
    below_s: Column
    gathered_s: Column


class _Search:
    """Marks that sink while plans are priced. Columns of its blocks have `kind` beside the numbers of a plan."""

    def __init__(
        self, job: JobSpec, constraints: Constraints, constants: Constants, rows: Columns, num_shown: int, *,
        room: float, memo: Memo, corrections: Corrections,
    ) -> None:  # fmt: skip
        self.job, self.constraints, self.constants = job, constraints, constants
        self.room, self.memo, self.corrections = room, memo, corrections
        self.rates = rates_of(run_of(job), constants)
        codes = np.zeros_like(rows["tp"])
        for name in _KIND:
            codes = codes * (1 << 15) + rows[name]
        kinds, of_row = np.unique(codes, return_inverse=True)
        # Rows of degrees, those of them that stand for all with the same layers, and of each row which these are.
        is_near = all(ORDERS[number].keeps_layers_near for number in np.unique(rows["order"]))
        layers, layer = distinct([rows[name] for name in (*_LAYER, *(() if is_near else ("order", "dp", "pp")))])
        self.layers = taken(rows, layers)
        self.rows = rows | {"kind": of_row.reshape(-1), "layer": layer, "row": np.arange(len(layer))}
        self.rows |= dict.fromkeys(("exchange_s", "zero3_s", "turn_s"), np.zeros(len(layer)))  # until they are known
        self.words = space.words_of(job, constraints, rows)
        self.tally = SearchTally(sum(space.count_by_words(job, constraints, rows).values()))
        self.num_shown = min(num_shown, len(kinds))
        self.shown = Best.of_kinds(len(kinds), _DEPTH)

    def marks(self, kind: Column) -> Column:
        """Most seconds by token with which a plan of a kind may still be shown."""
        last = np.partition(self.shown.token_s, self.num_shown - 1)[self.num_shown - 1]
        return np.minimum(last, self.shown.last_s[kind])

    def guess(self) -> None:
        """Price some sharing of the degrees of each kind that have the lowest bounds, to have marks."""
        simple = [at for at in self.words if at.schedule == "1f1b" and at.recompute in ("none", "full")] or self.words
        for at in (simple[0], simple[-1]):
            rows = self._timed(taken(self.rows, space.admits(self.job, self.rows, at)), at)
            if not len(rows["dp"]):
                continue
            block = space.with_words(self.job, self.constraints, taken(rows, self._first(rows)), at)
            allowed = [zero for zero in (1, 3, 2, 0) if self.constraints.allows("zero", zero)]
            share = float(self.constraints.keep.get("offload_optimizer", 0.0))
            columns = block.columns | {
                "zero": np.full(len(block), allowed[0]),
                "offload_optimizer": np.full(len(block), share),
            }
            if "zero_ranks" not in self.constraints.keep and "offload_parameters" not in self.constraints.keep:
                self._price(PlanBlock(at, columns))

    def _first(self, rows: Columns) -> Column:
        """The rows with the lowest bounds, some of each kind."""
        least = np.minimum(*self._least_s(rows, rows["paired_s"]))
        order = np.lexsort((least, rows["kind"]))
        kinds, first = np.unique(rows["kind"][order], return_index=True)
        place = np.arange(len(order)) - first[np.searchsorted(kinds, rows["kind"][order])]
        return order[place < _GUESSED]

    def expand(self) -> None:
        """All words, those with the lowest bound first; plans that differ in their schedules together."""
        tasks: list[tuple[float, list[_Admitted]]] = []
        nothing_again = self._nothing_again()
        for common, alike in self._by_bound().items():
            method = _method_of(common)
            if method not in nothing_again:
                continue
            rows = nothing_again[method]  # computing nothing again is a bound on computing something again
            if common != method:
                rows = self._shown(rows, *self._least_s(rows, rows["paired_s"]))
                rows = self._timed(rows, common)
            if len(rows["dp"]):
                rows["least_bytes"] = self._least_bytes(rows, common)
                tasks += self._tasks(alike, rows)
        tasks.sort(key=lambda task: task[0], reverse=True)
        while tasks:
            _, parts = tasks.pop()  # what was looked at is not kept: it may be gigabytes
            blocks = [block for part in parts if len(block := self._staged(part))]
            if blocks:
                self._explore(together(blocks))

    def _by_bound(self) -> dict[Words, list[Words]]:
        """Words by what of them bounds depend on."""
        found: dict[Words, list[Words]] = {}
        for at in self.words:
            found.setdefault(replace(at, schedule="1f1b"), []).append(at)
        return found

    def _nothing_again(self) -> dict[Words, Columns]:
        """The rows that each method admits and that may be shown where nothing is computed again, with their bounds."""
        timed = {
            method: self._timed(taken(self.rows, space.admits(self.job, self.rows, method)), method)
            for method in dict.fromkeys(map(_method_of, self.words))
        }
        found = {method: some for method, some in timed.items() if len(some["dp"])}
        if not found:
            return found
        # What replicas exchange and what messages take follows from no words.
        is_left = np.zeros(len(self.rows["dp"]), dtype=bool)
        for method_rows in found.values():
            is_left[method_rows["row"]] = True
        left = taken(self.rows, is_left)
        hybrid = space.hybrid_ranks(self.job, self.constraints, left)
        columns = {
            "exchange_s": bounds.exchange_token_s(self.job, left, hybrid, self.constants, memo=self.memo),
            "turn_s": bounds.turn_token_s(self.job, left, self.rates),
            "hybrid": hybrid,
        }
        place = np.cumsum(is_left) - 1
        for method, method_rows in found.items():
            method_rows |= taken(columns, place[method_rows["row"]])
            method_rows["zero3_s"] = bounds.zero3_token_s(
                self.job, method_rows, method, method_rows.pop("hybrid"), constants=self.constants, memo=self.memo
            )
        return found

    def _timed(self, rows: Columns, words: Words) -> Columns:
        """Rows that may be shown, with what their mean rank takes, and what it takes where microbatches are paired."""
        if not len(rows["dp"]):
            return rows
        self.tally.num_bounds += len(rows["dp"])
        is_used = np.zeros(len(self.layers["dp"]), dtype=bool)
        is_used[rows["layer"]] = True
        place = (np.cumsum(is_used) - 1)[rows["layer"]]
        of_layers = bounds.microbatch_s(self.job, taken(self.layers, is_used), words, self.constants, memo=self.memo)
        mean_s, paired_s = (bounds.mean_rank_token_s(self.job, rows, seconds[place]) for seconds in of_layers)
        return self._shown(rows | {"mean_s": mean_s, "paired_s": paired_s}, *self._least_s(rows, paired_s))

    def _least_bytes(self, rows: Columns, words: Words) -> Column:
        """Least bytes of a process, where there is a bound."""
        if not bounds.keeps_as_much(self.job, words):
            return np.zeros(len(rows["dp"]))
        return bounds.activation_bytes(self.job, rows, words, self.constants, self.memo)

    def _shown(self, rows: Columns, below_s: Column, gathered_s: Column) -> Columns:
        """The rows that may still be shown, by their bounds."""
        return taken(rows, np.minimum(below_s, gathered_s) < self.marks(rows["kind"]))

    def _least_s(self, rows: Columns, token_s: Column, factor: Column | float = 1.0) -> tuple[Column, Column]:
        """(below ZeRO-3, under ZeRO-3) the least seconds by token of a step."""
        return bounds.step_token_s(self.job, rows, token_s, self.rates, factor=factor)

    def _tasks(self, alike: list[Words], rows: Columns) -> list[tuple[float, list[_Admitted]]]:
        """The rows that words admit, with their bounds, and the least of these; of all words together, but apart where
        tokens' way to experts is hidden."""
        found = []
        for is_hidden in (False, True):
            parts = [
                self._admitted(at, rows)
                for at in alike
                if is_hidden == (self.job.model.moe.experts > 0 and bounds.is_paired(at.schedule))
            ]
            parts = [part for part in parts if len(part.places)]
            least = [np.minimum(part.below_s, part.gathered_s).min() for part in parts]
            found += [(float(min(least)), parts)] if parts else []
        return found

    def _admitted(self, words: Words, rows: Columns) -> _Admitted:
        """The rows that the schedule of words admits and that may be shown, of rows that methods of the words admit."""
        mean_s = rows["paired_s" if bounds.is_paired(words.schedule) else "mean_s"]
        pieces = STAGES_PER_RANK.get(words.schedule, 1)
        factor = bounds.bubble_factor(
            rows, words.schedule, pieces or np.maximum(1, self.job.model.layers // rows["pp"])
        )
        messages_s = bounds.messages_token_s(rows, words.schedule, pieces or 2)
        below, gathered = self._least_s(rows, factor * mean_s + messages_s, factor)
        is_possible = space.admits_schedule(rows, words.schedule)
        is_possible &= np.minimum(below, gathered) < self.marks(rows["kind"])
        if bounds.keeps_as_much(self.job, words):
            is_possible &= rows["least_bytes"] <= self.room
        places = np.flatnonzero(is_possible)
        return _Admitted(words, rows, places, below[places], gathered_s=gathered[places])

    def _staged(self, part: _Admitted) -> PlanBlock:
        """The plans of some rows that may be shown, with bounds of their own numbers of virtual stages."""
        words, rows = part.words, taken(part.rows, part.places)
        rows |= {"below_s": part.below_s, "gathered_s": part.gathered_s}
        rows = self._shown(rows, rows["below_s"], rows["gathered_s"])
        block = space.with_words(self.job, self.constraints, rows, words)
        columns = block.columns
        if STAGES_PER_RANK.get(words.schedule, 1) == 0:
            virtual = columns["virtual_stages"]
            factor = bounds.bubble_factor(columns, words.schedule, virtual)
            messages_s = bounds.messages_token_s(columns, words.schedule, virtual)
            below, gathered = self._least_s(columns, factor * columns["mean_s"] + messages_s, factor)
            columns = self._shown(columns | {"below_s": below, "gathered_s": gathered}, below, gathered)
            block = PlanBlock(words, columns)
        columns = {name: values for name, values in columns.items() if name not in _OF_ROWS}
        return PlanBlock(replace(words, schedule="1f1b"), columns | {"schedule": block.schedule})

    def _explore(self, block: PlanBlock) -> None:
        """Exclude what can't be shown of a block with nothing sharded, and price the rest."""
        if len(block) > _FEW:
            parts = np.array_split(np.arange(len(block)), -(-len(block) // _MOST_ROWS))
            block = together([self._tightened(block.where(part)) for part in parts])
        least = np.minimum(block.columns["below_s"], block.columns["gathered_s"])
        order = np.argsort(least, kind="stable")
        if len(block) > _FEW:  # the first of each kind before the others, for they lower the marks
            _, leaders = np.unique(block.columns["kind"][order], return_index=True)
            order = np.concatenate([order[leaders], np.delete(order, leaders)])
            sizes = [len(leaders), *[_ROWS] * (len(order) // _ROWS + 1)]
        else:
            sizes = [len(block)]
        too_large: list[PlanBlock] = []
        first = 0
        for size in sizes:
            now = order[first : first + size]
            first += size
            sharded = space.with_sharing(self.job, self.constraints, block.where(self._possible(block, now)))
            sharded, offloaded = self._with_room(self._still(sharded))
            too_large += [offloaded, self._price(sharded)]
        self._price(space.with_offload(self.constraints, self._still(together(too_large))))

    def _tightened(self, block: PlanBlock) -> PlanBlock:
        """The block with bounds from the price of each plan itself."""
        self.tally.num_bounds += len(block)
        memory = peak_memory(block.run(self.job, self.memo), self.constants, self.memo)
        held = {
            "rest_bytes": bounds.unsharded_bytes(memory),
            "parameters_bytes": memory.parameters,
            "gradients_bytes": memory.gradients,
            "optimizer_bytes": memory.optimizer,
        }
        block = PlanBlock(block.words, block.columns | held).where(held["rest_bytes"] <= self.room)
        if not len(block):
            return block
        unsharded_s = bounds.unsharded_token_s(self.job, block, self.constants, self.memo)
        below, gathered = self._least_s(block.columns, unsharded_s)
        gathered = np.maximum(gathered, block.columns["gathered_s"])
        block = PlanBlock(block.words, block.columns | {"below_s": below, "gathered_s": gathered})
        return block.where(self._possible(block, np.arange(len(block))))

    def _possible(self, block: PlanBlock, rows: Column) -> Column:
        """The rows of a block that may still be shown."""
        below_s, gathered_s, kind = (block.columns[name][rows] for name in ("below_s", "gathered_s", "kind"))
        return rows[np.minimum(below_s, gathered_s) < self.marks(kind)]

    def _still(self, block: PlanBlock) -> PlanBlock:
        """The plans of a sharded block that may still be shown."""
        columns = block.columns
        least = np.where(columns["zero"] == 3, columns["gathered_s"], columns["below_s"])
        return block.where(least < self.marks(columns["kind"]))

    def _with_room(self, block: PlanBlock) -> tuple[PlanBlock, PlanBlock]:
        """(plans of a sharded block that may fit as they are, plans that may if they offload)."""
        if "rest_bytes" not in block.columns:
            return block, block.where(np.zeros(len(block), dtype=bool))
        least, as_it_is = bounds.state_bytes(block.columns)
        return block.where(as_it_is <= self.room), block.where((least <= self.room) & (as_it_is > self.room))

    def _price(self, block: PlanBlock) -> PlanBlock:
        """Price a block, and give back the plans that do not fit and would be shown if they did."""
        if not len(block):
            return block
        found = prices(self.job, block, self.constants, self.memo)
        self.tally.num_priced += len(block)
        fitting = fits(self.job, self.corrections.applied(block, found.memory), self.room)
        self.tally.num_fit += int(np.count_nonzero(fitting))
        may_be_shown = found.laid_out_s < self.marks(block.columns["kind"])
        self.shown.take(block, found.laid_out_s, np.flatnonzero(fitting & may_be_shown))
        return block.where(~fitting & may_be_shown)

    def kinds(self) -> list[list[FoundPlace]]:
        """The best plans of each kind that may be shown, by what they may take at least; the fastest kind first."""
        kinds = map(self.shown.of, self.shown.places)
        return sorted(kinds, key=lambda places: places[0].token_s)
