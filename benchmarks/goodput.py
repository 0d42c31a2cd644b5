"""How much of its time a run trains whose ranks are killed every few seconds, against what the planner's model says.

    python benchmarks/goodput.py --rounds 2

Two ranks train on this machine, and one is killed at random: failures come at a constant rate, drawn from a seed. Each
round goes through checkpoints every so many seconds and `checkpoint.auto`, all under the same failures at the same
seconds of a window of the same length; the next round takes others. The measure is the share of the window that
the steps took which the run was ahead at its end, had none been disturbed. The model (cost/failures.py) is given what
was seen in the same window: mean time between failures, what a checkpoint costs and how long its writing takes, and how
long a restart does.
"""

import argparse
import itertools
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.cost.failures import Reliability, goodput
from shardwright.train.launch.forking import ask_for

WORLD = 2
FIELDS = {
    "plan.dp": WORLD, "plan.tp": 1, "plan.pp": 1, "plan.zero": 1, "plan.sequence_parallel": "false",
    "optimizer.steps": 100_000, "run.sample_tokens": 0, "run.log_every": 1, "run.eval_every": 0, "run.max_restarts": 9,
    "run.restart_window_s": 1.0, "run.timeout_s": 30, "model.layers": 2, "model.sequence": 128,
    "batch.global_batch_size": 8, "plan.microbatch_size": 4,
}  # fmt: skip
INTERVALS_S = (0.5, 1.0, 2.0, 4.0)
AUTO = "auto"
LOOK_S = 0.01
_STEP = re.compile(r"step +(\d+)/")
_SAVED = re.compile(r"step (\d+) is saved: the run waited [\d.]+ s, all was durable after ([\d.]+) s")


@dataclass
class Attempt:
    """Messages of ranks from their start to their end, with the seconds at which they came. A save has the seconds
    of its writing, too."""

    steps: list[tuple[float, int]] = field(default_factory=list)
    saves: list[tuple[float, int, float]] = field(default_factory=list)


@dataclass
class Seen:
    """The messages of a run so far."""

    attempts: list[Attempt] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def take(self, line: str) -> None:
        """One more line."""
        now_s = time.monotonic()
        self.text.append(line)
        if line.startswith("quickstart: "):
            self.attempts.append(Attempt())
        elif result := _SAVED.match(line):
            self.attempts[-1].saves.append((now_s, int(result[1]), float(result[2])))
        elif result := _STEP.match(line):
            self.attempts[-1].steps.append((now_s, int(result[1])))


@dataclass
class Window:
    """Measurements of windows, as lists and sums over all of them."""

    seconds: float = 0.0
    idle_s: float = 0.0  # without ranks that could fail
    num_failures: int = 0
    ahead: int = 0  # steps
    recomputed: int = 0  # steps
    plain_s: list[float] = field(default_factory=list)  # steps that no checkpoint was near
    writing_s: list[float] = field(default_factory=list)
    restarts_s: list[float] = field(default_factory=list)  # from the failure to the end of the first step
    gaps_s: list[float] = field(default_factory=list)  # between checkpoints
    # Of what was undisturbed: seconds, steps and checkpoints.
    going_s: float = 0.0
    going_steps: int = 0
    going_saves: int = 0

    def add(self, other: "Window") -> None:
        """Take in another."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return statistics.fmean(self.plain_s)

    @property
    def measured(self) -> float:
        """The share of the time that trained."""
        return self.ahead * self.step_s / self.seconds

    @property
    def interval_s(self) -> float:
        """Seconds of training between checkpoints."""
        return statistics.fmean(self.gaps_s) - float(self.job.checkpoint_s)

    @property
    def modelled(self) -> float:
        """The prediction of the model for `measured`."""
        return float(goodput(self.job, self.interval_s).training)

    @property
    def job(self) -> Reliability:
        """The input of the model."""
        return Reliability(
            between_failures_s=(self.seconds - self.idle_s) / self.num_failures,
            checkpoint_s=max(0.0, self.going_s - self.going_steps * self.step_s) / self.going_saves,
            restart_s=statistics.fmean(self.restarts_s) - self.step_s,
            writing_s=statistics.fmean(self.writing_s),
            idle_s=self.idle_s / self.num_failures,
        )


def children(pid: int) -> list[int]:
    """The processes that one has started."""
    started: list[int] = []
    with suppress(OSError):  # the process has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # the thread has ended
                started += map(int, (task / "children").read_text().split())
    return started


def run(interval: float | str, failures: Sequence[tuple[float, int]], window_s: float, mean_s: float) -> Window:
    """One window: it begins at the end of the first step. Failures are seconds in it, and a rank."""
    how = {"checkpoint.auto": "true"} if interval == AUTO else {"checkpoint.every_s": interval}
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        fields = FIELDS | how | {
            "run.folder": f'"{folder}"', "cluster.hours_between_failures": mean_s * WORLD / 3600.0,
        }  # fmt: skip
        overrides = [part for name, value in fields.items() for part in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "shardwright", "train", "quickstart", *overrides]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=ask_for(signal.SIGKILL),
        )
        seen, stream = Seen(), process.stdout
        assert stream is not None
        reader = threading.Thread(target=lambda: [seen.take(line) for line in stream], daemon=True)
        reader.start()
        try:
            while not (seen.attempts and seen.attempts[0].steps):
                assert process.poll() is None, "".join(seen.text)
                time.sleep(0.01)
            began_s = seen.attempts[0].steps[0][0]
            struck_s, idle_s, looked_s, to_come = list[float](), 0.0, began_s, list(failures)
            while (now_s := time.monotonic()) < began_s + window_s:
                ranks = sorted(rank for server in children(process.pid) for rank in children(server))
                if len(ranks) < WORLD:
                    idle_s += now_s - looked_s
                looked_s = now_s
                if to_come and now_s >= began_s + to_come[0][0]:
                    _, rank = to_come.pop(0)
                    if len(ranks) == WORLD:  # else it strikes nobody: the launcher waits before it starts others
                        os.kill(ranks[rank], signal.SIGKILL)
                        struck_s.append(now_s)
                time.sleep(LOOK_S)
            assert process.poll() is None, "".join(seen.text)
        finally:
            process.kill()
            process.wait()
            reader.join()
    return read(seen, began_s, began_s + window_s, struck_s, idle_s)


def read(seen: Seen, began_s: float, ended_s: float, struck_s: list[float], idle_s: float) -> Window:
    """The measurements of a window."""
    result = Window(seconds=ended_s - began_s, idle_s=idle_s, num_failures=len(struck_s))
    last = first = 0
    for attempt in seen.attempts:
        steps = [(at_s, step) for at_s, step in attempt.steps if at_s <= ended_s]
        if not steps:  # it was killed before
            continue
        done = {step: at_s for at_s, step in steps}
        saves = [(done[step], writing_s) for _, step, writing_s in attempt.saves if step in done]
        result.writing_s += [writing_s for _, writing_s in saves]
        result.gaps_s += [after_s - before_s for (before_s, _), (after_s, _) in itertools.pairwise(saves)]
        result.plain_s += [
            after_s - before_s
            for (before_s, _), (after_s, _) in itertools.pairwise(steps)
            if not any(at_s <= before_s < at_s + 1.5 * writing_s for at_s, writing_s in saves)
        ]
        result.going_s += steps[-1][0] - steps[0][0]
        result.going_steps += len(steps) - 1
        result.going_saves += len(saves)
        if last:
            result.recomputed += last - steps[0][1] + 1
            result.restarts_s.append(steps[0][0] - max(at_s for at_s in struck_s if at_s < steps[0][0]))
        first, last = first or steps[0][1], steps[-1][1]
    result.ahead = last - first
    return result


def drawn(seed: int, mean_s: float, window_s: float) -> list[tuple[float, int]]:
    """Failures at a constant rate: seconds in the window, and a rank."""
    rng, results, at_s = random.Random(seed), list[tuple[float, int]](), 0.0
    while (at_s := at_s + rng.expovariate(1.0 / mean_s)) < window_s:
        results.append((at_s, rng.randrange(WORLD)))
    return results


def main() -> None:
    """Print a row for each window, and one for all of an interval."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--window-s", type=float, default=45.0)
    parser.add_argument("--mean-s", type=float, default=6.0, help="seconds between failures")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    columns = ["checkpoints every", "failures", "s between", "step, ms", "interval, s", "it costs, ms", "writing, ms",
               "restart, s", "idle, s", "recomputed", "modelled", "goodput", "modelled", "off by", "steps"]  # fmt: skip
    print("| round | " + " | ".join(columns) + " |\n|" + " --- |" * (1 + len(columns)))
    of_all: dict[float | str, Window] = {interval: Window() for interval in (*INTERVALS_S, AUTO)}
    for number in range(chosen.rounds):
        failures = drawn(chosen.seed + number, chosen.mean_s, chosen.window_s)
        for interval in random.Random(number).sample(list(of_all), len(of_all)):
            window = run(interval, failures, chosen.window_s, chosen.mean_s)
            of_all[interval].add(window)
            print(f"| {number} | {row(interval, window)} |", flush=True)
    for interval, window in of_all.items():
        print(f"| all | {row(interval, window)} |")
    measured, modelled = (
        sum(each) / len(of_all)
        for each in zip(*((one.measured, float(one.modelled)) for one in of_all.values()), strict=True)
    )
    print(f"goodput {measured:.1%} on average, modelled {modelled:.1%}: {modelled / measured - 1:+.1%}")
    best = max((of_all[interval].measured, interval) for interval in INTERVALS_S)
    print(f"auto has {of_all[AUTO].measured / best[0]:.3f} of the best of these, which is every {best[1]} s")


def row(interval: float | str, window: Window) -> str:
    """Cells of the table."""
    if not (window.gaps_s and window.restarts_s):
        return (
            f"{interval} | {window.num_failures} | | | too few checkpoints to model | | | | | | | | | | {window.ahead}"
        )
    job, model = window.job, goodput(window.job, window.interval_s)
    recomputed = window.recomputed * window.step_s / window.seconds
    off = window.modelled / window.measured - 1
    return " | ".join([
        str(interval), str(window.num_failures), f"{job.between_failures_s:.1f}", f"{1e3 * window.step_s:.0f}",
        f"{window.interval_s:.2f}", f"{1e3 * float(job.checkpoint_s):.0f}", f"{1e3 * float(job.writing_s):.0f}",
        f"{job.restart_s:.2f}", f"{job.idle_s:.2f}", f"{recomputed:.1%}", f"{float(model.lost_work):.1%}",
        f"{window.measured:.1%}", f"{window.modelled:.1%}", f"{off:+.1%}", str(window.ahead),
    ])  # fmt: skip


if __name__ == "__main__":
    main()
