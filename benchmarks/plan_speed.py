"""Seconds until `shardwright plan JOB --json` tells a first plan, its best one, and all, for the catalog's jobs.

    python benchmarks/plan_speed.py                                    # every job with a cluster, on up to two cores
    python benchmarks/plan_speed.py llama3-405b-16k yi-34b --cores 1
    python benchmarks/plan_speed.py "llama3-70b --devices 64 --device h100-sxm" --rounds 3

Each answer is given by a fresh process, start-up included, whose modules are compiled as those of an installation are;
of several rounds the median is told. The best plan is the first one of the answer: progress names it when it is known,
and else the answer does. Seconds of a wall clock mean something only on a machine that does nothing else: those of the
processor are beside them, of the first process and of the copies that it forks, with the most memory of either. The
exit status is 1 where an answer takes longer than is promised: 2 s for the first plan, and 5 s for all, or 15 s with
hundreds of experts (deepseek-v3).
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from shardwright.config import catalog
from shardwright.config.load import load_job

FIRST_S, WHOLE_S, WHOLE_OF_S = 2.0, 5.0, {"deepseek-v3": 15.0}

# The command, in a process that listens to its own records of progress.
_CODE = """
import io, json, logging, resource, sys, time
from contextlib import redirect_stdout

begin_s, told = float(sys.argv[1]), []
from shardwright.train.launch.loading import collect_rarely
collect_rarely()
from shardwright.cli.main import cli
from shardwright.config.progress_records import LOGGER

class Listener(logging.Handler):
    def emit(self, record):
        if getattr(record, "best", None) is not None:
            told.append((time.time() - begin_s, record.best))

LOGGER.addHandler(Listener())
with redirect_stdout(io.StringIO()) as output:
    cli(["plan", *sys.argv[2:], "--json"], standalone_mode=False)
whole_s = time.time() - begin_s
uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
cpu_s, mib = [use.ru_utime + use.ru_stime for use in uses], [use.ru_maxrss / 1024 for use in uses]
first_row = json.loads(output.getvalue())[0]
best = first_row["plan"], first_row["global_batch_size"]
told_plans = [(seconds, (job.plan.model_dump(mode="json"), job.batch.global_batch_size)) for seconds, job in told]
first_s = told_plans[0][0] if told_plans else whole_s
best_s = next((seconds for seconds, plan in told_plans if plan == best), whole_s)
print(json.dumps([first_s, best_s, whole_s, *cpu_s, max(mib)]))
"""


class Answer(NamedTuple):
    """Seconds until the first plan, the best one and the whole answer, of the processor in the first process and in its
    copies; and the most memory of one of them, in MiB."""

    first_s: float
    best_s: float
    whole_s: float
    cpu_s: float
    copies_cpu_s: float
    mib: float


def answered(words: list[str], cores: set[int], compiled: str) -> Answer:
    """One answer of a fresh process that may use some cores, and has its compiled modules in a folder."""
    environment = os.environ | {"PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}  # "" is no
    done = subprocess.run(
        [sys.executable, "-c", _CODE, str(time.time()), *words],
        capture_output=True,
        text=True,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    if done.returncode:
        raise SystemExit(f"plan {' '.join(words)}: {done.stderr.strip()}")
    return Answer(*json.loads(done.stdout.splitlines()[-1]))


def planned_jobs() -> list[str]:
    """The jobs of the catalog whose cluster is known."""
    return [name for name in catalog.names("jobs") if load_job(name).cluster.num_devices > 1]


def main() -> None:
    """A line for each job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("jobs", nargs="*", help="jobs, each with options of plan in one word")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    cores = set(sorted(os.sched_getaffinity(0))[: asked.cores])
    slow = []
    headings = ["Job", "First plan", "Best plan", "Answer", "CPU", "CPU of copies", "MiB"]
    print(f"| {' | '.join(headings)} |\n{'|---' * len(headings)}|")
    with tempfile.TemporaryDirectory() as compiled:
        answered(["quickstart-gpt", "--devices", "8", "--device", "h100-sxm"], cores, compiled)  # compiles the modules
        for job in asked.jobs or planned_jobs():
            words = shlex.split(job)
            rounds = [answered(words, cores, compiled) for _ in range(asked.rounds)]
            middle = Answer(*(statistics.median(values) for values in zip(*rounds, strict=True)))
            seconds = " | ".join(f"{value:.1f}" for value in middle[:5])
            print(f"| `{job}` | {seconds} | {middle.mib:.0f} |", flush=True)
            if middle.first_s > FIRST_S or middle.whole_s > WHOLE_OF_S.get(words[0], WHOLE_S):
                slow.append(job)
    if slow:
        print(f"slower than promised: {', '.join(slow)}")
    sys.exit(bool(slow))


if __name__ == "__main__":
    main()
