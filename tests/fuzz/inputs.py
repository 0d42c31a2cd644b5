"""Hostile input: jobs, options, data, tokenizers, tables and files of the catalog's kinds, made wrong at random.

    python tests/fuzz/inputs.py --seed 1 --count 2000      # a failing case is written to a file
    python tests/fuzz/inputs.py --case FILE                # sees it again, with all that it printed
    python tests/fuzz/inputs.py --seed 1 --first 1234 --count 1 --show

Each case runs in a forked child of one process that has everything loaded, in a folder of its own, with limits of time
and memory. These must hold: the exit status is 0, 1 or 2; there is no traceback; a refusal is a message that names a
way out; and what is accepted does not contradict its input (`_contradictions`).
"""

import argparse
import base64
import gc
import io
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).parents[1])

from fuzz import growth
from fuzz.growth import WRITE_RUN, write_run
from fuzz.hostile import PREPARE, Case
from fuzz.hostile_checkpoints import RESUME, resume
from fuzz.hostile_models import LOAD, load
from fuzz.kinds import KINDS, case_of

WALL_S = 300  # of a machine that may have much else to do
MEMORY_BYTES = 1 << 30
CPU_S = 20  # on a machine that adds two million numbers in _USUAL_S
_USUAL_S = 0.16
_TRACEBACK_STATUS = 99
# Words with which a message shows a way out, one of them in each refusal.
_WAY_OUT = re.compile(
    r"\b(?:use|set|name|check|give|write|leave|mend|add|drop|put|save|copy|choose|make|say|shorten|fetch|run|divide|raise|keep|need"
    r"|needs|gather|such as|for example|at most|at least|one of|did you mean|there are|should be|Try|Missing|is not)\b"
)


# Kinds of which no case has much to compute, whatever it says.
_SMALL = ("growth", "foreign", "table", "weights", "config", "tokenizer")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case. `wrong` says what must not be; empty where all is well."""

    status: int
    output: str
    errors: str
    cpu_s: float
    grown_bytes: int
    wrong: str


def run_case(case: Case) -> Outcome:
    """Run a case in a child with limits, and judge it."""
    folder = Path(tempfile.mkdtemp(prefix="shardwright-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        here = folder / "here"
        _lay_out(case, here)
        child = os.fork()
        if child == 0:
            _run_child(case, here, folder)
        _, raw_status, usage = os.wait4(child, 0)
        output, errors = ((folder / name).read_text(errors="replace") for name in ("out", "err"))
        before = (folder / "rss").read_text() if (folder / "rss").exists() else "0"
        cpu_s, grown = usage.ru_utime + usage.ru_stime, 1024 * max(0, usage.ru_maxrss - int(before))
        status = os.waitstatus_to_exitcode(raw_status)
        wrong = _judge(case, status, output, errors, cpu_s, grown) or _judge_victim(here)
        return Outcome(status, output, errors, cpu_s, grown, wrong)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lay_out(case: Case, here: Path) -> None:
    here.mkdir()
    for name, contents in case.files.items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(contents))
    for name, what in case.special.items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if what == "fifo":
            os.mkfifo(path)
        elif what == "sparse":
            with path.open("wb") as file:
                file.truncate(1 << 42)
        elif what.startswith("=> "):  # a second name of a file that is there
            os.link(here / what.removeprefix("=> "), path)
        elif what == "socket":
            socket.socket(socket.AF_UNIX).bind(str(path))
        else:
            path.symlink_to(what.removeprefix("-> "))


@cache
def slowness() -> float:
    """How many times as long as usual this machine takes to add numbers, 1 at least: limits grow with it."""
    began_s, total = time.process_time(), 0
    for number in range(2_000_000):
        total += number
    return max(1.0, (time.process_time() - began_s) / _USUAL_S)


def _run_child(case: Case, here: Path, folder: Path) -> NoReturn:
    status = _TRACEBACK_STATUS
    try:
        os.chdir(here)
        for name, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (for as long as the child lives)
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        limit_s = math.ceil(CPU_S * slowness())
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 2))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
        sizes = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text()))
        (folder / "rss").write_text(sizes["VmRSS"])
        resource.setrlimit(resource.RLIMIT_AS, (1024 * int(sizes["VmSize"]) + 3 * MEMORY_BYTES,) * 2)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(WALL_S)
        status = _command_status(case.arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(status)


def _command_status(arguments: list[str]) -> int:
    """The exit status of a command line, run in this process."""
    from shardwright.cli.main import main

    try:
        if arguments[0] == PREPARE:
            _prepare(arguments)
        elif arguments[0] == RESUME:
            resume(arguments)
        elif arguments[0] == LOAD:
            load(arguments)
        elif arguments[0] == WRITE_RUN:
            write_run(arguments)
        else:
            sys.argv = ["shardwright", *arguments]
            main()
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    return 0


def _prepare(arguments: list[str]) -> None:
    """Prepare data as `train` does before any rank starts; and read every sample once."""
    import numpy as np

    from shardwright.config.base import PlanError, RunError
    from shardwright.config.load import load_job
    from shardwright.sharding.token_marks import UNCOUNTED
    from shardwright.train.data.place import PlaceInData
    from shardwright.train.data.prepare import prepare_tokens, prepare_validation

    try:
        job = load_job(arguments[1], [one for one in arguments[2:] if one != "--set"])
        tokens = prepare_tokens(job.data, job.model, job.run.seed, Path("cache"))
        own = prepare_validation(job.data, job.model, Path("cache"))
    except PlanError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except RunError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    has_windows = tokens.num_train_tokens > job.model.sequence or job.data.has_chats
    assert has_windows, "there is less than a window to train on"
    assert tokens.largest_id < job.model.vocab, "an id is outside the vocabulary"
    place = PlaceInData.at_beginning(tokens, job)
    assert sum(one.had for one in place.to_store(9).sources) == 9, "samples of sources are not those of the run"
    sets = [one.in_file_order() for one in own.values()]
    for samples in filter(None, (place.train_samples(), tokens.validation_samples(), *sets)):
        window = samples.batch(0, min(len(samples), 64))
        assert ((window >= 0) & (window < UNCOUNTED)).all() or tokens.separate_documents, "a token is marked"
        ids = np.where(window < 0, -1 - window, window) & (UNCOUNTED - 1)
        assert ((ids >= 0) & (ids < job.model.vocab)).all(), "an id is outside the vocabulary"


def _judge(case: Case, status: int, output: str, errors: str, cpu_s: float, grown: int) -> str:
    """The fault of a case, in words; empty where there is none."""
    most_s, most_bytes = (growth.CPU_S, growth.MEMORY_BYTES) if case.kind in _SMALL else (CPU_S, MEMORY_BYTES)
    if status == -signal.SIGXCPU or cpu_s > most_s * slowness():
        return f"more than {most_s} s of CPU time"
    if status == -signal.SIGALRM:
        return f"it waits: {WALL_S} s"
    if "MemoryError" in errors or "Unable to allocate" in errors or grown > most_bytes:
        return f"more than {most_bytes >> 20} MiB of memory ({grown >> 20})"
    if "Traceback" in errors or status == _TRACEBACK_STATUS:
        return "a traceback: " + (errors.strip().splitlines() or ["?"])[-1][:200]
    if status not in (0, 1, 2):
        return f"exit status {status}"
    if status == 2 and not (errors.strip() and _WAY_OUT.search(errors)):
        return f"a refusal without a way out: {errors.strip()[:200]!r}"
    if status == 2 and output.strip() and not errors.startswith("output: "):  # what was found is shown all the same
        return "a refusal that prints on standard output"
    if status == 1 and not (errors + output).strip():
        return "a failure without a word"
    if status == 0 and "--json" in case.arguments:
        return _contradictions(case, output)
    return ""


def _judge_victim(here: Path) -> str:
    """The fault of a case that wrote or copied a file through a link; empty where it did not."""
    victim = here / "victim"
    if not victim.exists():
        return ""
    if victim.read_text(errors="replace") != growth.VICTIM:
        return "a file was written through a link"
    written = [path for path in (here / "out").rglob("*") if path.is_file()]
    copies = [path for path in written if growth.VICTIM.encode() in path.read_bytes()]
    return f"{copies[0]} has what a link led to" if copies else ""


def _contradictions(case: Case, output: str) -> str:
    """The contradiction in an answer, whatever was asked; empty where there is none."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} in JSON")

    try:
        result = json.loads(output, parse_constant=refuse)
    except ValueError as error:
        return f"no JSON: {error}"
    if largest := _not_finite(result):
        return f"a number that is none: {largest}"
    command = case.arguments[0]
    if command == "estimate":
        return _estimate_contradictions(result)
    if command == "validate" and result["predicted"] > result["rows"]:
        return "more rows predicted than there are"
    if command == "schedule" and "bubble_fraction" in result and not -1e-9 <= result["bubble_fraction"] < 1:
        return f"a bubble of {result['bubble_fraction']}"
    return ""


def _estimate_contradictions(answer: dict[str, Any]) -> str:
    if answer["parameters"] <= 0 or answer["active_parameters"] > answer["parameters"]:
        return f"parameters {answer['parameters']}, active {answer['active_parameters']}"
    for rank in answer["memory"]:
        kinds = "parameters", "gradients", "optimizer", "activations", "buffers", "working"
        parts = sum(rank[f"{kind}_bytes"] for kind in kinds)
        if rank["total_bytes"] != parts or min(rank.values()) < 0:
            return f"memory that is not the sum of its parts: {rank}"
    step_s = (answer.get("step") or {}).get("seconds") if isinstance(answer.get("step"), dict) else None
    if step_s is not None and step_s <= 0:
        return f"a step of {step_s} s"
    for name, of in _walk(answer):
        if name in ("mfu", "hfu") and not 0 <= of <= 1.0001:
            return f"{name} {of}"
        if name.endswith("_s") and isinstance(of, int | float) and of < 0:
            return f"{name} {of}"
    return ""


def _walk(answer: Any) -> list[tuple[str, Any]]:
    rows, left = [], [("", answer)]
    while left:
        name, of = left.pop()
        if isinstance(of, dict):
            left += list(of.items())
        elif isinstance(of, list):
            left += [(name, one) for one in of]
        elif of is not None:
            rows.append((name, of))
    return rows


def _not_finite(answer: Any) -> str:
    wrong = [(name, of) for name, of in _walk(answer) if isinstance(of, float) and not math.isfinite(of)]
    return f"{wrong[0][0]} {wrong[0][1]}" if wrong else ""


def load_everything() -> None:
    """Import what cases need, once for all children. torch is not among it: no case starts a rank."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive a fork
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    import pyarrow.parquet
    import tokenizers

    assert pyarrow.parquet and tokenizers, "loaded for the children"
    from shardwright.cost.calibration import shipped

    shipped()
    for command in (["estimate", "quickstart", "--json"], ["schedule", "1f1b", "--json"]):  # fills what is kept
        with redirect_stdout(io.StringIO()):
            _command_status(command)
    gc.freeze()  # collecting would copy what the children share
    assert "torch" not in sys.modules, "children of a process with torch are not those that users run"


def main() -> int:
    """Run cases, and write down those that fail. 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case of the seed")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=None)
    parser.add_argument("--folder", type=Path, default=Path("fuzz-failures"), help="where failing cases are written")
    parser.add_argument("--case", type=Path, help="a failing case to see again")
    parser.add_argument("--show", action="store_true", help="print what each case says")
    options = parser.parse_args()
    load_everything()
    if options.case:
        return _tell(Case.from_json(options.case.read_text()))
    numbers = range(options.first, options.first + options.count)
    return run_cases(options.seed, numbers, options.kinds, options.folder, options.show)


def run_cases(seed: int, numbers: range, kinds: list[str] | None, folder: Path, show: bool = False) -> int:
    """Run cases of a seed, and write down those that fail. 1 if there is one."""
    counts: Counter[str] = Counter()
    began, slowest, most = time.monotonic(), (0.0, 0), (0, 0)  # with the numbers of their cases
    for done, number in enumerate(numbers, 1):
        case = case_of(seed, number, kinds)
        outcome = run_case(case)
        if show:
            _print(case, outcome)
        counts[f"{case.kind} {outcome.status}" if not outcome.wrong else "wrong"] += 1
        slowest, most = max(slowest, (outcome.cpu_s, number)), max(most, (outcome.grown_bytes, number))
        if done % 500 == 0:
            print(f"... {done} cases, {time.monotonic() - began:.0f} s", flush=True)
        if outcome.wrong:
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"{case.kind}-{seed}-{number}.json"
            file.write_text(case.as_json())
            print(f"{case.kind} {number}: {outcome.wrong}\n  python tests/fuzz/inputs.py --case {file}", flush=True)
    print(f"{len(numbers)} cases in {time.monotonic() - began:.0f} s, the slowest {slowest[0]:.1f} s of CPU "
          f"(case {slowest[1]}), the largest {most[0] >> 20} MiB (case {most[1]}): "
          + ", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))  # fmt: skip
    return int(counts["wrong"] > 0)


def _tell(case: Case) -> int:
    """Run a case, and print all that is known of it. 1 if it fails."""
    outcome = run_case(case)
    _print(case, outcome)
    return int(bool(outcome.wrong))


def _print(case: Case, outcome: Outcome) -> None:
    for name, contents in case.files.items():
        text = base64.b64decode(contents)
        print(f"--- {name}, {len(text)} bytes\n{text[:1500].decode(errors='backslashreplace')}")
    print(f"--- special files: {case.special}" if case.special else "---")
    print("$ shardwright " + " ".join(argument[:300] for argument in case.arguments))
    print(outcome.output[:600], outcome.errors[-3000:], sep="\n")
    verdict = outcome.wrong or "as it should be"
    print(f"status {outcome.status}, {outcome.cpu_s:.1f} s, {outcome.grown_bytes >> 20} MiB: {verdict}")


if __name__ == "__main__":
    sys.exit(main())
