"""Local improvement of an order: tabu search on the critical path.

A schedule is a job shop: ranks are machines, microbatches are jobs. As in a job shop, only a change on the critical
path can make it shorter (Nowicki & Smutnicki 1996, "A fast taboo search algorithm for the job shop problem"). The path
is a chain of blocks, each a run of operations on one rank without a gap. A useful move takes an operation to an end of
its block, or over that end (Balas & Vazacopoulos 1998), or a weight gradient into a gap. The longest paths before each
operation (heads) and after it (tails) are known, so a move is judged without simulating the order. The most promising
move is made, even if it makes the order worse for now, and may not be undone for some moves (tabu).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from shardwright.schedule.solver.problem import NONE, TINY, Clock, Problem, Rows, W

_MOST_MOVES = 60  # judged at a time
_TABU = (6, 14)  # the range of the number of moves for which a move may not be undone
_PATIENCE = 0.4  # stop after this share of all simulations without a gain


@dataclass(frozen=True, slots=True)
class _Move:
    """A new order of a rank's operations from position `first` on, in which `mover` runs sooner, or later."""

    rank: int
    first: int
    order: list[int]
    mover: int
    sooner: bool


def improve(
    problem: Problem, rows: Rows, simulations: int, goal: float = 0.0, begin: Sequence[float] = (), seed: int = 0
) -> Rows:
    """The order found with the shortest time of the slowest rank, counted from each rank's `begin`. Stops at `goal`."""
    return _Search(problem, rows, list(begin) or [0.0] * problem.num_ranks, seed).run(simulations, goal)


class _Search:
    """An order that changes, its clock, and the best order so far."""

    def __init__(self, problem: Problem, rows: Rows, begin: list[float], seed: int) -> None:
        self._problem, self._begin, self._random = problem, begin, Random(seed)
        self._rows = [list(row) for row in rows]
        self._position = [0] * len(problem.cost)
        self._delay = [problem.delay(line) for line in range(3 * problem.num_stages)]
        clock = problem.run(self._rows, begin)
        assert clock is not None, "the order to improve stops for ever"
        self._clock = clock
        self._tails: list[float] = []
        self._best, self._best_rows = self._span(clock), [list(row) for row in rows]
        self._tabu: dict[tuple[int, bool], int] = {}

    def _span(self, clock: Clock) -> float:
        return max(free - begin for free, begin in zip(clock.free, self._begin, strict=True))

    def run(self, simulations: int, goal: float) -> Rows:
        """Move until there is nothing to gain."""
        self._index_all()
        last_gain = 0
        for count in range(simulations):
            if self._best <= goal * (1 + TINY) or count - last_gain > _PATIENCE * simulations:
                break
            self._tails = self._all_tails()
            if not self._make_best_move(count):
                self._kick()
            if (span := self._span(self._clock)) < self._best * (1 - TINY):
                self._best, self._best_rows, last_gain = span, [list(row) for row in self._rows], count
        return self._best_rows

    def _index_all(self) -> None:
        for row in self._rows:
            for position, op in enumerate(row):
                self._position[op] = position

    def _all_tails(self) -> list[float]:
        """The longest time from the end of each operation to the end of the step, less the `begin` of the rank that
        ends last on that path."""
        problem, m, delay = self._problem, self._problem.num_microbatches, self._delay
        cost, consumer, rank_of = problem.cost, problem.consumer, problem.rank_of
        tails = [0.0] * len(cost)
        after = [self._last_tail(rank) for rank in range(problem.num_ranks)]
        for op in reversed(self._clock.order):
            line = op // m
            rank, next_op = rank_of[line], consumer[op]
            tail = after[rank]
            if next_op >= 0:
                tail_of_user = delay[line] + cost[next_op] + tails[next_op]
                if tail_of_user > tail:
                    tail = tail_of_user
            tails[op] = tail
            after[rank] = tail + cost[op]
        return tails

    def _last_tail(self, rank: int) -> float:
        last = self._rows[rank][-1]
        return self._clock.free[rank] - self._clock.end[last] - self._begin[rank]

    def _make_best_move(self, count: int) -> bool:
        """Make the most promising move that is allowed. False if there is none."""
        moves = [move for block in self._critical_blocks() for move in self._moves(*block)]
        if len(moves) > _MOST_MOVES:
            moves = self._random.sample(moves, _MOST_MOVES)
        judged = [(self._promise(move), self._random.random(), move) for move in moves if self._keeps_order(move)]
        for promise, _, move in sorted(judged, key=lambda entry: entry[:2]):
            is_tabu = self._tabu.get((move.mover, move.sooner), -1) > count
            if is_tabu and promise >= self._best * (1 - TINY):
                continue
            if self._make(move):
                self._tabu[move.mover, not move.sooner] = count + self._random.randint(*_TABU)
                return True
        return False

    def _make(self, move: _Move) -> bool:
        row, part = self._rows[move.rank], slice(move.first, move.first + len(move.order))
        before = row[part]
        row[part] = move.order
        clock = self._problem.run(self._rows, self._begin) if self._problem.fits(move.rank, row) else None
        if clock is None:
            row[part] = before
            return False
        self._clock = clock
        for position in range(part.start, part.stop):
            self._position[row[position]] = position
        return True

    def _kick(self) -> None:
        """Go back to the best order, and swap some neighbours at random."""
        self._rows = [list(row) for row in self._best_rows]
        self._index_all()
        self._tabu.clear()
        has_moved = False
        for _ in range(8):
            rank = self._random.randrange(len(self._rows))
            row = self._rows[rank]
            first = self._random.randrange(len(row) - 1) if len(row) > 1 else 0
            move = _Move(rank, first, row[first : first + 2][::-1], row[first], sooner=False)
            if self._keeps_order(move):
                has_moved = self._make(move) or has_moved
        if not has_moved:
            clock = self._problem.run(self._rows, self._begin)
            assert clock is not None
            self._clock = clock

    def _critical_blocks(self) -> list[tuple[int, int, int]]:
        """(rank, first, last) of each block of one critical path, chosen at random where it forks."""
        problem, clock, m = self._problem, self._clock, self._problem.num_microbatches
        rank = max(range(problem.num_ranks), key=lambda rank: clock.free[rank] - self._begin[rank])
        first = last = len(self._rows[rank]) - 1
        blocks = []
        while True:
            op = self._rows[rank][first]
            start = clock.end[op] - problem.cost[op] - problem.time_tolerance
            producer = problem.producer[op]
            waits_for_input = producer != NONE and clock.arrival[producer] >= start
            waits_for_rank = first > 0 and clock.end[self._rows[rank][first - 1]] >= start
            if waits_for_rank and not (waits_for_input and self._random.random() < 0.5):
                first -= 1
                continue
            blocks.append((rank, first, last))
            if not waits_for_input:
                return blocks
            rank, first = problem.rank_of[producer // m], self._position[producer]
            last = first

    def _moves(self, rank: int, first: int, last: int) -> list[_Move]:
        row, moves = self._rows[rank], []
        for index in range(first, last):
            if index in (first, last - 1):
                moves.append(_Move(rank, index, [row[index + 1], row[index]], row[index + 1], sooner=True))
            else:
                moves.append(self._move_later(rank, index, last))
        moves += [self._move_sooner(rank, first, index) for index in range(first + 2, last + 1)]
        first_weight_gradient = self._problem.line(W, 0) * self._problem.num_microbatches
        for index in range(first, last + 1):
            if row[index] >= first_weight_gradient:
                moves += [self._move_sooner(rank, gap, index) for gap in self._gaps(rank, range(first - 1, 0, -1))]
                moves += [self._move_later(rank, index, gap - 1) for gap in self._gaps(rank, range(last + 2, len(row)))]
        return moves

    def _gaps(self, rank: int, positions: range) -> list[int]:
        """The first position in a range before which the rank idles, as a list of one; empty if there is none."""
        row, end, cost, tolerance = self._rows[rank], self._clock.end, self._problem.cost, self._problem.time_tolerance
        for index in positions:
            if end[row[index]] - cost[row[index]] > end[row[index - 1]] + tolerance:
                return [index]
        return []

    def _move_sooner(self, rank: int, first: int, index: int) -> _Move:
        row = self._rows[rank]
        return _Move(rank, first, [row[index], *row[first:index]], row[index], sooner=True)

    def _move_later(self, rank: int, index: int, last: int) -> _Move:
        row = self._rows[rank]
        return _Move(rank, index, [*row[index + 1 : last + 1], row[index]], row[index], sooner=False)

    def _keeps_order(self, move: _Move) -> bool:
        """True if each line keeps the order of its microbatches, and nothing runs before what it needs."""
        problem, m = self._problem, self._problem.num_microbatches
        mover, passed = move.mover, move.order[1:] if move.sooner else move.order[:-1]
        line = mover // m
        half = problem.num_stages * m  # from an I to its W
        if move.sooner:
            return not any(
                op // m == line or op == problem.producer[mover] or op + half == mover >= 2 * half for op in passed
            )
        return not any(
            op // m == line or op == problem.consumer[mover] or mover + half == op >= 2 * half for op in passed
        )

    def _promise(self, move: _Move) -> float:
        """A lower bound, mostly exact, of the longest path through the operations of a move."""
        problem, clock, m = self._problem, self._clock, self._problem.num_microbatches
        cost, row = problem.cost, self._rows[move.rank]
        now = clock.end[row[move.first - 1]] if move.first else self._begin[move.rank]
        ends: dict[int, float] = {}
        for op in move.order:
            producer = problem.producer[op]
            if producer != NONE:
                now = max(now, ends.get(producer, clock.arrival[producer]))
            now += cost[op]
            ends[op] = now
        following = move.first + len(move.order)
        if following < len(row):
            after = self._tails[row[following]] + cost[row[following]]
        else:
            after = self._last_tail(move.rank)
        longest, tails = 0.0, self._tails
        inner: dict[int, float] = {}
        for op in reversed(move.order):
            consumer = problem.consumer[op]
            if consumer != NONE:
                after = max(after, self._delay[op // m] + cost[consumer] + inner.get(consumer, tails[consumer]))
            inner[op] = after
            longest = max(longest, ends[op] + after)
            after += cost[op]
        return longest
