"""Tools that the parts of gpu.py share: the device, cases of which each may fail alone, and timing by CUDA's events.

A part is a list of cases. A case gives a row, a dict that JSON can hold; what it raises becomes a row too. Rows are
written after each case into the part's file, so that what ends a part early takes nothing with it and another call goes
on behind them.
"""

import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]
Case = tuple[str, Callable[[], Row]]

BROKEN = 3  # exit status of a part whose device no longer answers: another process may go on
OUT_OF_TIME = 4  # exit status of one whose time was over before its cases were
_BEGUN = "the process of this part ended in this case"  # unless it is over, and its row another one
_ROUNDS, _ROUND_S = 15, 2e-3
_MOST_CALLS = 20  # of a round: a device's queue has room for about a thousand kernels
_MOST_ASLEEP = 400_000_000  # cycles that the device waits for the host to launch a round


@dataclass(frozen=True)
class Bench:
    """Where a part runs. `kind` says whose kernels are taken; a dry one has tensors without memory. `catalog_name` is
    the device that predictions are made for."""

    kind: str
    is_dry: bool
    is_quick: bool
    folder: Path
    ends_s: float
    catalog_name: str = "h200-sxm"

    @property
    def mode(self) -> dict[str, Any]:
        """The fields that a file of such a call must have."""
        return {"kind": self.kind, "dry": self.is_dry, "quick": self.is_quick}

    def file(self, part: str) -> Path:
        """Where the rows of a part are, from its first case on."""
        return self.folder / f"{part}.json"

    @property
    def device(self) -> torch.device:
        """Where tensors are."""
        return torch.device("meta") if self.is_dry else torch.device("cuda", 0) if self.kind == "cuda" else CPU

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, std: float = 1.0) -> Tensor:
        """Normal numbers, the same in every run of this process's order of calls."""
        return torch.randn(shape, device=self.device, dtype=torch.float32).mul_(std).to(dtype)

    def fewer(self, cases: Sequence[Case]) -> list[Case]:
        """All of them, or if it must be quick one of each kind: what stands before the first comma of a name."""
        return list({name.partition(",")[0]: (name, run) for name, run in reversed(cases)}.values())[::-1] \
            if self.is_quick else list(cases)  # fmt: skip

    def settle(self) -> None:
        """Wait for the device; raises what a kernel did wrong."""
        if self.kind == "cuda" and not self.is_dry:
            torch.cuda.synchronize()


CPU = torch.device("cpu")


def write_json(path: Path, values: Any) -> None:
    """Write a file that is either there as a whole or not at all."""
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


class TimeIsOverError(Exception):
    """A case is half done: what it has so far, with which another call begins it again."""

    def __init__(self, so_far: Row) -> None:
        super().__init__("the time of this part was over")
        self.so_far = so_far


def read_part(path: Path) -> Row:
    """The record of a part; nothing if it was not begun."""
    result: Row = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return result


def read_rows(path: Path) -> list[Row]:
    """The rows of a part that was begun, none if it was not."""
    return list(read_part(path).get("rows", ()))


def put_last(path: Path) -> None:
    """Let the case that an interrupted call ended in be run again, behind all others: it may be what took the time."""
    part = read_part(path)
    rows = part.get("rows", [])
    begun = [row["case"] for row in rows if row.get("error") == _BEGUN]
    if begun:
        kept = [row for row in rows if row["case"] not in begun]
        write_json(path, part | {"rows": kept, "last": [*part.get("last", ()), *begun]})


def run_cases(bench: Bench, cases: Sequence[Case], path: Path) -> None:
    """Run the cases that have no row in a part's file yet, and add theirs. Ends the process where the device is broken,
    and where the time is over with cases left."""
    part = read_part(path) | {"num_cases": len(cases)}
    rows, last = list(part.get("rows", ())), part.get("last", ())

    def write(*more: Row) -> None:
        write_json(path, part | {"rows": [*rows, *more]})

    done = {row["case"] for row in rows}
    for name, run in sorted(cases, key=lambda case: case[0] in last):
        if name in done:
            continue
        if time.monotonic() > bench.ends_s:
            write()
            sys.exit(OUT_OF_TIME)
        start_s = time.perf_counter()
        row: Row = {"case": name}
        write(row | {"error": _BEGUN})
        try:
            row |= run()
            bench.settle()
        except TimeIsOverError as half:
            part |= {"half": {name: half.so_far}}
            write()
            sys.exit(OUT_OF_TIME)
        except Exception as error:
            row |= {"error": _said(error), "trace": traceback.format_exc()[-2000:]}
        row["took_s"] = round(time.perf_counter() - start_s, 3)
        rows.append(row)
        write()
        try:
            bench.settle()
            if bench.kind == "cuda" and not bench.is_dry:
                gc.collect()  # what a case held in circles is memory that the next one needs
                torch.cuda.empty_cache()
        except Exception:  # a kernel has left the context in ruins
            os._exit(BROKEN)
    write()


def _said(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) < 500 else text[:497] + "..."


def quartiles(values: Sequence[float]) -> list[float]:
    """Low, middle and high."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3


def time_s(bench: Bench, work: Callable[[], object], rounds: int = _ROUNDS) -> list[float] | None:
    """Quartiles of the seconds that `work` takes on the device; None in a dry run, which does it once.

    On CUDA a round is as many calls as take about two milliseconds. Before it the device is kept busy while the host
    launches them all, so that gaps of the host are not in what is measured; nothing within a round waits for anything.
    """
    if bench.is_dry:
        work()
        return None
    if bench.kind != "cuda":
        work()
        return quartiles([_wall_s(work) for _ in range(3)])
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    host_s = _wall_s(work)
    end.record()
    torch.cuda.synchronize()
    number = max(1, min(_MOST_CALLS, round(_ROUND_S / max(begin.elapsed_time(end) / 1e3, 1e-6))))
    asleep = min(_MOST_ASLEEP, int(2e9 * 1.5 * host_s * number))  # no device's clock is above 2 GHz
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for first, last in pairs:
        torch.cuda._sleep(asleep)
        first.record()
        for _ in range(number):
            work()
        last.record()
        last.synchronize()  # after the round: a queue that is full would make the host wait within the next one
    return quartiles([first.elapsed_time(last) / 1e3 / number for first, last in pairs])


def _wall_s(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def relative(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted, in float64; 0 where tensors have no values."""
    if found.is_meta:
        assert found.shape == wanted.shape, f"{tuple(found.shape)} is not {tuple(wanted.shape)}"
        return 0.0
    exact = wanted.double().cpu()
    difference = torch.linalg.vector_norm(found.double().cpu() - exact).item()
    return difference / max(torch.linalg.vector_norm(exact).item(), 1e-30)


def judged(bench: Bench, differences: dict[str, float], limits: dict[str, float]) -> Row:
    """A row of differences and their limits, and whether all are within; nobody knows in a dry run."""
    ok = None if bench.is_dry else all(value <= limits[name] for name, value in differences.items())
    return {"differences": differences, "limits": limits, "ok": ok}
