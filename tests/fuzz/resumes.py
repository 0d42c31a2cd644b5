"""Draws runs at random, stops them, and goes on: under the same plan, and under another one for the same model.

    python tests/fuzz/resumes.py --seed 1 --count 100
    python tests/fuzz/resumes.py --seed 1 --count 40 --steps 20

A run does `steps` steps, saves, and does as many again. Going on from what was saved, under the same plan, must give
the same bits: losses, weights, moments and all else that is saved. Under another plan, of another draw, what its ranks
hold before their first step must be the same bits, put together from all ranks: every element once, with none missing.
Only what compression lost is a sum there, which is rounded; and moments where that draw keeps them in fewer bits.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from fuzz.draw import Fields, draw
from fuzz.plans import accepted, as_command, share_of
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.schedule.job_program import job_program
from shardwright.sharding.optimizer_state import STATES
from shardwright.train.async_step import train_stream
from shardwright.train.build import Replica, build
from shardwright.train.checkpoint.boxes import HeldBox
from shardwright.train.checkpoint.kept import check_whole
from shardwright.train.checkpoint.resuming import begin
from shardwright.train.checkpoint.saved_state import SavedState
from shardwright.train.checkpoint.storage import open_storage
from shardwright.train.checkpoint.writing import CheckpointWriter
from shardwright.train.train_step import train_step
from support.ranks import RankFailedError, leaves_nothing, run_on_mesh

STEPS = 2
HANGS_S = 300.0
PLANS_TRIED = 40  # of other draws, until the model goes with one


@dataclass(frozen=True)
class Half:
    """Half of a run on one rank: its losses, and what it would save before and after them."""

    losses: list[float]
    before: list[HeldBox]
    after: list[HeldBox]


def steps_of(replica: Replica, mesh: Mesh, job: JobSpec, first: int, num_steps: int) -> list[float]:
    """The losses of some steps."""

    def mine(step: int) -> Tensor:
        return share_of(job, mesh, step)

    if replica.program.weights == "current":
        return [train_step(replica, step, mine(step)).loss for step in range(first, first + num_steps)]
    program = job_program(job, num_steps)
    return [result.loss for result in train_stream(replica, program, first, lambda i: mine(first + i))]


@leaves_nothing
def first_half(mesh: Mesh, job: JobSpec, folder: Path, num_steps: int) -> Half:
    """Train, save, and go on without stopping: the second half of the run that this was."""
    replica = build(job, mesh)
    writer = CheckpointWriter(job, replica, mesh, folder)
    steps_of(replica, mesh, job, 0, num_steps)
    held = SavedState(replica, mesh).held()
    writer.save(num_steps, job.batch.samples_before(num_steps), 0, {})
    losses = steps_of(replica, mesh, job, num_steps, num_steps)
    assert writer.wait() is not None
    return Half(losses, held, SavedState(replica, mesh).held())


@leaves_nothing
def second_half(mesh: Mesh, job: JobSpec, folder: Path, num_steps: int) -> Half:
    """Go on from what was saved."""
    begun = begin(job, mesh, folder)
    assert begun.step, begun.lines
    held = SavedState(begun.replica, mesh).held()
    losses = steps_of(begun.replica, mesh, job, begun.step, num_steps)
    return Half(losses, held, SavedState(begun.replica, mesh).held())


@leaves_nothing
def held_at_first(mesh: Mesh, job: JobSpec, folder: Path) -> list[HeldBox]:
    """The boxes that a rank of another plan would save before it goes on."""
    begun = begin(job, mesh, folder)
    assert begun.step, begun.lines
    return SavedState(begun.replica, mesh).held()


def put_together(by_rank: list[list[HeldBox]]) -> dict[str, Tensor]:
    """The full tensors. AssertionError where an element is there twice or not at all."""
    result: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for held in [held for boxes in by_rank for held in boxes]:
        full = result.setdefault(held.name, torch.zeros(held.full_shape, dtype=held.values.dtype))
        count = times.setdefault(held.name, torch.zeros(held.full_shape, dtype=torch.int8))
        part = tuple(slice(*ends) for ends in held.box)
        full[part] = held.values
        count[part] += 1
    for name, count in times.items():
        is_partial = name.startswith("compression.")  # of parameters that are compressed on some ranks alone
        assert int(count.max()) == 1 and (is_partial or int(count.min()) == 1), f"{name}: elements twice, or missing"
    return result


def compression_sums(full: dict[str, Tensor]) -> dict[str, Tensor]:
    """Errors of compression by parameter, over replicas and kinds."""
    sums: dict[str, Tensor] = {}
    for name, values in full.items():
        _, kind, parameter = [*name.split(".", 2), "", ""][:3]
        if name.startswith("compression.") and kind != "query":
            sums[parameter] = sums.get(parameter, torch.zeros(values.shape[1:])) + values.sum(0)
    return sums


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names of tensors that are not the same in two sets, bit for bit."""
    if one.keys() != other.keys():
        return [f"in one alone: {sorted(one.keys() ^ other.keys())[:4]}"]
    return [
        name for name, values in one.items() if values.shape != other[name].shape or raw(values) != raw(other[name])
    ]


def raw(values: Tensor) -> bytes:
    """The bytes of a tensor, which numpy need not know the type of."""
    return values.reshape(-1).view(torch.uint8).numpy().tobytes()


def other_plan(fields: Fields, seed: int, number: int) -> JobSpec | None:
    """The model of a draw under the plan of another; None if there is none among some."""
    for offset in range(1, PLANS_TRIED):
        other = draw(seed + 7919, number * PLANS_TRIED + offset)
        batch = {"global_batch_size": fields["batch"]["global_batch_size"] * other["plan"]["dp"]}
        plan = {name: value for name, value in other["plan"].items() if not name.startswith("recompute_layers")}
        if plan.get("recompute") == "layers":
            plan["recompute"] = "none"
        clip = 0.0 if plan["schedule"].startswith("pipedream") else fields["optimizer"]["clip_grad_norm"]
        optimizer = fields["optimizer"] | {"clip_grad_norm": clip}
        precision = fields["precision"] | {"moments": other["precision"].get("moments", "float32")}
        try:
            return accepted(
                {**fields, "plan": plan, "batch": batch, "optimizer": optimizer, "precision": precision}
                | {"cluster": other.get("cluster", {}), "health": {}}
            )
        except PlanError:
            continue
    return None


def run(seed: int, number: int, num_steps: int = STEPS) -> tuple[str, list[str]]:
    """The outcome of a draw: "refused", "differs", "equal" or "equal, and elsewhere"; and why."""
    fields = draw(seed, number)
    fields["optimizer"]["steps"] = max(fields["optimizer"]["steps"], 2 * num_steps)
    if "checkpoint" in fields:
        fields["checkpoint"]["path"] = ""
    try:
        job = accepted(fields)
    except PlanError as error:
        return "refused", error.faults
    with tempfile.TemporaryDirectory(prefix="resumes-") as scratch:
        folder = Path(scratch)
        never_stopped = run_on_mesh(job, first_half, job, folder, num_steps, timeout_s=HANGS_S)
        check_whole(open_storage(str(folder / "checkpoints")), num_steps)
        saved = put_together([half.before for half in never_stopped])
        went_on = run_on_mesh(job, second_half, job, folder, num_steps, timeout_s=HANGS_S)
        wrong = [
            f"it begins with other {name}" for name in differences(saved, put_together([h.before for h in went_on]))
        ]
        # repr, in which a number that is none is equal to itself
        if [repr(half.losses) for half in never_stopped] != [repr(half.losses) for half in went_on]:
            wrong.append(f"losses {went_on[0].losses}, not {never_stopped[0].losses}")
        ends = [put_together([half.after for half in halves]) for halves in (never_stopped, went_on)]
        wrong += [f"it ends with other {name}" for name in differences(*ends)]
        other = other_plan(fields, seed, number)
        if other is not None:
            there = put_together(run_on_mesh(other, held_at_first, other, folder, timeout_s=HANGS_S))
            wrong += [f"under {as_plan(other)}: {text}" for text in moved_wrongly(saved, there)]
    if wrong:
        return "differs", wrong
    return "equal" if other is None else "equal, and elsewhere", []


def as_plan(job: JobSpec) -> str:
    """The fields of a plan that are not as they would be."""
    return str(job.plan.model_dump(exclude_defaults=True))


def moved_wrongly(saved: dict[str, Tensor], there: dict[str, Tensor]) -> list[str]:
    """The names of tensors that another plan's ranks hold otherwise than they were saved."""
    plain, plain_there = (
        {name: values for name, values in full.items() if not name.startswith("compression.")}
        for full in (saved, there)
    )
    kept = {name: values.dtype for name, values in plain_there.items() if name.split(".")[0] in STATES}
    wrong = differences({name: values.to(kept.get(name, values.dtype)) for name, values in plain.items()}, plain_there)
    before, after = compression_sums(saved), compression_sums(there)
    for name in before.keys() & after.keys():
        close = torch.isclose(before[name], after[name], rtol=1e-5, atol=1e-6 * float(before[name].abs().max()))
        # A tensor that is not compressed any more, or whose part is too small, has no errors.
        if not bool((close | (after[name] == 0)).all()):
            wrong.append(f"errors of compression of {name}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--number", type=int, help="only this draw")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of either half")
    asked = parser.parse_args()
    counts: Counter[str] = Counter()
    start_s = time.monotonic()
    for number in [asked.number] if asked.number is not None else range(asked.count):
        try:
            kind, reasons = run(asked.seed, number, asked.steps)
        except (RankFailedError, AssertionError) as error:
            kind, reasons = "failed", [str(error)]
        counts[kind] += 1
        if kind in ("differs", "failed"):
            print(f"{asked.seed}:{number} {kind}: " + "\n  ".join(reasons[:5]), flush=True)
            print(as_command(draw(asked.seed, number)), flush=True)
    print(f"{dict(counts)} in {time.monotonic() - start_s:.0f} s")
    return int(bool(counts["differs"] or counts["failed"]))


if __name__ == "__main__":
    sys.exit(main())
