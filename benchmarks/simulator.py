"""Actions a second that timing.py plays on one core, from a program to all start and end times.

python benchmarks/simulator.py
"""

import statistics
import time

from shardwright.schedule.generate import training_program
from shardwright.schedule.timing import Costs, play

ROUNDS = 7


def main() -> None:
    """A few shapes, the median of several rounds; processor time, so that other programs count less."""
    print("| schedule | ranks | microbatches | actions | actions a second |\n|---|---|---|---|---|")
    for name, ranks, microbatches, virtual in (("1f1b", 8, 32, 1), ("1f1b", 16, 512, 1), ("zb-v", 8, 128, 1)):
        program = training_program(name, ranks, microbatches, virtual)
        costs = Costs.uniform(program.num_stages, latency=0.1)
        num_actions = sum(map(len, program.ranks))
        rates = []
        for _ in range(ROUNDS):
            start_s = time.process_time()
            play(program, costs)
            rates.append(num_actions / (time.process_time() - start_s))
        print(f"| {name} | {ranks} | {microbatches} | {num_actions:,} | {statistics.median(rates):,.0f} |")


if __name__ == "__main__":
    main()
