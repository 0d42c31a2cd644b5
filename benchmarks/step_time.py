"""Simulated against executed step time, from stage costs measured on this machine.

    .venv/bin/python benchmarks/step_time.py

Two ranks, one thread each, a pipeline of two; every schedule on the same model. Prints the table of docs/step-time.md.
"""

import statistics
import tempfile
from pathlib import Path

from shardwright.config.load import load_job
from shardwright.measure.step_time import compare_step_time

SCHEDULES = {
    "sequential": 1, "gpipe": 1, "1f1b": 1, "interleaved-1f1b": 2, "looped-bfs": 2, "zb-h1": 1, "zb-h2": 1, "zb-v": 1,
    "dualpipe": 1, "dualpipev": 1,
}  # fmt: skip
FIELDS = {
    "plan.dp": 1, "plan.tp": 1, "plan.pp": 2, "plan.sequence_parallel": "false", "model.layers": 8,
    "model.hidden": 256, "model.ffn": 704, "batch.global_batch_size": 32,
}  # fmt: skip


def main() -> None:
    """Measure, simulate and run each schedule."""
    print("| schedule | simulated (s) | executed (s) | error |\n|---|---|---|---|")
    errors = []
    for schedule, virtual_stages in SCHEDULES.items():
        fields = FIELDS | {"plan.schedule": schedule, "plan.virtual_stages": virtual_stages}
        job = load_job("quickstart", [f"{name}={value}" for name, value in fields.items()])
        with tempfile.TemporaryDirectory() as folder:
            result = compare_step_time(job, Path(folder))
        errors.append(abs(result.error))
        print(f"| {schedule} | {result.simulated_s:.3f} | {result.executed_s:.3f} | {result.error:+.1%} |", flush=True)
    print(f"\nMedian of the absolute error: {statistics.median(errors):.1%}; largest: {max(errors):.1%}.")


if __name__ == "__main__":
    main()
