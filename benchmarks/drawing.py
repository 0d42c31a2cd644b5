"""How long commands that draw take, and how much memory: every catalog job, and every schedule at two shapes.

python benchmarks/drawing.py [jobs] [64x256] [256x1024]

Processor time and the most memory of a process of its own, start of Python included.
"""

import os
import subprocess
import sys
import time

from shardwright.config import catalog
from shardwright.config.schedule_facts import SCHEDULES

COMMAND = [sys.executable, "-m", "shardwright"]


def measured(arguments: list[str]) -> tuple[float, float, int]:
    """(seconds of processor time, MiB at most, exit status) of a command."""
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, os.waitstatus_to_exitcode(status)


def main() -> None:
    """A table for each thing that is asked for; all without arguments."""
    wanted = sys.argv[1:] or ["jobs", "64x256", "256x1024"]
    start_s = time.process_time()
    for _ in range(10_000_000):
        pass
    print(f"10,000,000 turns of an empty loop take {time.process_time() - start_s:.2f} s on this machine now\n")
    for what in wanted:
        print(f"| {what} | seconds | with --json | MiB | |\n|---|---|---|---|---|", flush=True)
        if what == "jobs":
            rows = {job: ["simulate", job] for job in catalog.names("jobs")}
        else:
            ranks, microbatches = what.split("x")
            shape = ["--stages", ranks, "--microbatches", microbatches]
            rows = {name: ["schedule", name, *shape] for name in SCHEDULES}
        for name, arguments in rows.items():
            text_s, text_mib, status = measured(arguments)
            json_s, json_mib, _ = measured([*arguments, "--json"])
            print(
                f"| {name} | {text_s:.2f} | {json_s:.2f} | {max(text_mib, json_mib):.0f} | "
                f"{'refused' if status == 2 else '' if status == 0 else 'FAILED'} |",
                flush=True,
            )
        print()


if __name__ == "__main__":
    main()
