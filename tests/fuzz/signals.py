"""Signals at random moments to a run's launcher, its ranks or their server: does it end as it should?

    python tests/fuzz/signals.py --seed 1 --count 100

Each draw trains a tiny job on two ranks, waits for a moment between 0 s and its steps, and sends one signal to one
process. Within 15 s nothing of the run may be left: no process, socket, shared memory, or temporary folder. The
message and the exit status must be these:
  - SIGINT, SIGTERM and SIGHUP to the launcher: status 1, one sentence with the signal's name, and that nothing of the
    run is kept, which writes no checkpoints. Before the command has set its handlers, the system ends it alone.
  - SIGKILL and SIGSEGV to the launcher: its status; it can say nothing.
  - any signal to a rank or the server that kills it: status 1, a sentence that names it and the signal. A server that
    ends before it is needed is started anew: then SIGTERM to the launcher ends the run in its steps.
  - SIGSTOP to a rank that another one waits for: after run.timeout_s, status 1, a sentence that names the rank.
  - SIGSTOP to the launcher or the server: ranks go on with their steps. The launcher then is sent SIGTERM (and
    SIGCONT, where it was stopped itself), which must end all.
A draw that fails is printed with the command that repeats it alone.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.process_tree import children

SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP", "SIGSEGV")
TARGETS = ("launcher", "server", "rank 0", "rank 1")
POLITE = ("SIGINT", "SIGTERM", "SIGHUP")
WORLD = 2
TIMEOUT_S = 8
GONE_S = 15.0
# A machine that others load may take as long to get there.
PATIENCE_S = 240.0
JOB = (
    "plan.dp=1", "plan.tp=1", "plan.sequence_parallel=false", "model.layers=2", "model.hidden=32", "model.ffn=64",
    "model.sequence=32", "batch.global_batch_size=4", "plan.microbatch_size=2", "optimizer.steps=1000000",
    f"run.timeout_s={TIMEOUT_S}", "run.device=cpu",
)  # fmt: skip

UNKEPT = r"; nothing of the run is kept, for it writes no checkpoints \(checkpoint\.every_steps keeps some\)"


@dataclass(frozen=True)
class Draw:
    """A signal, whom it is for, and when: so many seconds after the start of the command, or after its first steps."""

    signal: str
    target: str
    late: bool
    delay_s: float

    @classmethod
    def random(cls, source: random.Random) -> "Draw":
        """One of all. A signal to a server or rank that is not there is sent as soon as it is."""
        late = source.random() < 0.5
        return cls(source.choice(SIGNALS), source.choice(TARGETS), late, source.uniform(0, 1.0 if late else 4.0))

    def __str__(self) -> str:
        when = "after the first steps" if self.late else "after the start"
        return f"{self.signal} to {self.target} {self.delay_s:.2f} s {when}"


def main() -> None:
    """Do the draws, print those that fail, and exit with status 1 if any does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the number of the first draw to do")
    chosen = parser.parse_args()
    # Commands of this process would ignore the signals that a shell or nohup had it ignore.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and the command with it
    source = random.Random(chosen.seed)
    num_failed = 0
    for number in range(chosen.count):
        drawn = Draw.random(source)
        if number < chosen.first:
            continue
        began_s = time.monotonic()
        faults = check(drawn)
        print(
            f"{number:3} {drawn}: {'; '.join(faults) or 'as it should'} ({time.monotonic() - began_s:.0f} s)",
            flush=True,
        )
        if faults:
            num_failed += 1
            print(f"    python {sys.argv[0]} --seed {chosen.seed} --count {number + 1} --first {number}", flush=True)
    print(f"{num_failed} failed")
    sys.exit(1 if num_failed else 0)


class Run:
    """One command, with what it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self.scratch = folder / "tmp"
        self.scratch.mkdir()
        self.pids: set[int] = set()
        command = [sys.executable, "-m", "shardwright", "train", "quickstart"]
        for override in (*JOB, f'run.folder="{self.folder}"'):
            command += ["--set", override]
        self.began_s = time.monotonic()
        # A marker in the environment finds what it left, also where its parent is gone.
        self.marker = f"SHARDWRIGHT_FUZZ={folder}"
        environment = os.environ | {"SHARDWRIGHT_FUZZ": str(folder), "TMPDIR": str(self.scratch)}
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self.command = subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True)
        self.error_file = folder / "err"

    def num_steps(self) -> int:
        """Steps done so far."""
        with suppress(OSError):
            return (self.folder / "metrics.jsonl").read_text().count('"step_s"')
        return 0

    def pid_of(self, target: str) -> int | None:
        """The process id of a target, if it is there."""
        servers = children(self.command.pid)
        ranks = [rank for server in servers for rank in children(server)]  # in the order of their start
        self.pids |= {self.command.pid, *servers, *ranks}
        result = {"launcher": [self.command.pid], "server": servers}.get(target, [])
        if target.startswith("rank") and len(ranks) == WORLD:
            result = [ranks[int(target.split()[1])]]
        return result[0] if result else None

    def left(self) -> list[str]:
        """Processes of the run that are there and more than an entry, its temporary folders, and shared memory."""
        results = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.marker.encode() in (path / "environ").read_bytes().split(b"\0"):
                    state = re.search(r"State:\t(.*)", (path / "status").read_text())
                    results.append(f"process {path.name}, {state[1] if state else ''}")
        results += [f"folder {path.name}" for path in self.scratch.iterdir()]
        # torch and Python name shared memory after the process that makes it.
        made = {
            name: re.match(r"(?:torch_|psm_|sem\.mp-|cuda\.shm\.)\D*(\d+)", name) for name in os.listdir("/dev/shm")
        }
        return results + [f"shared memory {name}" for name, by in made.items() if by and int(by[1]) in self.pids]

    def error(self) -> str:
        """Its text on standard error."""
        return without_progress(self.error_file.read_text(errors="replace"))


def without_progress(text: str) -> str:
    """Standard error without how far the making of tokens is, which a run says where that takes some seconds."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("tokens of "))


def check(drawn: Draw) -> list[str]:
    """Do a draw. Returns what was not as it should be."""
    with tempfile.TemporaryDirectory(prefix="fuzz-signals-", ignore_cleanup_errors=True) as folder:
        run = Run(Path(folder))
        try:
            return _check(drawn, run)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.command.pid, signal.SIGKILL)
            run.command.wait()


def _check(drawn: Draw, run: Run) -> list[str]:
    number = signal.Signals[drawn.signal]
    pid = _moment(drawn, run)
    if pid is None:
        return [f"there was no {drawn.target}, status {run.command.poll()}: {run.error()[-300:]}"]
    is_handled = drawn.target != "launcher" or handles(pid, number)
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return [f"{drawn.target} ended by itself, status {run.command.wait(GONE_S)}: {run.error()[-300:]}"]
    sent_s = time.monotonic()
    faults = []
    goes_on = drawn.signal == "SIGSTOP" and drawn.target in ("launcher", "server")
    if goes_on:
        if drawn.late:
            faults += _steps_go_on(run)
        if drawn.target == "launcher":
            os.kill(run.command.pid, signal.SIGCONT)
        elif not handles(run.command.pid, signal.SIGTERM):
            time.sleep(1.0)
        os.kill(run.command.pid, signal.SIGTERM)
        is_handled = handles(run.command.pid, signal.SIGTERM)
        sent_s = time.monotonic()
    if drawn.target == "server" and not goes_on and not drawn.late and _is_started_anew(run):
        drawn = replace(drawn, signal="SIGTERM", target="launcher")
        run.command.terminate()
        sent_s = time.monotonic()
    patience_s = 2 * TIMEOUT_S + PATIENCE_S if drawn.signal == "SIGSTOP" and not goes_on else GONE_S
    with suppress(subprocess.TimeoutExpired):
        run.command.wait(patience_s)
    if run.command.poll() is None:
        return [*faults, f"it still runs {time.monotonic() - sent_s:.0f} s later"]
    ended_s = time.monotonic()
    while run.left() and time.monotonic() < ended_s + GONE_S:
        time.sleep(0.1)
    if left := run.left():
        faults.append(f"left: {', '.join(left)}")
    return faults + _words(drawn, run, is_handled)


def _moment(drawn: Draw, run: Run) -> int | None:
    """Wait for the moment of a draw. Returns the process id to send the signal to."""
    late_s = time.monotonic() + PATIENCE_S
    while drawn.late and run.num_steps() < 2 and run.command.poll() is None and time.monotonic() < late_s:
        time.sleep(0.1)
    began_s = time.monotonic() if drawn.late else run.began_s
    time.sleep(max(0.0, began_s + drawn.delay_s - time.monotonic()))
    while (pid := run.pid_of(drawn.target)) is None and run.command.poll() is None and time.monotonic() < late_s:
        time.sleep(0.005)
    return pid


def _is_started_anew(run: Run) -> bool:
    """True if a run whose server has ended comes to its steps. If not, wait for its end."""
    late_s = time.monotonic() + PATIENCE_S
    while run.command.poll() is None and time.monotonic() < late_s:
        if run.num_steps() > 0:
            return True
        time.sleep(0.1)
    return False


def _steps_go_on(run: Run) -> list[str]:
    before = run.num_steps()
    late_s = time.monotonic() + PATIENCE_S
    while run.num_steps() <= before + 2:
        if time.monotonic() > late_s:
            return ["the ranks did not go on"]
        time.sleep(0.1)
    return []


def _words(drawn: Draw, run: Run, is_handled: bool) -> list[str]:
    """Faults of the status and the message of a command that has ended."""
    status, printed = run.command.returncode, run.error().strip()
    number = signal.Signals[drawn.signal]
    if drawn.target == "launcher" and drawn.signal in ("SIGKILL", "SIGSEGV"):
        wanted, message = -number, ""
    elif drawn.target == "launcher" or (drawn.signal == "SIGSTOP" and drawn.target == "server"):
        by = drawn.signal if drawn.signal in POLITE else "SIGTERM"
        # A signal that comes before the run has begun finds nothing that could be kept.
        ending = f"({UNKEPT})" if drawn.late else f"({UNKEPT})?"
        wanted, message = 1, f"failed: {by} ended this command and all that it had started{ending}"
        if not is_handled and status == -signal.Signals[by]:
            return []
    elif drawn.signal == "SIGSTOP":
        wanted, message = (
            1,
            rf"failed: rank {1 - int(drawn.target[-1])} \(.*\) waited \d+ s in (.|\n)*{drawn.target} \(",
        )
    elif drawn.target == "server":
        wanted, message = 1, rf"failed: the server that ranks are forked from was killed by {drawn.signal}.*"
    else:
        hint = ". The system ends processes so when memory runs out" if drawn.signal == "SIGKILL" else ""
        message = (
            rf"failed: {drawn.target} \(.*\) was killed by {drawn.signal}; the other rank was ended{re.escape(hint)}"
        )
        wanted = 1
    faults = [] if status == wanted else [f"status {status} for {wanted}"]
    is_part = drawn.signal == "SIGSTOP" and drawn.target.startswith("rank")
    if not (re.match if is_part else re.fullmatch)(message, printed):
        faults.append(f"said {printed[-600:]!r}")
    return faults


def handles(pid: int, number: int) -> bool:
    """True if a process has a handler for a signal."""
    with suppress(OSError):
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)
    return False


if __name__ == "__main__":
    main()
