"""Actions a second that are played on one core: by timing.py, from a program to all start and end times, and again with
other costs; by batched_timing.py, of ten plans in one order at once, from the order to the ends of steps.

python benchmarks/simulator.py
"""

import statistics
import time
from dataclasses import replace

from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.schedule.shape_program import shape_order, shape_program
from shardwright.schedule.timing import Costs, play
from shardwright.simulate.round_layout import rounds_of

ROUNDS = 7
PLANS = 10


def main() -> None:
    """A few shapes, the median of several rounds; processor time, so that other programs count less."""
    print("| schedule | ranks | microbatches | actions | actions a second | again | of ten plans at once |")
    print("|---|---|---|---|---|---|---|")
    for name, ranks, microbatches, virtual in (("1f1b", 8, 32, 1), ("1f1b", 16, 512, 1), ("zb-v", 8, 128, 1)):
        program = shape_program(name, PipelineShape(ranks, microbatches, virtual))
        costs = Costs.uniform(program.num_stages, latency=0.1)
        num_actions = sum(map(len, program.ranks))
        order = shape_order(name, PipelineShape(ranks, microbatches, virtual))
        rates, again, together = [], [], []
        for _ in range(ROUNDS):
            unknown = replace(program)  # orders are kept of each object
            for played in (rates, again):
                start_s = time.process_time()
                play(unknown, costs)
                played.append(num_actions / (time.process_time() - start_s))
            start_s = time.process_time()
            rounds_of(order, has_collectives=False).ends([costs] * PLANS)
            together.append(PLANS * num_actions / (time.process_time() - start_s))
        medians = " | ".join(f"{statistics.median(of):,.0f}" for of in (rates, again, together))
        print(f"| {name} | {ranks} | {microbatches} | {num_actions:,} | {medians} |")


if __name__ == "__main__":
    main()
