"""Long runs of two ranks: what the last fifth of their steps takes, the second fifth must have taken as well.

    python tests/fuzz/soak.py [--job quickstart|quickstart-moe] [--steps N]

Watches launcher, server and ranks from outside while they train. A run passes if, from the second fifth to the last,
of every process
  - the median of its own memory grew by no more than it varied within the second fifth, or 1 MiB. A leak at a steady
    rate grows three times as much as within a fifth;
  - the median numbers of threads and of open files are the same,
and a step takes no more than 1.15 times as long: either the 10 % of steps that other work on the machine disturbed
least, by the clock, or all steps, in CPU time of the ranks.
"""

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.process_tree import children

# Steps, and the plan of two ranks.
RUNS = {
    "quickstart": (2000, ("plan.dp=1", "plan.tp=1", "plan.sequence_parallel=false")),
    "quickstart-moe": (
        1000, ("plan.dp=2", "plan.tp=1", "plan.ep=2", "plan.expert_tp=0", "plan.sequence_parallel=false"),
    ),
}  # fmt: skip
SHORT = (
    "model.sequence=32", "batch.global_batch_size=8", "plan.microbatch_size=2", "run.sample_tokens=0",
    "run.eval_batches=1", "run.device=cpu",
)  # fmt: skip
SAMPLE_S = 0.5
LEAST_GROWTH_KIB = 1024
SLOWER = 1.15


@dataclass(frozen=True)
class Sample:
    """One look at one process, when the run was at a step."""

    step: int
    memory_kib: int
    threads: int
    files: int
    cpu_s: float


def main() -> None:
    """Do the runs, print what was found, and exit with status 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=list(RUNS), action="append", help="default: all, one after the other")
    parser.add_argument("--steps", type=int, help="default: 2,000 of quickstart and 1,000 of quickstart-moe")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and the command with it
    faults = []
    for job in chosen.job or RUNS:
        steps, plan = RUNS[job]
        faults += soak(job, chosen.steps or steps, plan)
    print("\n".join(faults) or "all equal")
    sys.exit(1 if faults else 0)


def soak(job: str, steps: int, plan: tuple[str, ...]) -> list[str]:
    """Run a job for so many steps. Returns what grew."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        command = [sys.executable, "-m", "shardwright", "train", job]
        for override in (*SHORT, *plan, f"optimizer.steps={steps}", f'run.folder="{folder}"'):
            command += ["--set", override]
        samples: dict[str, list[Sample]] = defaultdict(list)
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            metrics = Path(folder, "metrics.jsonl")
            while run.poll() is None:
                time.sleep(SAMPLE_S)
                if metrics.exists():
                    for name, pid in processes(run.pid).items():
                        look(samples[name], pid, metrics)
        finally:
            run.kill()
        if run.wait() != 0:
            return [f"{job} ended with status {run.returncode}"]
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return compare(job, steps, samples, {line["step"]: line["step_s"] for line in lines if "step_s" in line})


def processes(launcher: int) -> dict[str, int]:
    """The launcher, its server, and the ranks in their order."""
    result = {"launcher": launcher}
    for server in children(launcher):
        result["server"] = server
        result |= {f"rank {number}": rank for number, rank in enumerate(children(server))}
    return result


def look(samples: list[Sample], pid: int, metrics: Path) -> None:
    """Take a sample of a process, if it is there and the run has done a step."""
    with metrics.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 65536))
        complete = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
    try:
        step = json.loads(complete)["step"]
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]  # in the process and the system
        cpu_s = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        samples.append(Sample(step, int(status["RssAnon"].split()[0]), int(status["Threads"]), files, cpu_s))
    except (ValueError, KeyError, FileNotFoundError, ProcessLookupError):
        return


def compare(job: str, steps: int, samples: dict[str, list[Sample]], step_s: dict[int, float]) -> list[str]:
    """Print both fifths of each process. Returns what differs between them."""
    faults = []
    second, last = range(steps // 5 + 1, 2 * steps // 5 + 1), range(4 * steps // 5 + 1, steps + 1)
    print(f"{job}, {steps} steps of two ranks: second fifth and last")
    for name, taken in sorted(samples.items()):
        before, after = ([s for s in taken if s.step in fifth] for fifth in (second, last))
        if not before or not after:
            faults.append(f"{job}: {name} was not there in both fifths")
            continue
        memory = [s.memory_kib for s in before]
        mib = [statistics.median(s.memory_kib for s in fifth) / 1024 for fifth in (before, after)]
        allowed_mib = max(max(memory) - min(memory), LEAST_GROWTH_KIB) / 1024
        threads = [statistics.median_high(s.threads for s in fifth) for fifth in (before, after)]
        files = [statistics.median_high(s.files for s in fifth) for fifth in (before, after)]
        print(
            f"  {name:10} {mib[0]:7.1f} and {mib[1]:7.1f} MiB, {allowed_mib:.1f} more allowed; {threads[0]} and "
            f"{threads[1]} threads, {files[0]} and {files[1]} open files"
        )
        if mib[1] > mib[0] + allowed_mib:
            faults.append(f"{job}: memory of {name} grew by {mib[1] - mib[0]:.1f} MiB, {allowed_mib:.1f} are allowed")
        if threads[0] != threads[1]:
            faults.append(f"{job}: {name} had {threads[0]} threads and then {threads[1]}")
        if files[0] != files[1]:
            faults.append(f"{job}: {name} had {files[0]} open files and then {files[1]}")
    fast_s = [statistics.quantiles([step_s[step] for step in fifth], n=10)[0] for fifth in (second, last)]
    cpu_s = [
        sum(_cpu_s_a_step(taken, fifth) for name, taken in samples.items() if "rank" in name)
        for fifth in (second, last)
    ]
    print(
        f"  a step     {1e3 * fast_s[0]:.1f} and {1e3 * fast_s[1]:.1f} ms where least disturbed, "
        f"{1e3 * cpu_s[0]:.1f} and {1e3 * cpu_s[1]:.1f} ms of CPU time",
        flush=True,
    )
    if min(after / before for before, after in (fast_s, cpu_s)) > SLOWER:
        faults.append(f"{job}: steps took {1e3 * fast_s[0]:.1f} ms and then {1e3 * fast_s[1]:.1f} ms")
    return faults


def _cpu_s_a_step(taken: list[Sample], fifth: range) -> float:
    """CPU seconds of a rank's step within a fifth."""
    inside = [sample for sample in taken if sample.step in fifth]
    if not inside:  # which is a fault of its own
        return math.inf
    first, last = inside[0], inside[-1]
    return (last.cpu_s - first.cpu_s) / max(1, last.step - first.step)


if __name__ == "__main__":
    main()
