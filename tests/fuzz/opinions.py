"""Draws trainings and holds them against a second opinion (second_opinion.py): transformers' model in float64.

    python tests/fuzz/opinions.py --seed 1 --count 100
    python tests/fuzz/opinions.py --seed 1 --number 17

A draw is a family of models, with random weights that come in from a folder; data with documents, chats, filling, and
targets that a rank, a microbatch or a whole step may lack; an optimizer, its rate and its clipping; and a plan under
which training begins, and another one under which it goes on from a checkpoint. Or the model is a module of one's own,
some parts of which are frozen for a while. Losses, norms, balance losses, a held-out loss and all weights are compared.

How far float32 may be from float64 follows from the job itself: the opinion is asked again of weights that are moved by
one rounding each (src/shardwright/measure/rounding.py).
"""

import argparse
import math
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

import shardwright as sw
from shardwright.config.base import PlanError
from shardwright.config.hugging_face.config_json import read_model
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.measure.rounding import LEEWAY
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.schedule.job_program import plan_faults
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.sharding.token_marks import FILLING, UNCOUNTED
from shardwright.train.build import job_mesh
from shardwright.train.checkpoint.resuming import begin
from shardwright.train.checkpoint.writing import CheckpointWriter
from shardwright.train.train_step import evaluate, train_step
from support.ranks import in_group, leaves_nothing, run_on_mesh, run_ranks
from support.released_models import in_their_layout, save_released
from support.second_opinion import UNIT, Document, Opinion, Sample, Training, sum_of_losses

SEQUENCE, BATCH, VOCAB, STEPS = 20, 4, 96, 4
# Families whose every matrix is a tensor of its own, for optimizers that look at whole ones.
SEPARATE = ("llama", "llama 3.1", "qwen3", "mistral", "granite", "olmo2")
WITHOUT_BIAS = (*SEPARATE, "gemma", "gemma2", "mixtral", "qwen3_moe", "olmoe", "smollm3")
WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
FAMILIES = (*WITHOUT_BIAS, "gpt2", "llama biases", "qwen2", "qwen2_moe", "starcoder2", "deepseek_v3", "gpt_neox", "opt")
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adamw": FAMILIES, "adam": FAMILIES, "sgd": FAMILIES, "lion": WITHOUT_BIAS, "muon": SEPARATE, "adafactor": SEPARATE,
}  # fmt: skip
ONE_RANK: tuple[dict[str, Any], ...] = ({}, {"recompute": "full"}, {"bucket_mib": 0.01})
TWO_RANKS: tuple[dict[str, Any], ...] = (
    {"dp": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 2}, {"dp": 2, "zero": 3}, {"tp": 2},
    {"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"pp": 2, "schedule": "gpipe"}, {"pp": 2, "schedule": "zb-h1"},
    {"cp": 2}, {"cp": 2, "cp_method": "ulysses"},
)  # fmt: skip
EXPERT_PLANS: tuple[dict[str, Any], ...] = (
    {"dp": 2, "ep": 2}, {"dp": 2, "ep": 2, "zero": 3}, {"cp": 2, "ep": 2},
    {"tp": 2, "sequence_parallel": True, "ep": 2, "expert_tp": 1},
)  # fmt: skip


@dataclass(frozen=True)
class Draw:
    """A model, its data and its training: `plans` in turn, for so many `steps` each."""

    number: str
    family: str
    training: Training
    separate: bool
    batches: tuple[tuple[Sample, ...], ...]  # batches of the steps, and a held-out one
    plans: tuple[dict[str, Any], dict[str, Any]]
    frozen: tuple[tuple[str, ...], ...] | None = None  # of a module of one's own, prefixes of names in each phase

    @property
    def ranks(self) -> tuple[int, int]:
        """Ranks of each phase."""
        one, other = (math.prod(plan.get(axis, 1) for axis in ("dp", "tp", "pp", "cp")) for plan in self.plans)
        return one, other


@dataclass
class Trained:
    """Numbers of each step, None for a loss and a norm that there are not; a held-out loss, and weights by name; names
    of those that had a gradient of nothing but rounding."""

    steps: list[tuple[float | None, float | None, float]] = field(default_factory=list)
    evaluated: float | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)
    faint: set[str] = field(default_factory=set)


# Draws.


def draw(seed: int, number: int, most_ranks: int = 2) -> Draw:
    """A draw, the same whenever it is asked for."""
    rng = random.Random(f"{seed} {number}")
    name = rng.choice(["adamw", "adamw", "adam", "sgd", "lion", "muon", "adafactor"])
    is_own = rng.random() < 0.2
    if is_own and name in ("muon", "adafactor"):
        name = "adamw"
    family = rng.choice(OPTIMIZERS[name])
    if rng.random() < 0.25 and name in ("adamw", "adam", "sgd"):
        family = rng.choice(WITH_EXPERTS)
    has_balance = family in WITH_EXPERTS and not is_own and rng.random() < 0.8
    optimizer = {
        "name": name, "learning_rate": rng.choice([3e-4, 2e-3]) * (10.0 if name == "sgd" else 1.0),
        "warmup_steps": rng.choice([0, 1, 3]), "steps": rng.choice([4, 6, 40]),
        "schedule": rng.choice(["constant", "linear", "cosine", "wsd", "inverse-sqrt"]),
        "min_learning_rate_ratio": rng.choice([0.0, 0.1]), "weight_decay": rng.choice([0.0, 0.1]),
        "clip_grad_norm": rng.choice([0.0, 0.3, 1.0]), "beta1": 0.9, "beta2": rng.choice([0.95, 0.99]),
        "momentum": rng.choice([0.9, 0.95]), "epsilon": 1e-4,
    }  # fmt: skip
    if optimizer["schedule"] == "wsd":
        optimizer["decay_share"] = rng.choice([0.25, 0.5])
    if is_own:
        optimizer |= {"schedule": "constant", "warmup_steps": 0}
    training = Training(
        optimizer, rng.choice([1, 2]), SEQUENCE, balance=0.05 if has_balance else 0.0,
        balance_scope=rng.choice(["microbatch", "sequence"]), z=0.01 if has_balance and rng.random() < 0.5 else 0.0,
    )  # fmt: skip
    kind = rng.choice(["text", "documents", "chats", "chats", "chats"])
    batches = tuple(_batch(rng, kind, is_last=step == STEPS) for step in range(STEPS + 1))
    return Draw(
        f"{seed}:{number}", family, training, kind != "text", batches, _plans(rng, family, is_own, most_ranks),
        frozen=_frozen(rng) if is_own else None,
    )  # fmt: skip


def _plans(rng: random.Random, family: str, is_own: bool, most_ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plans of one rank, or of two, under which this family can be trained."""
    if rng.random() < 0.6 or most_ranks < 2:
        known: Sequence[dict[str, Any]] = [{"zero": n} for n in range(4)] if is_own else ONE_RANK
    elif is_own:
        known = [{"dp": 2, "zero": n} for n in range(4)]
    else:
        known = TWO_RANKS + (EXPERT_PLANS * 3 if family in WITH_EXPERTS else ())
    return rng.choice(known), rng.choice(known)


def _frozen(rng: random.Random) -> tuple[tuple[str, ...], ...]:
    """Three phases: in the second one something is frozen, and in the others perhaps something else."""
    parts = ("model.layers.0.", "model.layers.1.mlp", "model.layers.1.self_attn", "model.norm", "transformer.h.0.",
             "transformer.ln_f", "model.decoder.layers.0.")  # fmt: skip
    none = tuple[str, ...]()
    return (tuple(rng.sample(parts, 2)) if rng.random() < 0.4 else none, tuple(rng.sample(parts, 4)), none)


def _batch(rng: random.Random, kind: str, is_last: bool) -> tuple[Sample, ...]:
    """The samples of a step. Of chats, a whole step may have no target, and so may a microbatch or a sample."""
    mute_from = rng.choice([0, 1, 2, 2, 3, BATCH, BATCH, BATCH]) if kind == "chats" and not is_last else BATCH
    samples = [_sample(rng, kind, learns=at < mute_from) for at in range(BATCH)]
    rng.shuffle(samples) if rng.random() < 0.5 else None
    return tuple(samples)


def _sample(rng: random.Random, kind: str, learns: bool) -> Sample:
    room, documents = SEQUENCE + 1, list[Document]()
    if kind == "text":
        return (_document(rng, room, [True] * room),)
    if kind == "documents":
        while room:
            length = min(room, rng.randint(1, 12))
            documents.append(_document(rng, length, [True] * length))
            room -= length
        return tuple(documents)
    while room > 2 and (not documents or rng.random() < 0.6):
        length = rng.randint(2, min(room, 11))
        asked = rng.randint(1, length - 1)
        learned = [learns and at >= asked and rng.random() < 0.9 for at in range(length)]
        documents.append(_document(rng, length, learned))
        room -= length
    return tuple(documents)


def _document(rng: random.Random, length: int, learned: list[bool]) -> Document:
    # No id is 0: to some families of transformers that is no token, and its row of the table has no gradient.
    return Document(tuple(1 + int(rng.random() ** 2 * (VOCAB - 1)) for _ in range(length)), tuple(learned))


# The side that is tested.


def marked_tokens(samples: Sequence[Sample], separate: bool) -> Tensor:
    """Samples as data give them to a run, [B, S + 1]."""
    rows = []
    for sample in samples:
        row = list[int]()
        for document in sample:
            marked = [
                i if is_learned else i + UNCOUNTED for i, is_learned in zip(document.ids, document.learned, strict=True)
            ]
            row += [-1 - document.ids[0], *marked[1:]] if separate else document.ids
        filling = SEQUENCE + 1 - len(row)
        rows.append(row + ([-1 - FILLING] + [UNCOUNTED + FILLING] * (filling - 1) if filling else []))
    return torch.tensor(rows)


def job_of(drawn: Draw, folder: Path, plan: dict[str, Any]) -> JobSpec:
    """The job of a phase. Raises PlanError where its plan is refused."""
    model, training = read_model(str(folder)), drawn.training
    model |= {"sequence": SEQUENCE, "weights": str(folder), "dropout": 0.0}
    if training.balance or training.z:
        aux = {"aux_loss": "switch", "aux_coefficient": training.balance, "aux_scope": training.balance_scope}
        model["moe"] = model["moe"] | aux | {"z_coefficient": training.z}
    elif "moe" in model:
        model["moe"] = {
            key: values for key, values in model["moe"].items() if not key.startswith(("aux_", "z_", "bias_update"))
        }
    job = make_job(
        {
            "model": model, "plan": {"microbatch_size": training.microbatch_size} | plan,
            "batch": {"global_batch_size": BATCH}, "run": {"device": "cpu"}, "optimizer": _known(training.optimizer),
            "data": {"separate_documents": drawn.separate},
        }
    )  # fmt: skip
    if faults := plan_faults(job):
        raise PlanError("job", faults)
    return job


def _known(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The fields that an optimizer has a use for."""
    without = {"sgd": ("beta1", "beta2", "epsilon"), "lion": ("momentum", "epsilon")}
    return {key: values for key, values in optimizer.items() if key not in without.get(optimizer["name"], ())}


@leaves_nothing
def phase(
    mesh: Mesh, job: JobSpec, folder: Path, batches: list[Tensor], held_out: Tensor, first: int
) -> tuple[Trained, list[tuple[ParameterShard, Tensor]]]:
    """Train from the folder's checkpoint, or from released weights, to the end of some batches, and save."""
    begun, result = begin(job, mesh, folder), Trained()
    assert begun.step == first, begun.lines
    left_out = int(begun.state.get("schedule", {}).get("left_out", 0))

    def mine(tokens: Tensor) -> Tensor:
        share = BATCH // job.plan.dp
        return tokens[mesh.dp.index * share :][:share]

    for number, tokens in enumerate(batches):
        step = train_step(begun.replica, first + number, mine(tokens), left_out=left_out)
        left_out += step.skipped
        result.steps.append((step.loss, step.grad_norm, sum(layer.balance_loss for layer in step.routing)))
    result.evaluated = evaluate(begun.replica, mine(held_out))
    end = first + len(batches)
    writer = CheckpointWriter(job, begun.replica, mesh, folder)
    writer.save(end, end * BATCH, 0, {"schedule": {"left_out": left_out}})
    writer.wait()
    boxes = []
    with begun.replica.gathered():
        for stage in begun.replica.stages.values():
            boxes += [(p.place, p.box_values()) for p in placed_parameters(stage).values()]
    return result, boxes


def by_plans(drawn: Draw, folder: Path) -> Trained:
    """Train half of the steps under each of two plans. Raises PlanError where one is refused."""
    jobs = [job_of(drawn, folder, plan) for plan in drawn.plans]
    *batches, held_out = (marked_tokens(samples, drawn.separate) for samples in drawn.batches)
    result, half = Trained(), STEPS // 2
    for number, job in enumerate(jobs):
        given = job, folder / "run", batches[number * half : (number + 1) * half], held_out, number * half
        if job.plan.world == 1:
            ranks = [phase(job_mesh(job, 0, torch.device("cpu")), *given)]
        else:
            ranks = run_on_mesh(job, phase, *given)
        of_step, evaluated = ranks[0][0].steps, ranks[0][0].evaluated
        assert all(rank.steps == of_step and rank.evaluated == evaluated for rank, _ in ranks), "ranks tell otherwise"
        result.steps += of_step
        result.evaluated = evaluated
    full: dict[str, Tensor] = {}
    for place, box in (one for _, boxes in ranks for one in boxes):
        full.setdefault(place.name, torch.empty(place.full_shape))[place.slices] = box
    result.weights = in_their_layout(drawn.family, jobs[-1].model, full)
    return result


@leaves_nothing
def own_module(rank: int, world: int, drawn: Draw, folder: Path) -> Trained:
    """transformers' model as a module of one's own; each phase has a new one, which loads what the last one saved."""
    result, model = Trained(), sw_model(drawn, folder, 0)
    for number, batch in enumerate(drawn.batches[:-1]):
        if number in PHASE_STARTS[1:]:
            model.save(folder / "own")
            model = sw_model(drawn, folder, PHASE_STARTS.index(number))
            model.load(folder / "own")
        share = BATCH // world
        own = batch[rank * share :][:share]
        total, num_targets = sum_of_losses(model, own, SEQUENCE)
        model.backward(total, num_targets=num_targets)
        step = model.step()
        everywhere = sum(sum(document.learned[1:]) for sample in batch for document in sample)
        assert step.num_targets == everywhere
        result.steps.append((None, None if step.skipped else step.grad_norm, 0.0))
    result.weights = dict(model.state_dict())
    return result


PHASE_STARTS = (0, 1, 3)


def sw_model(drawn: Draw, folder: Path, number: int) -> sw.ShardedModule:
    """The module of a phase, whose frozen parts are frozen."""
    from transformers import AutoModelForCausalLM

    assert drawn.frozen is not None
    net: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not name.startswith(drawn.frozen[number]))
    return sw.shard(net.eval(), drawn.plans[number % 2], optimizer=_known(drawn.training.optimizer))


# Held against each other.


def opinion_of(drawn: Draw, folder: Path, roundings: int) -> Trained:
    """The result of the opinion."""
    opinion, result = Opinion(folder, drawn.training, roundings), Trained()
    for number, batch in enumerate(drawn.batches[:-1]):
        if drawn.frozen is not None and number in PHASE_STARTS:
            opinion.freeze(drawn.frozen[PHASE_STARTS.index(number)])
        loss, norm, balance = opinion.step(batch)
        result.steps.append((None, norm, 0.0) if drawn.frozen is not None else (loss, norm, balance))
    result.evaluated = opinion.evaluate(drawn.batches[-1]) if drawn.frozen is None else None
    result.weights = {name: weight.detach() for name, weight in opinion.named.items()}
    result.faint = opinion.faint
    return result


@dataclass
class Outcome:
    """The outcome of a draw: "equal", "refused", "tie", "differs" or "failed"; the largest share of a bound, and whose.

    A tie is of an optimizer that makes a whole step of any gradient, and of a gradient that is nothing but rounding:
    that of queries and keys, say, where only first tokens of documents have a target.
    """

    kind: str
    share: float = 0.0
    where: str = ""
    reasons: list[str] = field(default_factory=list)


def compare(drawn: Draw, product: Trained, opinion: Trained, moved: Trained) -> Outcome:
    """Hold all numbers against the opinion's."""
    result = Outcome("equal")

    def hold(where: str, difference: float, bound: float) -> None:
        share = difference / bound if math.isfinite(difference) else math.inf
        if not share <= result.share:
            result.share, result.where = share, f"{where}: {difference:.3g} with a bound of {bound:.3g}"

    o, norms = drawn.training.optimizer, [norm for _, norm, _ in opinion.steps if norm is not None]
    # A gradient is off by some roundings of the largest ones, and Adam divides it by as little as its epsilon.
    most = max([1.0, *norms]) if not o["clip_grad_norm"] else max(1.0, o["clip_grad_norm"])
    noise = 8 * UNIT * most * len(norms) * o["learning_rate"] / (o["epsilon"] if o["name"] in _DIVIDES else 1.0)
    num_turned, num_elements, turn = 0, 0, 2 * o["learning_rate"]
    for name, wanted in opinion.weights.items():
        mine, other = product.weights[name], moved.weights[name]
        off = (mine[: len(wanted)].double() - wanted[: len(mine)]).abs()
        bound = LEEWAY * float((other - wanted).abs().max()) + 8 * UNIT * float(wanted.abs().max()) + noise
        if o["name"] == "lion":  # a sign may turn where what it is of is nothing but rounding
            has_turned = (off > bound) & (off < turn * len(norms) + bound)
            num_turned, num_elements = num_turned + int(has_turned.sum()), num_elements + off.numel()
            off = off.masked_fill(has_turned, 0.0)
        hold(f"weights {name}", float(off.max()), bound)
    hold("signs of Lion's steps", num_turned, 8 + num_elements / 1000)
    slack = turn * num_turned * max([1.0, *norms])  # by which these may change a loss, or a norm

    def number(where: str, mine: float | None, wanted: float | None, other: float | None) -> None:
        if mine is None or wanted is None or other is None:
            hold(where, 0.0 if mine is wanted else math.inf, 1.0)
        else:
            bound = LEEWAY * abs(other - wanted) + 32 * UNIT * (1.0 + abs(wanted)) + slack
            hold(where, abs(mine - wanted), bound)

    names = ("loss", "gradient norm", "balance loss")
    assert len(product.steps) == len(opinion.steps)
    for at, rows in enumerate(zip(product.steps, opinion.steps, moved.steps, strict=True)):
        for name, *values in zip(names, *rows, strict=True):
            number(f"{name} of step {at}", *values)
    number("held-out loss", product.evaluated, opinion.evaluated, moved.evaluated)
    if result.share > 1:
        result.kind = "tie" if opinion.faint and o["name"] in _WHOLE_STEPS else "differs"
    return result


_WHOLE_STEPS = ("adafactor", "lion", "muon")
_DIVIDES = ("adam", "adamw", "muon", "adafactor")


def run(drawn: Draw) -> Outcome:
    """The outcome of one draw."""
    try:
        with tempfile.TemporaryDirectory(prefix="opinion-") as place:
            folder = Path(place)
            save_released(drawn.family, folder, seed=int(drawn.number.replace(":", "")), layers=2)
            try:
                if drawn.frozen is None:
                    product = by_plans(drawn, folder)
                else:
                    world = drawn.ranks[0]
                    given = drawn, folder
                    product = (
                        run_ranks(world, in_group, world, own_module, *given)[0]
                        if world > 1
                        else own_module(0, 1, *given)
                    )
            except PlanError as error:
                return Outcome("refused", reasons=error.faults)
            return compare(drawn, product, opinion_of(drawn, folder, 0), opinion_of(drawn, folder, 1))
    except Exception:
        return Outcome("failed", math.inf, reasons=[traceback.format_exc()])


def in_words(drawn: Draw, result: Outcome) -> str:
    """A draw that is not equal, for whoever looks for the reason."""
    about = replace(drawn, batches=())
    return "\n".join([f"{result.kind}: {about}", f"{result.share:.3g} of a bound, {result.where}", *result.reasons])


def main() -> int:
    """Run draws; 0 if all that were accepted are equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="seed of the draws")
    parser.add_argument("--count", type=int, default=60, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--number", type=int, default=-1, help="this draw alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    first, count = (options.first, options.count) if options.number < 0 else (options.number, 1)
    kinds: Counter[str] = Counter()
    largest, start_s = 0.0, time.monotonic()
    for number in range(first, first + count):
        drawn = draw(options.seed, number)
        result = run(drawn)
        kinds[result.kind] += 1
        if result.kind in ("differs", "failed"):
            print(in_words(drawn, result), flush=True)
        elif result.kind == "equal":
            largest = max(largest, result.share)
    print(f"{dict(kinds)}; the largest took {largest:.2f} of its bound; {time.monotonic() - start_s:.0f} s")
    return 1 if kinds["differs"] or kinds["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
