"""Draws models at random and holds one rank of the runtime against a plain implementation (plain_decoder.py), in
float64: losses, norms of gradients, weights after some steps, and an evaluation.

    python tests/fuzz/models.py --seed 1 --count 100
"""

import argparse
import math
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from fuzz.draw import Fields, draw
from fuzz.plans import (
    HANGS_S,
    STEPS,
    Outcome,
    Trace,
    accepted,
    as_command,
    judged,
    run_twice,
    shrink,
    tokens_of,
    trace,
)
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.precision import PrecisionSpec
from shardwright.parallel.tensor.initial_values import initial_box
from shardwright.sharding.stage_parameters import model_parameters
from shardwright.train.train_step import StepResult
from support.plain_decoder import PlainDecoder
from support.ranks import run_on_mesh

_LARGEST_RATE = 3e-3  # of AdamW; SGD is drawn with larger ones


def plain_trace(job: JobSpec) -> Trace:
    """The trace that a plain implementation computes of a job."""
    places = model_parameters(job.model)
    cpu = torch.device("cpu")
    weights = {place.name: initial_box(place, job.run.seed, cpu).double() for place in places}
    model = PlainDecoder(job, weights)
    steps = []
    for step in range(STEPS):
        loss, norm = model.step(step, tokens_of(job, step))
        steps.append(StepResult(loss, norm, 0.0, mtp_losses=tuple(model.further_losses)))
    evaluated = model.evaluate(tokens_of(job, STEPS))
    return Trace(steps, evaluated, [(place, weights[place.name].detach()) for place in places])


def one_rank(fields: Fields) -> JobSpec:
    """The draw's model and numbers of training, on one rank in float32, with the optimizer and the schedule that the
    plain implementation has. Raises PlanError if it is refused."""
    plain = {n: dict(fields[n]) for n in ("model", "batch", "optimizer", "run", "data") if n in fields}
    plain.setdefault("model", {}).pop("adapter", None)  # these are held against peft
    if "batch" in plain:
        plain["batch"].pop("ramp", None)
    optimizer = plain.setdefault("optimizer", {})
    optimizer |= {"name": "adamw", "schedule": "cosine", "batch_rule": "none"}
    optimizer["learning_rate"] = min(optimizer.get("learning_rate", _LARGEST_RATE), _LARGEST_RATE)
    job = accepted(plain | {"plan": {"microbatch_size": fields["plan"].get("microbatch_size", 1)}}).as_one_rank()
    return job.model_copy(update={"precision": PrecisionSpec()})


def run(fields: Fields, timeout_s: float = HANGS_S) -> Outcome:
    """The outcome of one draw."""
    try:
        job = one_rank(fields)
    except PlanError as error:
        return Outcome("refused", error.faults)
    try:
        plain = [plain_trace(job)]
        own = run_on_mesh(job, trace, job)
        return judged(job, plain, job, own, timeout_s)
    except Exception:
        return Outcome("failed", [traceback.format_exc()])


def main() -> int:
    """Run draws; 0 if all that were accepted are equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="seed of the draws")
    parser.add_argument("--count", type=int, default=60, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds: Counter[str] = Counter()
    largest, start_s = 0.0, time.monotonic()
    for number in range(options.first, options.first + options.count):
        fields = draw(options.seed, number)
        result = run_twice(fields, run)
        kinds[result.kind] += 1
        if result.kind == "equal":
            largest = max(largest, result.share)
        if result.kind in ("differs", "failed", "tie"):
            print(
                f"model of draw {options.seed}:{number} {result.kind}, {result.share:.3g}: {result.where}", flush=True
            )
        if result.kind in ("differs", "failed"):
            print("\n".join(reason[-3000:] for reason in result.reasons), flush=True)
            print(as_command(shrink(fields, result.kind, run)), flush=True)
    assert math.isfinite(largest)
    print(f"{dict(kinds)}; the largest took {largest:.2f} of its bound; {time.monotonic() - start_s:.0f} s")
    return 1 if kinds["differs"] or kinds["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
