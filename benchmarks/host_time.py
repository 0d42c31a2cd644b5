"""Operators and milliseconds of the host in a step of one rank, and in each of its layers and microbatches.

    .venv/bin/python benchmarks/host_time.py
    .venv/bin/python benchmarks/host_time.py --beside ../before

Tensors have no memory (torch's device meta), so that nothing is computed and all of the time is the host's: Python,
autograd, and torch's shapes of results, which a device does not need. Operators are exact; those of a layer and
microbatch are how many more a step has with more layers and more microbatches. Times are processor seconds of one
thread; with `--beside` another checkout does the same steps in turn, and the ratio of the two is what counts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
FEWER, MORE = (2, 2), (6, 8)  # layers, microbatches
WIDTHS = {"hidden": 2048, "ffn": 8192, "heads": 32, "kv_heads": 8, "vocab": 1024, "sequence": 4096}


def steps_of(layers: int, microbatches: int) -> Any:
    """A rank of a dense model in bf16, as on CUDA, that has done its first step."""
    from shardwright.config.load import make_job

    try:
        from shardwright.train.dry_steps import DrySteps
    except ImportError:  # an older checkout
        from shardwright.measure.dryrun import DrySteps  # type: ignore[attr-defined,no-redef]
    job = make_job(
        {
            "model": WIDTHS | {"layers": layers},
            "batch": {"global_batch_size": microbatches},
            "precision": {"compute": "bf16"},
        }
    )
    steps = DrySteps(job, 0, "cuda")
    steps.run()
    return steps


def counted(steps: Any) -> dict[str, int]:
    """Operators of a step: all, and those that are neither views nor new memory."""
    from torch.utils._python_dispatch import TorchDispatchMode

    numbers = {"all": 0, "work": 0}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            results = operator._schema.returns
            is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in results)
            is_made = operator._schema.name.split("::")[1].startswith(("empty", "new_empty", "detach"))
            numbers["all"] += 1
            numbers["work"] += not (is_view or is_made)
            return operator(*args, **(kwargs or {}))

    with Counting():
        steps.run()
    return numbers


def measure(rounds: int) -> dict[str, float]:
    """Operators and milliseconds of steps of four sizes, the same in any checkout."""
    import torch

    torch.set_num_threads(1)
    sizes = [(layers, microbatches) for layers in (FEWER[0], MORE[0]) for microbatches in (FEWER[1], MORE[1])]
    steps = {size: steps_of(*size) for size in sizes}
    numbers = {size: dict[str, float](counted(steps[size])) for size in sizes}
    times: dict[tuple[int, int], list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            start_s = time.process_time()
            steps[size].run()
            times[size].append((time.process_time() - start_s) * 1e3)
    for size in sizes:
        numbers[size]["ms"] = statistics.median(times[size])
    more = (MORE[0] - FEWER[0]) * (MORE[1] - FEWER[1])
    row: dict[str, float] = {}
    for key in ("all", "work", "ms"):
        a, b, c, d = (numbers[size][key] for size in sizes)
        row |= {f"{key}, a layer and microbatch": (a - b - c + d) / more, f"{key}, a step": d}
    return row


def in_turn(checkouts: Mapping[str, Path], turns: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Rows of each checkout, in processes of their own, in turn."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(turns):
        for name, checkout in checkouts.items():
            done = subprocess.run(
                [sys.executable, __file__, "--row", "--rounds", str(rounds)], capture_output=True, text=True,
                check=True, env=os.environ | {"PYTHONPATH": str(checkout / "src")},
            )  # fmt: skip
            rows[name].append(json.loads(done.stdout))
    return rows


def main() -> None:
    """Print a table, with the other checkout beside this one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--turns", type=int, default=3, help="processes of each checkout")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each size in a process")
    parser.add_argument("--row", action="store_true", help="one process's numbers as JSON")
    asked = parser.parse_args()
    if asked.row:
        print(json.dumps(measure(asked.rounds)))
        return
    checkouts = {"here": HERE} | ({"beside": asked.beside.resolve()} if asked.beside else {})
    rows = in_turn(checkouts, asked.turns, asked.rounds)
    print("| | " + " | ".join(rows) + (" | here / beside |" if asked.beside else " |"))
    print("| --- " * (len(rows) + 1 + bool(asked.beside)) + "|")
    for key in rows["here"][0]:
        medians = [statistics.median(row[key] for row in turns) for turns in rows.values()]
        cells = [f"{median:,.1f}" for median in medians]
        if asked.beside:
            ratios = [one[key] / other[key] for one, other in zip(rows["here"], rows["beside"], strict=True)]
            cells.append(f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]")
        print(f"| {key} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
