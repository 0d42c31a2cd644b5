"""The folder of a run as `train` leaves it, without training."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwright.config.load import load_job
from shardwright.config.run_file_names import METRICS
from shardwright.report.run.run_card import RunCard


def step_row(step: int) -> dict[str, Any]:
    """The line of a step."""
    return {
        "step": step,
        "loss": 5.0 - 0.5 * step,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "step_s": 0.5,
        "tokens_per_s": 1000.0,
        "mfu": None,
        "compute_share": 0.7,
        "exposed_communication_share": 0.2,
        "pipeline_idle_share": 0.1,
        "peak_memory_bytes": 2**30,
        "skipped": step == 3,
        "skipped_because": "spike" if step == 3 else None,
        "num_skipped": int(step >= 3),
        "num_spikes": int(step >= 3),
    }


def write_run(
    place: Path, steps: int = 5, broken_line: bool = False, name: str = "run", overrides: Sequence[str] = ()
) -> Path:
    """Write a run of quickstart, and return its folder. With `broken_line` it was stopped while it wrote."""
    folder = place / name
    folder.mkdir()
    rows: list[dict[str, Any]] = [{"begun": {"after_step": 0, "device": "this CPU", "data": {"text": "0123"}}}]
    rows += [step_row(step) for step in range(1, steps + 1)]
    rows += [
        {"step": steps, "validation_loss": 2.25, "validation_losses": {"law": 2.5}},
        {"checkpoint": {"step": steps, "blocking_s": 0.1, "durable_s": 0.2}},
        {"done_again": {"first": 1, "last": 2, "bit_exact": True, "largest_loss_difference": 0.0}},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 6, "lo' * broken_line
    (folder / METRICS).write_text(text, encoding="utf-8")
    job = load_job("quickstart", ("optimizer.steps=5", *overrides))
    RunCard.begun(job, "0.1.0", ["shardwright", "train", "quickstart"]).write(folder)
    return folder
