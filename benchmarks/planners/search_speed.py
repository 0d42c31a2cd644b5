"""Plans priced a second of processor time, ours against other planners', in turn on the same plans in one process.

python benchmarks/planners/search_speed.py --calculon PATH --llm-analysis PATH

The space is what Calculon can express of GPT-3 175B on A100: every tp, pp and dp, microbatch, interleaving,
recomputation, sequence parallel or not, the optimizer sharded or not. We price it block by block, a block being the
plans that differ in numbers alone; the others, and we once more, price one plan at a time, from a sample of it.
"""

import argparse
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from to_calculon import Calculon
from to_llm_analysis import LLMAnalysis

from shardwright.config.model_shape import ModelShape
from shardwright.cost.calibration import shipped
from shardwright.layers.query import PlanGrid, Run, stacked
from shardwright.memory.rank_estimate import peak_memory
from shardwright.simulate.closed_form import step_time

GPT3 = ModelShape(96, 12288, 96, 96, 128, 49152, False, 51200, 2048, tied=True, learned_positions=True)
CLUSTERS = ((1024, 1536), (4096, 6144))  # A100s, and sequences in a batch
ROUNDS, SAMPLE = 5, 60


@dataclass(frozen=True)
class Contestant:
    """Who prices, how, and how many plans a call prices."""

    name: str
    price: Callable[[], None]
    num_plans: int


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def plans(num_devices: int, batch: int) -> Iterator[PlanGrid]:
    """Every plan of the space."""
    for tp in divisors(math.gcd(num_devices, GPT3.heads)):
        for pp in divisors(math.gcd(num_devices // tp, GPT3.layers)):
            dp = num_devices // (tp * pp)
            if batch % dp:
                continue
            choices = product(
                divisors(batch // dp), divisors(GPT3.layers // pp) if pp > 1 else [1],
                ("none", "selective", "full"), (False, True) if tp > 1 else (False,), (0, 1) if dp > 1 else (0,),
            )  # fmt: skip
            for microbatch, virtual, recompute, is_sequence, zero in choices:
                yield PlanGrid(
                    dp=dp, tp=tp, pp=pp, virtual=virtual, schedule="interleaved-1f1b" if virtual > 1 else "1f1b",
                    sequence_parallel=is_sequence, zero=zero, microbatch=microbatch, global_batch=batch,
                    recompute=recompute,
                )  # fmt: skip


def blocks_of(grids: list[PlanGrid], run: Run) -> list[Run]:
    """The plans that differ in numbers alone, as one run each."""
    alike: dict[tuple, list[PlanGrid]] = {}
    for grid in grids:
        alike.setdefault(grid.words, []).append(grid)
    return [replace(run, grid=stacked(some)) for some in alike.values()]


def price(run: Run) -> None:
    """Seconds and bytes of all plans of a run."""
    constants = shipped()
    times, memory = step_time(run, constants), peak_memory(run, constants)
    assert np.isfinite(times.total).all() and np.isfinite(memory.process).all()


def contest(contestants: list[Contestant]) -> dict[str, list[float]]:
    """Plans a processor second of each in every round; who begins a round changes."""
    rates: dict[str, list[float]] = {one.name: [] for one in contestants}
    gc.disable()  # a collection would hit the one or the other by chance
    for turn in range(ROUNDS):
        shift = turn % len(contestants)
        for one in contestants[shift:] + contestants[:shift]:
            begin_s = time.process_time()
            one.price()
            rates[one.name].append(one.num_plans / (time.process_time() - begin_s))
    gc.enable()
    return rates


def main() -> None:
    """A table for each cluster."""
    parser = argparse.ArgumentParser(description="Plans priced a second of processor time.")
    parser.add_argument("--calculon", type=Path, required=True, help="the folder with Calculon's package and systems/")
    parser.add_argument("--llm-analysis", type=Path, required=True, help="the folder with the llm_analysis package")
    printed = parser.parse_args()
    calculon, llm_analysis = Calculon(printed.calculon), LLMAnalysis(printed.llm_analysis)
    print("| GPT-3 175B on | plans | planner | first round | median round | least | most |\n|" + "---|" * 7)
    for num_devices, batch in CLUSTERS:
        grids = list(plans(num_devices, batch))
        run = Run(
            GPT3,
            grids[0],
            device="a100-sxm-80g",
            software="megatron-2022",
            devices_per_node=8,
            node_bytes_per_s=300e9,
            network_bytes_per_s=25e9,
        )
        machine, blocks = calculon.machine(run), blocks_of(grids, run)
        sample = [replace(run, grid=grid) for grid in random.Random(0).sample(grids, SAMPLE)]

        def each(evaluate: Callable[[Run], object], sample: list[Run] = sample) -> Callable[[], None]:
            def call() -> None:
                for one in sample:
                    try:
                        evaluate(one)
                    except ValueError:
                        continue  # a plan that it refuses is one that it has looked at

            return call

        def ours(blocks: list[Run] = blocks) -> None:
            for block in blocks:
                price(block)

        result = contest([
            Contestant("ours, in blocks", ours, len(grids)),
            Contestant("ours, one at a time", each(price), SAMPLE),
            Contestant("Calculon", each(lambda one, machine=machine: calculon.evaluate(one, machine)), SAMPLE),
            Contestant("llm-analysis (no search)", each(llm_analysis.answer), SAMPLE),
        ])  # fmt: skip
        for name, rates in result.items():
            rest = rates[1:]
            print(
                f"| {num_devices:,} A100 | {len(grids):,} | {name} | {rates[0]:,.0f} "
                f"| {statistics.median(rest):,.0f} | "
                f"{min(rest):,.0f} | {max(rest):,.0f} |"
            )


if __name__ == "__main__":
    main()
