"""Draws plans at random and holds each against one rank: what is accepted must compute what one rank computes.

    python tests/fuzz/plans.py --seed 1 --count 100
    python tests/fuzz/plans.py --seed 1 --number 17

Each draw trains three steps and evaluates a batch, under its plan on Gloo ranks and on one rank. How far two right
computations of the same sums may lie apart follows from the arithmetic of that very job (`measure/rounding.py`).

Traffic of ranks in a step must be what their accounts and dry runs say (ledgers.py). Refused draws are counted by
reason. A draw that fails is made smaller as long as it fails, and printed as a job.
"""

import argparse
import json
import math
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from fuzz.draw import Fields, draw
from fuzz.ledgers import Table, foretold_otherwise
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.plan import PlanSpec
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.measure.rounding import HALF_UNIT, LEEWAY, moved_weights
from shardwright.memory.budget import meet_budget
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.initial_values import seeded
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.schedule.job_program import job_program, plan_faults
from shardwright.sharding.groups import loses_gradients, zero_stage
from shardwright.sharding.mesh import MeshShape
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.train.async_step import train_stream
from shardwright.train.build import build
from shardwright.train.health.run_health import RunHealth
from shardwright.train.train_step import StepResult, evaluate, train_step
from support.cases import marked, skewed_tokens
from support.ranks import RankFailedError, leaves_nothing, run_on_mesh

STEPS = 3
MOVES = 6  # runs of one rank from moved weights, at most: the first is enough for most
SINGLE = HALF_UNIT["float32"]
SHAPE = ("layers", "hidden", "heads", "ffn", "vocab", "sequence", "global_batch_size")  # whose defaults are larger
HANGS_S = 120.0
SHRINKS = 40  # runs at most that making a failure smaller may take


@dataclass(frozen=True)
class Trace:
    """The results of one rank: its steps, the loss of an evaluation after them, and its boxes of the parameters; and
    what it moved in its last step that updated weights, or in all of a schedule that has no single step."""

    steps: list[StepResult]
    evaluated: float
    boxes: list[tuple[ParameterShard, Tensor]]
    ledger: Table = field(default_factory=dict)


@dataclass
class Outcome:
    """The outcome of one draw: "equal", "refused" (and why), "tie", "differs" or "failed"; and why."""

    kind: str
    reasons: list[str] = field(default_factory=list)
    share: float = 0.0
    where: str = ""


def accepted(fields: Fields) -> JobSpec:
    """The job that a command would run. Raises PlanError if it would refuse."""
    job = make_job(fields)
    if faults := plan_faults(job):
        raise PlanError("job", faults)
    return meet_budget(job)


def tokens_of(job: JobSpec, step: int) -> Tensor:
    """The global batch of a step, [B, S + 1]: skewed, so that there is something to learn; documents may begin anywhere
    but not with the same token."""
    tokens, begins = skewed_tokens(job, job.run.seed % 2**31 * 16 + step)
    if not job.data.separate_documents:
        return tokens
    begins[0] = True  # nothing in this sample has a loss
    return marked(tokens, begins)


def share_of(job: JobSpec, mesh: Mesh, step: int) -> Tensor:
    """A replica's samples of a step, whose batch may not have grown yet."""
    now = job.at_step(step)
    share = now.batch.global_batch_size // job.plan.dp
    return tokens_of(now, step)[mesh.dp.index * share :][:share]


def unprofiled(job: JobSpec) -> JobSpec:
    """The job without profiles, which take seconds to write."""
    return job.model_copy(update={"run": job.run.model_copy(update={"profile_steps": 0})})


@leaves_nothing
def trace(mesh: Mesh, job: JobSpec, moved_by: int = 0) -> Trace:
    """Train and evaluate on one rank of a job; from the number `moved_by` on weights are moved by a rounding."""
    replica = build(job, mesh, moved_weights(job, seeded(job.run.seed), moved_by) if moved_by else None)

    def mine(step: int) -> Tensor:
        return share_of(job, mesh, step)

    ledger: Table = {}
    health = RunHealth(replace(replica, job=unprofiled(job)), Path("/nowhere"))
    if replica.program.weights == "current":
        steps = []
        for step in range(STEPS):
            health.before_span(step, mine(step))
            mesh.ledger.clear()
            with health.recording(step, 1):
                steps.append(train_step(replica, step, mine(step)))
            ledger = ledger if steps[-1].skipped else mesh.ledger.table()
            _, lines = health.after_span(step, steps[-1:], mine(step))
            assert not any("computed twice" in line for line in lines), lines
            health.compare_replicas(step + 1)
    else:
        steps = train_stream(replica, job_program(job, STEPS), 0, mine)
        ledger = mesh.ledger.table()
        health.compare_replicas(STEPS)
    whole = job.grown()
    evaluated = evaluate(replica, share_of(whole, mesh, STEPS))
    boxes = []
    with replica.gathered():
        for stage in replica.stages.values():
            boxes += [(p.place, p.box_values()) for p in placed_parameters(stage).values()]
    return Trace(steps, evaluated, boxes, ledger)


def reference_job(job: JobSpec) -> JobSpec:
    """The reference of a plan: one rank, or where a schedule has no single step, its pipeline and replicas alone.

    There a replica's microbatch is an update, so that fewer replicas would be other updates.
    """
    plan = job.plan
    if not plan.schedule.startswith("pipedream"):
        return job.as_one_rank()
    alone = PlanSpec(
        pp=plan.pp, dp=plan.dp, schedule=plan.schedule, microbatch_size=plan.microbatch_size, layout=plan.layout
    )
    return job.model_copy(update={"plan": alone})


def compare(job: JobSpec, ranks: list[Trace], alone: list[Trace], moved: list[list[Trace]]) -> Outcome:
    """Hold every number of every rank against the reference; the largest share of its bound is told."""
    result = Outcome("equal")
    is_lossy = loses_gradients(job.plan)

    def hold(where: str, difference: float, sensitivity: float, size: float) -> None:
        bound = LEEWAY * sensitivity + 8 * SINGLE * size
        share = difference / bound if math.isfinite(difference) and bound > 0 else math.inf if difference else 0.0
        if not share <= result.share:
            result.share, result.where = share, f"{where}: {difference:.3g} with a bound of {bound:.3g}"

    def scalar(where: str, of: Callable[[Trace], float | None], least_size: float = 0.0) -> None:
        wanted = of(alone[0])
        for rank in ranks:
            given = of(rank)
            if given is None or wanted is None:
                hold(where, 0.0 if given is wanted else math.inf, 0.0, 1.0)
                continue
            away = [abs(x - wanted) for run in moved if (x := of(run[0])) is not None and math.isfinite(x)]
            hold(where, abs(given - wanted), max(away, default=0.0), max(abs(wanted), least_size))

    # A small loss is the difference of two larger numbers: the logarithm of V exponentials exceeds their mean by ln V.
    of_logits = math.log(job.model.vocab) / 2
    # Lost gradients show first in the second step; where updates do not wait for a step's end, in the first.
    num_exact = STEPS if not is_lossy else 0 if not SCHEDULES[job.plan.schedule].drains else 1
    for i in range(num_exact):
        scalar(f"loss of step {i}", lambda t, i=i: t.steps[i].loss, of_logits)  # type: ignore[misc]
        for k in range(job.model.mtp_layers):
            scalar(f"loss {k + 2} further of step {i}", lambda t, i=i, k=k: t.steps[i].mtp_losses[k], of_logits)  # type: ignore[misc]
    if not is_lossy:
        for i in range(STEPS):
            scalar(f"gradient norm of step {i}", lambda t, i=i: t.steps[i].grad_norm)  # type: ignore[misc]
        scalar("loss of the evaluation", lambda t: t.evaluated, of_logits)
    full = {place.name: box for trace in alone for place, box in trace.boxes}
    others = [{place.name: box for trace in run for place, box in trace.boxes} for run in moved]
    mesh = MeshShape.of(job.plan)
    first: dict[tuple[object, ...], Tensor] = {}
    for number, rank in enumerate(ranks):
        for place, box in rank.boxes:
            # Ranks of tp may hold parts of unequal sizes, and a tied table lies among others on the first stage than on
            # the last one: so what they hold alike lies at other places in their buffers. The last few elements of a
            # buffer are not updated by vectors, and rounded otherwise.
            at = mesh.coordinates(number)
            copy = place.name, place.box, at["tp"], at["pp"] if zero_stage(job.plan) == 3 else 0
            if not torch.equal(first.setdefault(copy, box), box):
                hold(f"copies of {place.name}", math.inf, 0.0, 1.0)
            if is_lossy:
                hold(place.name, 0.0 if bool(box.isfinite().all()) else math.inf, 0.0, 1.0)
                continue
            whole, part = full[place.name].double(), (box.numel() / full[place.name].numel()) ** 0.5
            away = max(float((other[place.name].double() - whole).norm()) for other in others) if others else 0.0
            difference = float((box.double() - whole[place.slices]).norm())
            # A tensor of zeros without gradient (a bias that softmax cancels) is as large as a step would make it.
            size = float(whole.norm()) * part + job.optimizer.learning_rate * box.numel() ** 0.5
            hold(place.name, difference, away * part, size)
    result.kind = "equal" if result.share <= 1 else "differs"
    return result


def judged(job: JobSpec, ranks: list[Trace], alone: JobSpec, wanted: list[Trace], timeout_s: float) -> Outcome:
    """The outcome of `compare`, with as many moved runs of the reference as it takes."""
    moved: list[list[Trace]] = []
    while (result := compare(job, ranks, wanted, moved)).kind == "differs" and len(moved) < MOVES:
        moved.append(run_on_mesh(alone, trace, alone, len(moved) + 1, timeout_s=timeout_s))
    return result


def moved_otherwise(job: JobSpec, ranks: list[Trace]) -> list[str]:
    """Traffic of ranks that was not foretold. Delayed scales know no past where gradients have overflowed, and those of
    experts that share their matrices where one had no rows yet."""
    skipped = [step.skipped for step in ranks[0].steps]
    is_new = any(skipped) or (job.model.moe.experts and job.plan.expert_tp_size > 1)
    if all(skipped) or (job.precision.float8 == "delayed" and is_new):
        return []
    job = job.at_step(max(step for step, is_skipped in enumerate(skipped) if not is_skipped))
    program = job_program(job)
    if program.weights != "current":
        program = job_program(job, STEPS)
    return foretold_otherwise(job, program, [rank.ledger for rank in ranks])


def run(fields: Fields, timeout_s: float = HANGS_S) -> Outcome:
    """The outcome of one draw."""
    try:
        job = accepted(fields)
    except PlanError as error:
        return Outcome("refused", error.faults)
    except Exception:
        return Outcome("failed", [traceback.format_exc()])
    alone = reference_job(job)
    try:
        ranks = run_on_mesh(job, trace, job, timeout_s=timeout_s)
        if moved := moved_otherwise(job, ranks):
            return Outcome("failed", moved)
        wanted = run_on_mesh(alone, trace, alone, timeout_s=timeout_s)
        return judged(job, ranks, alone, wanted, timeout_s)
    except RankFailedError as error:
        return Outcome("failed", [str(error)])
    except Exception:
        return Outcome("failed", [traceback.format_exc()])


def run_twice(fields: Fields, run: Callable[[Fields, float], Outcome] = run) -> Outcome:
    """`run`; a difference where experts are chosen, or fp8, or Lion, counts if it is there with other tokens and
    weights too.

    A choice between two experts, or for the last room in one, may hang on the last bit; so may, between two values of
    3 bits, what an element is in fp8, and the sign of what Lion steps by. Such a tie is a matter of luck, and a fault
    is not.
    """
    result = run(fields, HANGS_S)
    has_ties = "moe" in fields["model"] or fields.get("precision", {}).get("float8", "none") != "none"
    has_ties = has_ties or fields.get("optimizer", {}).get("name") == "lion"
    if result.kind == "differs" and has_ties:
        seed = fields["run"]["seed"]
        again = [run(with_field(fields, ("run", "seed"), seed + n), HANGS_S) for n in (1, 2)]
        if any(outcome.kind == "equal" for outcome in again):
            return Outcome("tie", share=result.share, where=result.where)
    return result


# Making a failure smaller.


def with_field(fields: Fields, path: tuple[str, ...], value: Any) -> Fields:
    """A copy with one field set, or without it where the value is None."""
    copy = json.loads(json.dumps(fields))
    target = copy
    for key in path[:-1]:
        target = target.setdefault(key, {})
    if value is None:
        target.pop(path[-1], None)
    else:
        target[path[-1]] = value
    return copy  # type: ignore[no-any-return]


def simpler(fields: Fields) -> Iterator[Fields]:
    """Jobs that are a little simpler: without a field, or with half of a number."""
    for section in ("precision", "data", "cluster", "model", "plan", "optimizer"):
        if section in fields and section not in ("model", "plan"):
            yield with_field(fields, (section,), None)
        for name, value in fields.get(section, {}).items():
            if name in SHAPE:
                continue
            yield with_field(fields, (section, name), None)
            if isinstance(value, dict):
                for inner in value:
                    yield with_field(fields, (section, name, inner), None)
    if "ramp" in fields["batch"]:
        yield with_field(fields, ("batch", "ramp"), None)
    for axis in ("dp", "tp", "pp", "cp", "ep"):
        if (value := fields["plan"].get(axis, 1)) > 1:
            yield with_field(fields, ("plan", axis), value // 2)
    for path in (("batch", "global_batch_size"), ("model", "layers"), ("model", "sequence"), ("model", "heads")):
        if (value := fields[path[0]].get(path[1], 1)) > 1:
            yield with_field(fields, path, value // 2)


def shrink(fields: Fields, kind: str, run: Callable[[Fields, float], Outcome] = run) -> Fields:
    """A simpler job that fails in the same way when `run`."""
    left = SHRINKS
    tried: set[str] = set()
    while left:
        for candidate in simpler(fields):
            if (text := json.dumps(candidate, sort_keys=True)) in tried:
                continue
            tried.add(text)
            result = run(candidate, 30.0)
            left -= result.kind != "refused"
            if result.kind == kind:
                fields = candidate
                break
            if left <= 0:
                return fields
        else:
            return fields
    return fields


def as_command(fields: Fields) -> str:
    """A draw as it can be run by hand."""
    overrides = " ".join(
        f"--set '{section}={_toml(value)}'" for section, value in fields.items() if value and section != "optimizer"
    )
    return f"shardwright verify quickstart --steps {STEPS} {overrides}"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}={_toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def main() -> int:
    """Run draws; 0 if all that were accepted are equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="seed of the draws")
    parser.add_argument("--count", type=int, default=60, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--number", type=int, help="this draw alone, and say what it is")
    parser.add_argument("--fields", type=json.loads, help="this job alone, in JSON, and say what becomes of it")
    parser.add_argument("--no-shrink", action="store_true", help="do not make failures smaller")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.fields is not None:
        result = run_twice(options.fields)
        print(f"{result.kind}, {result.share:.3g} of its bound: {result.where}", *result.reasons, sep="\n")
        return 1 if result.kind in ("differs", "failed") else 0
    numbers = range(options.first, options.first + options.count) if options.number is None else [options.number]
    kinds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    largest, start_s = 0.0, time.monotonic()
    for number in numbers:
        fields = draw(options.seed, number)
        result = run_twice(fields)
        kinds[result.kind] += 1
        if kinds.total() % 50 == 0:
            print(f"{kinds.total()} draws, {dict(kinds)}, {time.monotonic() - start_s:.0f} s", flush=True)
        if result.kind == "refused":
            reasons.update(re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", reason) for reason in result.reasons)
        if result.kind == "equal":
            largest = max(largest, result.share)
        if options.number is not None:
            print(json.dumps(fields, indent=1))
        if result.kind in ("differs", "failed", "tie") or options.number is not None:
            print(
                f"draw {options.seed}:{number} {result.kind}, {result.share:.3g} of its bound: {result.where}",
                flush=True,
            )
        if result.kind in ("differs", "failed"):
            for reason in result.reasons:
                print(reason[-3000:])
            smaller = fields if options.no_shrink else shrink(fields, result.kind)
            print(f"python tests/fuzz/plans.py --fields '{json.dumps(smaller)}'")
            print(f"or, where model.vocab is 256 or more: {as_command(smaller)}", flush=True)
    for reason, count in reasons.most_common():
        print(f"{count:5} refused: {reason}")
    took_s = time.monotonic() - start_s
    print(f"{dict(kinds)}; the largest difference of an equal one took {largest:.2f} of its bound; {took_s:.0f} s")
    return 1 if kinds["differs"] or kinds["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
