"""Prices of many runs: runs that differ only in numbers and layouts of their plans are priced at once."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardwright.config.base import error_text
from shardwright.cost.calibration import Constants
from shardwright.layers.arrays import entries
from shardwright.layers.memo import Memo
from shardwright.layers.query import Run, stacked
from shardwright.memory.rank_estimate import Memory, peak_memory
from shardwright.simulate.closed_form import StepTime, step_time


@dataclass(frozen=True)
class Price:
    """The price of one step of a run, in seconds, and in bytes on the pipeline rank that needs most."""

    time: StepTime
    memory: Memory


def batches(runs: Sequence[Run]) -> Iterator[tuple[Run, list[int]]]:
    """Runs with arrays, each with the indices of the `runs` in it."""
    places_of_batches: dict[Hashable, list[int]] = {}
    for place, run in enumerate(runs):
        places_of_batches.setdefault((run.setting, run.grid.having({"layout": ()}).words), []).append(place)
    for places in places_of_batches.values():
        yield replace(runs[places[0]], grid=stacked([runs[place].grid for place in places])), places


def prices(runs: Sequence[Run], constants: Constants, memo: Memo | None = None) -> list[Price | str]:
    """The price of each run, or the error that left it without one. `memo` has earlier results, if all runs are of the
    same model and cluster."""
    answers: dict[int, Price | str] = {}
    for run, places in batches(runs):
        run_memo = memo or Memo()
        try:
            time, memory = step_time(run, constants, run_memo), peak_memory(run, constants, run_memo)
        except (KeyError, ValueError) as error:
            if run.grid.layouts:  # one of them may be at fault
                answers |= {place: prices([runs[place]], constants, memo)[0] for place in places}
            else:
                answers |= dict.fromkeys(places, error_text(error))
            continue
        answers |= zip(places, map(Price, entries(time), entries(memory)), strict=True)
    return [answers[place] for place in range(len(runs))]
