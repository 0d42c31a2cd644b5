"""The time that overlapped pairs hide: the same program with its pairs side by side, and one part after the other.

    sudo .venv/bin/python benchmarks/overlap.py

Ranks are one thread on one core each, behind links that `links.py` makes and shapes; it needs root. Tensor-parallel
all-reduces travel over these links. Two programs are timed in turn in the same processes: one with pairs, where a
forward runs beside a backward, and split_pairs of it. Losses and gradients are checked equal, bit for bit.

`chain` is what DualPipe repeats in its middle, alone: 2 ranks (tp 2), a stage each, a pair for each microbatch, and a
core for each rank. `dualpipev` is the whole schedule: 4 ranks (pp 2, tp 2), of which two share each core of a machine
with 2 cores.

Figures are for one pair: the median over rounds of the mean over a step, then the mean over ranks. In turn a pair
takes t, of which e is exposed: the rank stands still for tp. Side by side it takes t', and stands still where both
passes do. Hidden is (t - t') / e. A pair needs the core for p processor seconds, moving the data included, and the link
for w: with n ranks on a core it takes at least max(n p, w), so (t - max(n p, w)) / e is the most that can hide.
"""

import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from alternate import WARMUP, alternate, print_row, run_ranks
from links import FRAME_BYTES, Links, NoLinksError, links, shape
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh, MeshNeeds, make_mesh
from shardwright.parallel.pipeline.executor import PipelineExecutor, _Run
from shardwright.parallel.pipeline.pipeline_stage import Stage
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.parallel.zero.sharded_stage import ShardedStage
from shardwright.schedule.action import Action, Kind, backward, forward
from shardwright.schedule.job_program import job_program
from shardwright.schedule.lowering.overlap_pairs import split_pairs
from shardwright.schedule.program_check import program_faults
from shardwright.schedule.schedule import Program
from shardwright.schedule.timing import Costs, play
from shardwright.sharding.stage_placement import in_line
from shardwright.train.build import build
from shardwright.train.train_step import microbatches

MICROBATCHES = 8
MICROBATCH_SIZE = 4
HEADERS = (FRAME_BYTES + 14) / (FRAME_BYTES - 52)  # bytes of a frame over those of the tensor in it
MODEL = {"hidden": 256, "heads": 8, "ffn": 704, "vocab": 512, "sequence": 256}
JOBS = {
    "chain": {"model": {"layers": 1, **MODEL}, "plan": {"tp": 2, "microbatch_size": MICROBATCH_SIZE}},
    "dualpipev": {
        "model": {"layers": 4, **MODEL},
        "plan": {"pp": 2, "tp": 2, "schedule": "dualpipev", "microbatch_size": MICROBATCH_SIZE},
    },
}
RATES = {"chain": (800.0, 400.0, 200.0), "dualpipev": (400.0, 200.0, 100.0)}  # Mbit/s
CORES = sorted(os.sched_getaffinity(0))
MOST_ROUNDS, MOST_S = 40, 30.0
HEADER = [
    "program, Mbit/s", "step, side by side / in turn [quartiles]", "processor time", "rounds", "p, ms", "w, ms",
    "t, ms", "t', ms", "e, ms", "exposed side by side, ms", "hidden", "bound", "simulated, pair 1", "pair at its bound",
]  # fmt: skip


def chain(num_microbatches: int) -> Program:
    """One rank's list: the forward of each microbatch beside the backward of the one before."""
    pairs = [Action(Kind.OVERLAP, parts=(forward(0, i), backward(0, i - 1))) for i in range(1, num_microbatches)]
    end = backward(0, num_microbatches - 1), Action(Kind.REDUCE, 0), Action(Kind.STEP)
    return Program("chain", num_microbatches, in_line(1), ((forward(0, 0), *pairs, *end),))


@dataclass(frozen=True)
class Spent:
    """Seconds of an action, and those of them in which the rank stood still: for the axis, and for anybody."""

    total_s: float
    exposed_s: float
    blocked_s: float

    def without_stages(self) -> float:
        """Seconds less those in which the rank waited for another stage."""
        return self.total_s - (self.blocked_s - self.exposed_s)


class Observed(PipelineExecutor):
    """Notes what each action of a run took, and how long of it the rank stood still for `axis`."""

    def __init__(self, stages: dict[int, Stage], held: Mapping[int, ShardedStage], mesh: Mesh, axis: str) -> None:
        super().__init__(stages, held, mesh)
        self._ledger, self._axis = mesh.ledger, axis
        self.spent: dict[Action, Spent] = {}

    def _execute(self, action: Action, run: _Run) -> None:
        before, start_s = self._ledger.blocked_s(), time.perf_counter()
        super()._execute(action, run)
        total_s, after = time.perf_counter() - start_s, self._ledger.blocked_s()
        blocked = {axis: seconds - before.get(axis, 0.0) for axis, seconds in after.items()}
        self.spent[action] = Spent(total_s, blocked.get(self._axis, 0.0), sum(blocked.values()))


@dataclass
class Contest:
    """The two programs of a case on this rank, ready to run. They tell how much communication of `axis` is hidden."""

    mesh: Mesh
    job: JobSpec
    pairs: Program
    axis: str = "tp"

    def __post_init__(self) -> None:
        self.mesh.ledger.ranks_per_node = 1  # each behind a link of its own
        self.split = split_pairs(self.pairs)
        for program in (self.pairs, self.split):
            assert program_faults(program) == []
        self.replica = build(self.job, self.mesh)
        self.executor = Observed(dict(self.replica.stages), self.replica.shards, self.mesh, self.axis)
        generator = torch.Generator().manual_seed(self.job.run.seed + self.mesh.dp.index)
        shape_BS = (self.job.batch.global_batch_size, self.job.model.sequence + 1)
        tokens_BS = torch.randint(self.job.model.vocab, shape_BS, generator=generator)
        self.tokens = microbatches(tokens_BS, self.job.plan.microbatch_size)
        self.processor_s: list[float] = []
        self.mine = [a for a in self.pairs.ranks[self.mesh.pp.index] if a.kind is Kind.OVERLAP]

    def step(self, program: Program, noted: list[dict[Action, Spent]]) -> list[Tensor]:
        """Forward and backward of a batch; the losses, and in `noted` what it took."""
        for shards in self.replica.shards.values():
            shards.clear_gradients()
        self.executor.spent = {}
        self.mesh.ledger.clear()
        begin_s = time.process_time()
        losses = self.executor.run(bare(program), self.tokens, lambda _: None)  # no optimizer step here
        noted.append(self.executor.spent)
        self.processor_s.append(time.process_time() - begin_s)
        return [losses[i] for i in sorted(losses)]

    def outcome(self, program: Program) -> list[Tensor]:
        """All losses and gradients of this rank."""
        losses = [loss.clone() for loss in self.step(program, [])]
        stages = self.replica.stages.values()
        return losses + [p.gradient.clone() for stage in stages for p in placed_parameters(stage).values()]

    def wire_bytes(self) -> float:
        """The bytes that this rank's link carries in a step, headers of TCP and Ethernet included. After a step."""
        return HEADERS * sum(self.mesh.ledger.by_link().values())


def bare(program: Program) -> Program:
    """Without the reductions at the end of a step, which travel over the same links."""
    return replace(program, ranks=tuple(tuple(a for a in row if a.kind is not Kind.REDUCE) for row in program.ranks))


def compare(contest: Contest, megabits_per_s: float) -> list[str]:
    """Time one rate; the row of the table after its name."""
    shape(megabits_per_s)
    contest.processor_s.clear()
    dist.barrier()
    in_pairs: list[dict[Action, Spent]] = []
    in_turn: list[dict[Action, Spent]] = []
    ratio = alternate(
        lambda: contest.step(contest.pairs, in_pairs), lambda: contest.step(contest.split, in_turn),
        MOST_ROUNDS, MOST_S,
    )  # fmt: skip
    parts = [part for pair in contest.mine for part in pair.parts]
    per_pair = 1e3 / len(contest.mine)

    def ms(steps: list[dict[Action, Spent]], actions: list[Action], of: Callable[[Spent], float]) -> float:
        """A pair's, on average over a step: the median over the rounds."""
        return statistics.median(sum(of(step[a]) for a in actions) for step in steps[WARMUP:]) * per_pair

    num_forwards = len(contest.replica.stages) * len(contest.tokens)
    bytes_of_pair = contest.wire_bytes() / num_forwards
    here = torch.tensor([
        statistics.median(contest.processor_s) * 1e3 / num_forwards,
        bytes_of_pair * 8e-3 / megabits_per_s,
        ms(in_turn, parts, Spent.without_stages), ms(in_pairs, contest.mine, Spent.without_stages),
        ms(in_turn, parts, lambda s: s.exposed_s), ms(in_pairs, contest.mine, lambda s: s.exposed_s),
    ])  # fmt: skip
    dist.all_reduce(here)
    figures = (here / dist.get_world_size()).tolist()
    processor, wire, turn, side, exposed, _ = figures
    least = max(processor * dist.get_world_size() / min(len(CORES), dist.get_world_size()), wire)
    simulated = [simulated_ratio(contest, in_turn, megabits_per_s, pair) for pair in (1.0, least / turn)]
    return [
        *ratio.cells(), *[f"{figure:.0f}" for figure in figures],
        f"{(turn - side) / exposed:.0%}", f"{min(1.0, (turn - least) / exposed):.0%}", *[f"{r:.2f}" for r in simulated],
    ]  # fmt: skip


def simulated_ratio(contest: Contest, steps: list[dict[Action, Spent]], megabits_per_s: float, pair: float) -> float:
    """The ratio that the simulator gives for the two programs, from the seconds that each part takes in turn."""
    took: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for step in steps[WARMUP:]:
        for action, spent in step.items():
            took[action.kind, action.stage].append(spent.without_stages())
    everywhere: list[dict[tuple[Kind, int], list[float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, dict(took))
    medians = {key: statistics.median(seconds) for rank in everywhere for key, seconds in rank.items()}
    stages = range(contest.pairs.num_stages)
    deferred = statistics.median([s for (kind, _), s in medians.items() if kind is Kind.WEIGHT_GRAD] or [0.0])
    stage = next(iter(contest.replica.stages.values()))
    message_bytes = HEADERS * stage.empty_hidden(len(contest.tokens[0])).nbytes
    costs = Costs(
        forward=tuple(medians[Kind.FORWARD, s] for s in stages),
        input_grad=tuple(medians[Kind.BACKWARD, s] - deferred for s in stages),
        weight_grad=(deferred,) * len(stages),
        transfer=(message_bytes * 8e-6 / megabits_per_s,) * len(stages),
        pair=pair,
    )
    return play(contest.pairs, costs).makespan / play(contest.split, costs).makespan


def benchmark(mesh: Mesh, job: JobSpec, name: str) -> None:
    """All rates of a case on this rank."""
    if name == "chain":  # a plan has no such program: its own mesh, with a communicator for each pass
        mesh = make_mesh(MeshNeeds(job.plan, side_by_side=True), mesh.rank, mesh.device, 60.0, mesh.watch)
    contest = Contest(mesh, job, chain(MICROBATCHES) if name == "chain" else job_program(job))
    for own, reference in zip(contest.outcome(contest.pairs), contest.outcome(contest.split), strict=True):
        assert torch.equal(own, reference), "side by side gives other bits than in turn"
    for rate in RATES[name]:
        print_row([f"{name}, {rate:.0f}", *compare(contest, rate)])


def enter(rank: int, of: Links) -> None:
    """Take this rank's link and core, before anything of it runs."""
    os.sched_setaffinity(0, {CORES[rank % len(CORES)]})
    of.enter(rank)


def print_table(jobs: Mapping[str, dict[str, Any]], global_batch_size: int, measure: Callable[..., None]) -> None:
    """The table of the jobs that the command line names, or of all; `measure` prints the rows of one of them."""
    print("| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER), sep="\n", flush=True)
    try:
        for name in sys.argv[1:] or jobs:
            job = jobs[name] | {"batch": {"global_batch_size": global_batch_size}}
            world = 4 if name == "dualpipev" else 2
            with links(world) as made:
                run_ranks(partial(measure, name=name), job, world, partial(enter, of=made))
    except NoLinksError as error:
        sys.exit(f"{Path(sys.argv[0]).name} can't shape links here: {error}")


if __name__ == "__main__":
    print_table(JOBS, MICROBATCHES * MICROBATCH_SIZE, benchmark)
