"""Runs that are harmed at a random moment, and end with the losses of one that nobody harmed.

    python tests/fuzz/kills.py --seed 1 --count 20

Every harm is drawn from its seed: a rank, the launcher or all are killed or stopped, or told to leave, a file of the
newest checkpoint is cut, changed or removed while nobody looks. The command is then given again, as a supervisor would
give it, until it is done. No step is missing or told twice, and every loss is that of the unharmed run, bit for bit.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

HARMS = (
    "kill a rank", "kill the launcher", "kill a rank twice", "stop a rank", "leave", "flip", "truncate", "remove",
)  # fmt: skip
STEPS = 30
FIELDS = {
    "plan.dp": 2, "plan.tp": 1, "plan.pp": 1, "plan.zero": 1, "optimizer.steps": STEPS, "optimizer.warmup_steps": 5,
    "run.sample_tokens": 0, "run.log_every": 10, "run.timeout_s": 6, "run.max_restarts": 9, "model.layers": 2,
    "model.hidden": 64, "model.ffn": 128, "model.sequence": 64, "batch.global_batch_size": 16, "run.eval_every": 0,
    "checkpoint.every_steps": 3,
}  # fmt: skip
MOST_ATTEMPTS, LONGEST_S = 5, 120.0


def command(folder: Path) -> list[str]:
    """The command, which is always the same."""
    overrides = [part for name, value in FIELDS.items() for part in ("--set", f"{name}={value}")]
    return [sys.executable, "-m", "shardwright", "train", "quickstart", *overrides, "--set", f'run.folder="{folder}"']


def losses(folder: Path) -> list[tuple[int, float]]:
    """Step and loss of every line of a run's metrics."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def children(pid: int) -> list[int]:
    """The processes that one started, and theirs."""
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *children(child)]
    return found


def ranks(pid: int) -> list[int]:
    """The processes of the ranks: what the server of a launcher has forked."""
    return [child for server in children(pid) for child in children(server)]


def do_harm(kind: str, run: "subprocess.Popen[str]", folder: Path, rng: random.Random) -> None:
    """Harm a run that goes on."""
    there = ranks(run.pid)
    with suppress(ProcessLookupError):
        match kind:
            case "kill a rank" | "kill a rank twice" if there:
                os.kill(rng.choice(there), signal.SIGKILL)
                if kind == "kill a rank twice":
                    time.sleep(rng.uniform(0.0, 3.0))
                    os.kill(rng.choice(ranks(run.pid) or there), signal.SIGKILL)
            case "stop a rank" if there:
                os.kill(rng.choice(there), signal.SIGSTOP)
            case "leave":
                run.send_signal(signal.SIGTERM)
            case _:
                run.kill()
    if kind in ("flip", "truncate", "remove"):
        run.wait(LONGEST_S)
        time.sleep(0.5)
        files = sorted(folder.glob("checkpoints/step-*/rank-*.safetensors"))
        if files:
            file = rng.choice(files[-2:])
            raw = bytearray(file.read_bytes())
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            file.unlink()
            if kind != "remove":
                file.write_bytes(raw if kind == "flip" else raw[: rng.randrange(len(raw))])


def harmed(seed: int, number: int, expected: list[tuple[int, float]], seconds: float) -> str:
    """Harm one run. Empty if it ends as it should, else what is wrong."""
    rng = random.Random(f"{seed} {number}")
    kind = HARMS[number % len(HARMS)]
    with tempfile.TemporaryDirectory(prefix="kills-") as scratch:
        folder, said = Path(scratch, "run"), ""
        moment_s = rng.uniform(0.3, 1.0) * seconds
        for attempt in range(MOST_ATTEMPTS):
            run = subprocess.Popen(command(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if attempt == 0:
                with suppress(subprocess.TimeoutExpired):
                    run.wait(moment_s)
                do_harm(kind, run, folder, rng)
            try:
                said += run.communicate(timeout=LONGEST_S)[0]
            except subprocess.TimeoutExpired:
                run.kill()
                return f"{kind} after {moment_s:.1f} s: it hangs\n{said}"
            if run.returncode == 0:
                break
        else:
            return f"{kind} after {moment_s:.1f} s: it never ends\n{said}"
        if "Traceback" in said:
            return f"{kind} after {moment_s:.1f} s: a traceback\n{said}"
        if (found := losses(folder)) != expected:
            return f"{kind} after {moment_s:.1f} s: other losses: {found[:40]}\n{said}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as scratch:
        start_s = time.monotonic()
        subprocess.run(command(Path(scratch, "run")), check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - start_s
        expected = losses(Path(scratch, "run"))
    counts: Counter[str] = Counter()
    for number in range(arguments.count):
        wrong = harmed(arguments.seed, number, expected, seconds)
        counts["wrong" if wrong else "as it should be"] += 1
        if wrong:
            print(f"{arguments.seed}:{number} {wrong}", flush=True)
    print(f"{dict(counts)} of {arguments.count} runs, {seconds:.1f} s each without harm")
    return int(bool(counts["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
