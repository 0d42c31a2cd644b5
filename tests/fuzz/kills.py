"""Runs that are harmed at a random moment, and end with the losses of one that nobody harmed.

    python tests/fuzz/kills.py --seed 1 --count 20

Each draws a plan, a harm (tests/fuzz/harms.py) and its moment. The command is then given again, as a supervisor would
give it, until it is done. These must hold:
  - the losses are those of the unharmed run, bit for bit, and no step is missing or told twice;
  - a run goes on from the newest checkpoint that was whole when it was harmed, unless that one was damaged;
  - what was told as saved is there;
  - no checkpoint that nobody damaged is found broken, and nothing of broken ones is left at the end.
A harm that did not happen, or that the run did not feel, does not count, and another moment is drawn. Commands are
forked from this process, which has torch already (tests/fuzz/preloaded.py); every tenth is one of its own.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz import preloaded
from fuzz.harms import DAMAGES, HARMS, LONGEST_S, MissedError, Run, kept, newest_whole, wait_until_gone
from shardwright.train.checkpoint.manifest import folder_name
from shardwright.train.launch.forking import ask_for

STEPS = 20
FIELDS = {
    "plan.dp": 1, "plan.tp": 1, "plan.pp": 1, "plan.sequence_parallel": "false", "plan.microbatch_size": 2,
    "optimizer.steps": STEPS, "optimizer.warmup_steps": 5, "run.sample_tokens": 0, "run.log_every": 1,
    "run.eval_every": 0, "run.eval_batches": 1, "run.timeout_s": 6, "run.max_restarts": 9, "model.layers": 2,
    "model.hidden": 64, "model.ffn": 128, "model.sequence": 64, "batch.global_batch_size": 8,
    "checkpoint.every_steps": 2,
}  # fmt: skip
# Jobs of two ranks, and what is set in them.
PLANS: dict[str, tuple[str, dict[str, object]]] = {
    "zero 1": ("quickstart", {"plan.dp": 2, "plan.zero": 1}),
    "zero 3": ("quickstart", {"plan.dp": 2, "plan.zero": 3}),
    "pipeline": ("quickstart", {"plan.pp": 2}),
    "tensor": ("quickstart", {"plan.tp": 2, "plan.sequence_parallel": "true"}),
    "experts": ("quickstart-moe", {"plan.dp": 2, "plan.ep": 2, "plan.expert_tp": 0, "model.layers": 1}),
    "fp16": ("quickstart", {"plan.dp": 2, "plan.zero": 2, "precision.compute": '"fp16"'}),
}
MOST_ATTEMPTS, MOST_DRAWS, EVERY_OWN = 5, 8, 10
DISK_MIB, MOST_SAID = 12, 2500
_NUMBER = struct.Struct("=i")


@dataclass(frozen=True)
class Unharmed:
    """The losses of a run that nobody harms, and its time."""

    losses: list[tuple[int, float]]
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: its fault, if it has one, and where it was hit after how many moments that were gone."""

    plan: str
    harm: str
    where: str
    num_missed: int
    wrong: str
    seconds: float = 0.0


def arguments(plan: str, folder: Path, place: Path, text: Path) -> list[str]:
    """The command's, which are always the same."""
    job, fields = PLANS[plan]
    places = {"run.folder": f'"{folder}"', "checkpoint.path": f'"{place}"', "data.path": f'"{text}"'}
    overrides = [part for name, value in (FIELDS | fields | places).items() for part in ("--set", f"{name}={value}")]
    return ["train", job, *overrides]


def write_text(file: Path) -> None:
    """Something to train on that takes no time to read."""
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghij", k=rng.randrange(2, 7))) for _ in range(50)]
    file.write_text(" ".join(rng.choices(words, k=20_000)))


def losses(folder: Path) -> list[tuple[int, float]]:
    """Step and loss of every line of a run's metrics."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def began_at(printed_text: str) -> list[int | None]:
    """The step that each start of the ranks went on from; None for those that ended before they came to say so."""
    results: list[int | None] = []
    for start in re.split(r"^quickstart[\w-]*: ", printed_text, flags=re.MULTILINE)[1:]:
        goes_on = re.search(r"^going on after step (\d+) from", start, re.MULTILINE)
        has_begun = re.search(r"^pp rank 0 (holds|will hold)|^step", start, re.MULTILINE)
        results.append(int(goes_on[1]) if goes_on else 0 if has_begun else None)
    return results


def told_as_saved(printed_text: str) -> int:
    """The newest step of which it was said that it is saved; 0 if there is none."""
    return max(map(int, re.findall(r"^step (\d+) is saved", printed_text, re.MULTILINE)), default=0)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system with little room. MissedError where this process may not make one."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "none", folder], capture_output=True, check=False
    )
    if made.returncode:
        raise MissedError
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


class Kills:
    """Draws runs and harms them, with the unharmed runs to hold them against."""

    def __init__(self, seed: int, scratch: Path, numbers: Sequence[int]) -> None:
        """The unharmed runs of what will be drawn first for these `numbers` are made before any other."""
        self.seed, self.scratch, self.text = seed, scratch, scratch / "text.txt"
        write_text(self.text)
        self._unharmed: dict[str, Unharmed] = {}
        for number in numbers:
            self.unharmed(self._draw(number, 0)[0])

    def _draw(self, number: int, draw: int) -> tuple[str, random.Random]:
        """A plan, and what its harm is drawn with."""
        rng = random.Random(f"{self.seed} {number} {draw}")
        return rng.choice(list(PLANS)), rng

    def unharmed(self, plan: str) -> Unharmed:
        """The run of a plan that nobody harms; it is made once."""
        if plan not in self._unharmed:
            self._unharmed[plan] = self._run_unharmed(plan)
        return self._unharmed[plan]

    def _run_unharmed(self, plan: str) -> Unharmed:
        folder = Path(tempfile.mkdtemp(dir=self.scratch)) / plan
        printed = folder.with_suffix(".said")
        start_s = time.monotonic()
        status = preloaded.start(arguments(plan, folder, folder / "checkpoints", self.text), printed).wait(LONGEST_S)
        assert status == 0, printed.read_text()
        return Unharmed(losses(folder), time.monotonic() - start_s)

    def outcome(self, number: int) -> Outcome:
        """Harm a run, as often as it takes to hit one."""
        harm, plan, start_s = list(HARMS)[number % len(HARMS)], "", time.monotonic()
        for draw in range(MOST_DRAWS):
            (plan, rng), folder = self._draw(number, draw), Path(tempfile.mkdtemp(dir=self.scratch))
            is_own = number % EVERY_OWN == EVERY_OWN - 1
            try:
                with small_disk(folder / "disk") if harm == "fill the disk" else nullcontext(folder) as disk:
                    of_run = disk if rng.random() < 0.3 else folder
                    harmed = Harmed(
                        arguments(plan, of_run / "run", disk / "checkpoints", self.text), is_own, harm,
                        Run(None, of_run / "run", disk / "checkpoints", folder / "said"), self.unharmed(plan),
                    )  # fmt: skip
                    where, wrong = harmed.to_the_end(rng)
            except MissedError:
                continue
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return Outcome(plan, harm, where, draw, wrong, time.monotonic() - start_s)
        return Outcome(plan, harm, "", MOST_DRAWS, "", time.monotonic() - start_s)


class Harmed:
    """A run that is harmed once, and its command given again until it is done."""

    def __init__(self, command: list[str], is_own: bool, harm: str, run: Run, unharmed: Unharmed) -> None:
        """`is_own`: the command is one of its own, with an interpreter of its own, and not forked from here."""
        self.command, self.is_own, self.harm, self.run, self.unharmed = command, is_own, harm, run, unharmed
        self.is_damaged = harm in DAMAGES

    def to_the_end(self, rng: random.Random) -> tuple[str, str]:
        """Where it was hit, and what is wrong with it. MissedError if it was not hit, or did not feel it."""
        run = self.run
        run.process, run.again = self._start(), self._start
        try:
            moment_s = rng.uniform(0.0, self.unharmed.seconds)
            if rng.random() < 0.95:
                run.until((run.folder / ".lock").exists)
            with suppress(subprocess.TimeoutExpired):
                run.process.wait(moment_s)
            HARMS[self.harm](run, rng)
            faults = list(self._again_and_again())
        except subprocess.TimeoutExpired:
            faults = ["it hangs"]
        except AssertionError as error:
            faults = [str(error)]
        except ProcessLookupError:  # what was to be hit has ended a moment ago
            raise MissedError from None
        finally:
            run.process.kill()
            run.process.wait()
        return run.where, "; ".join(faults) + f"\n{run.said()[-MOST_SAID:]}" if faults else ""

    def _start(self, more: Sequence[str] = ()) -> Any:
        command = [*self.command, *more]
        if not self.is_own:
            return preloaded.start(command, self.run.log)
        with self.run.log.open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "shardwright", *command], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, preexec_fn=ask_for(signal.SIGKILL),
            )  # fmt: skip

    def _again_and_again(self) -> Iterator[str]:
        """Give the command until it is done. Yields the faults of the run."""
        run = self.run
        begun, floor = run.said_before, run.floor
        for attempt in range(MOST_ATTEMPTS):
            status = run.process.wait(LONGEST_S)
            wait_until_gone(run)
            printed = run.said()
            if attempt == 0 and status == 0 and not run.is_felt and "\nrestart " not in printed:
                raise MissedError
            starts = [step for step in began_at(printed[begun:]) if step is not None]
            if any(step < floor for step in starts):
                yield f"went on after {starts} where step {floor} was saved"
            if status == 0:
                break
            whole = newest_whole(run.place)
            if attempt > 0 and starts and starts[0] != floor and not self.is_damaged:
                yield f"went on after {starts} where step {floor} was the newest"
            if not self.is_damaged and whole < told_as_saved(printed):
                yield f"step {told_as_saved(printed)} was told as saved, and {whole} is the newest that is whole"
            begun, floor = len(printed), whole
            run.process = self._start()
        else:
            yield f"it is not done after {MOST_ATTEMPTS} commands, the last with status {status}"
        yield from self.faults_at_the_end()

    def faults_at_the_end(self) -> Iterator[str]:
        """Faults of a run that is done."""
        run, printed = self.run, self.run.said()
        if "Traceback" in printed:
            yield f"a traceback: {printed[printed.index('Traceback') :][:2000]}"
        if "is not whole" in printed and not self.is_damaged:
            yield "a checkpoint is not whole that nobody damaged"
        if (result := losses(run.folder)) != self.unharmed.losses:
            yield f"other losses: {result}"
        if newest_whole(run.place) != STEPS:
            yield f"the newest whole checkpoint is {newest_whole(run.place)}"
        known = {"latest", *map(folder_name, kept(run.place))}
        if left := sorted({path.name for path in run.place.iterdir()} - known):
            yield f"{left} are left"


def main() -> int:
    """Do the runs, print what is wrong and the counts. The status is 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the number of the first run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    chosen = parser.parse_args()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as scratch:
        numbers = range(chosen.first, chosen.first + chosen.count)
        kills = Kills(chosen.seed, Path(scratch), numbers)
        heard, printed = os.pipe()
        to_do, given = os.pipe()

        def work() -> None:
            ask_for(signal.SIGKILL)()
            while number := os.read(to_do, _NUMBER.size):
                outcome = kills.outcome(*_NUMBER.unpack(number))
                # One line is one write, which nothing comes between.
                os.write(printed, json.dumps([*_NUMBER.unpack(number), asdict(outcome)]).encode() + b"\n")

        workers = [preloaded.Child(work, (printed, to_do)) for _ in range(chosen.jobs)]
        os.close(printed)
        for number in numbers:
            os.write(given, _NUMBER.pack(number))
        os.close(given)
        with os.fdopen(heard) as lines:
            for line in lines:
                number, fields = json.loads(line)
                tell(chosen.seed, number, Outcome(**fields), counts)
        is_whole = all(worker.wait() == 0 for worker in workers)
    for harm in HARMS:
        words = ", ".join(f"{count} {what}" for what, count in sorted(counts[harm].items()))
        print(f"{harm:32} {words or 'none'}")
    num_wrong = sum(count["wrong"] for count in counts.values())
    num_harmed = sum(count["harmed"] for count in counts.values())
    took_s = time.monotonic() - start_s
    print(f"{num_harmed} of {chosen.count} runs were harmed, {num_wrong} ended wrong; {took_s:.0f} s")
    return int(num_wrong > 0 or not is_whole)


def tell(seed: int, number: int, outcome: Outcome, counts: dict[str, Counter[str]]) -> None:
    """Print a run, and count it."""
    result = counts[outcome.harm]
    result["moments missed"] += outcome.num_missed
    result["harmed" if outcome.where else "never hit"] += 1
    where = outcome.where or "never hit"
    print(f"{number:4} {outcome.harm}, {outcome.plan}: {where} ({outcome.seconds:.0f} s)", flush=True)
    if outcome.wrong:
        result["wrong"] += 1
        print(f"WRONG, again by --seed {seed} --first {number} --count 1: {outcome.wrong}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
