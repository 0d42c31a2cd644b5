"""The health of a run, as its loop asks for it: one object for each rank.

In the loop, for a span of steps from `first` on, counted from 0:

    health.before_span(...)                  computes a step beforehand that is to be computed twice
    with health.recording(first, num_steps): the span itself, with `health.judge` asked in every step
    health.after_span(...)                   what is to be said, and how the run goes on
    health.compare_replicas(...)             before anything of that state is kept
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.units import counted
from shardwright.parallel.comm.collectives import all_gather
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.precision.fixed_order import in_fixed_order
from shardwright.train.build import Replica
from shardwright.train.checkpoint.manifest import HEALTHY, StateHealth
from shardwright.train.health.decision import Course, Decision
from shardwright.train.health.first_not_finite import weights_not_finite, where_not_finite
from shardwright.train.health.gpu_readings import GpuReading, open_readings
from shardwright.train.health.profiled_steps import ProfiledSteps
from shardwright.train.health.repeated_step import GradientHashes, RepeatedStep, looking
from shardwright.train.health.replica_hashes import ReplicaComparison
from shardwright.train.health.state_health import state_health, step_health
from shardwright.train.health.step_judge import StepJudge
from shardwright.train.health.stragglers import Stragglers
from shardwright.train.train_step import StepResult


class RunHealth:
    """Watches over one rank's run. All ranks make one and call the same methods at the same steps."""

    def __init__(self, job: JobSpec, mesh: Mesh, folder: Path, first_step: int = 1) -> None:
        """`first_step`, counted from 1, is the one that this part of the run begins with."""
        self._job, self._mesh = job, mesh
        drains = SCHEDULES[job.plan.schedule].drains
        self.judge = StepJudge(job.health, job.optimizer.learning_rate, job.precision.scales_loss, can_skip=drains)
        self._drains = drains
        self._profiled = ProfiledSteps(job, mesh.rank, mesh.device, folder)
        self._replicas = ReplicaComparison(job)
        self._repeated = RepeatedStep(job.health.repeat_every)
        self._hashes: GradientHashes | None = None
        self._stragglers = Stragglers(job.health.slow_share, _peers(job, mesh))
        self._compute_s: list[float] = []  # of each span since the last progress line
        self._first_looked = first_step
        self._of_step = HEALTHY  # of the last step that had a target
        self._gpus, self.opening = open_readings(mesh.device) if mesh.rank == 0 else (None, "")

    def before_span(self, replica: Replica, first: int, tokens_BS: Tensor | None) -> None:
        """Before the ledger of a span is cleared and its time begins, which this is no part of: compute the step first,
        if it is one of those that are computed twice. `tokens_BS` are the samples of this rank's replica in it; they
        are needed where `repeats(first)`."""
        self._hashes = None
        if self.repeats(first):
            assert tokens_BS is not None, "a step can't be repeated without its samples"
            self._repeated.before(self._job, replica, self._mesh, first, tokens_BS)
            self._hashes = GradientHashes()

    def repeats(self, step: int) -> bool:
        """True if a step, counted from 0, is computed twice."""
        return self._repeated.is_due(step)

    @contextmanager
    def recording(self, replica: Replica, first: int, num_steps: int) -> Iterator[None]:
        """Run a span inside of this: it is profiled, and its gradients are hashed, where they are to be."""
        with self._profiled.recording(first + 1, num_steps):
            if self._hashes is None:
                yield
            else:
                with looking(replica, self._hashes), in_fixed_order(self._mesh.device):
                    yield

    def after_span(
        self, replica: Replica, first: int, results: list[StepResult], span_s: float, tokens_BS: Tensor | None
    ) -> tuple[Decision, list[str]]:
        """How the run goes on after a span that took `span_s`, and what rank 0 is to say first.

        Call it once the ledger of the span was read and before it is cleared. `tokens_BS` are the samples of the span's
        only step, None where it had several. Where the course is SKIP, the update was left out already. Where it is
        REWIND, load the last checkpoint and call `judge.rewound(decision.step)`.
        STOP is a RunError with the sentence of the decision. Moves something over the world at progress lines, one
        number a rank, and where something was wrong or repeated.
        """
        mesh, num_steps = self._mesh, len(results)
        if was_computed(results, self._drains):
            self._compute_s.append((span_s - sum(mesh.ledger.blocked_s().values())) / num_steps)
        lines, decision = [], Decision()
        for step, result in enumerate(results, first):
            if result.loss is None:
                self.judge.had_no_target()
                continue
            told = result.decision if self._drains else self.judge(step, result.loss, result.grad_norm)
            can_fall = replica.loss_scale is not None and replica.loss_scale.can_fall
            self._of_step = step_health(step + 1, result, told, can_fall) or self._of_step
            lines += [told.sentence] if told.sentence and told.course in (Course.GO_ON, Course.SKIP) else []
            if told.course in (Course.REWIND, Course.STOP):
                decision = replace(told, step=step)
                break
            decision = told if told.course is Course.SKIP else decision
        if decision.cause == "not finite" and tokens_BS is not None and self._drains:
            where = where_not_finite(self._job, replica, mesh, first, tokens_BS)
            if decision.course is Course.SKIP:
                lines.append(where)
            else:
                decision = replace(decision, sentence=f"{decision.sentence}; {where}")
        elif not self._drains:
            decision = self._look_at_weights(replica, first + num_steps - 1, decision)
        elif self._hashes is not None and was_computed(results, self._drains):
            different = self._repeated.compare(first, mesh, self._hashes)
            lines += [different] if different else []
        if self._is_line(first + num_steps) and decision.course in (Course.GO_ON, Course.SKIP):
            lines += self._look_for_stragglers(first + num_steps)
        return decision, lines

    def _look_at_weights(self, replica: Replica, last: int, decision: Decision) -> Decision:
        """The decision on a span up to step `last`, whose updates were made before its losses were known: weights that
        are not finite must not be in a checkpoint. Moves an all-gather of a number a rank."""
        where = weights_not_finite(replica, self._mesh)
        if where and decision.course is Course.GO_ON:
            decision = self.judge.weights_not_finite(last)
        return replace(decision, sentence=f"{decision.sentence}; {where}") if where else decision

    def compare_replicas(self, replica: Replica, steps_done: int, is_saved: bool = False) -> None:
        """After the steps so far: ReplicasDifferError, on all ranks, where what ranks hold alike is not alike. Moves 5
        numbers a rank where a comparison is due, and else nothing. It is due, too, where the state is to be saved: each
        replica writes a part of it, so that what differs would be alike, and wrong, on all who load it."""
        if self._replicas.is_due(steps_done, is_saved):
            self._replicas.compare(replica, self._mesh, steps_done)

    def begin_with(self, health: StateHealth) -> None:
        """The run goes on from a state that is so healthy."""
        self._of_step = health

    def state_health(self, replica: Replica, steps_done: int, held_out: float | None) -> StateHealth:
        """How healthy the state after the steps so far is, the same on every rank. `held_out` is the loss that was
        measured with it, if one was. Moves an all-gather of a number a rank."""
        return state_health(steps_done, self._of_step, weights_not_finite(replica, self._mesh), held_out)

    def gpus(self, steps_done: int) -> list[GpuReading]:
        """Readings of the GPUs of rank 0's node, at progress lines and on rank 0; else none."""
        return self._gpus.read() if self._gpus is not None and self._is_line(steps_done) else []

    def conclusion(self) -> str:
        """The events of the run in one sentence; empty if there were none."""
        parts = self.judge.counts.sentences()
        if self._replicas.num_compared:
            parts.append(f"replicas compared {counted(self._replicas.num_compared, 'time')}, all alike")
        if self._repeated.num_repeated:
            parts.append(
                f"{counted(self._repeated.num_repeated, 'step')} computed twice, "
                f"{self._repeated.num_different or 'none'} differed"
            )
        if self._stragglers.told:
            ranks = ", ".join(str(rank) for rank in sorted(self._stragglers.told)[:8])
            parts.append(f"{counted(len(self._stragglers.told), 'rank')} slow at times ({ranks})")
        return f"health: {', '.join(parts)}" if parts else ""

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: the same on every rank."""
        return {"judge": self.judge.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.judge.load_state_dict(state["judge"])

    def _is_line(self, steps_done: int) -> bool:
        return steps_done % self._job.run.log_every == 0 or steps_done == self._job.optimizer.steps

    def _look_for_stragglers(self, steps_done: int) -> list[str]:
        """Sentences about slow ranks. Moves an all-gather of a number a rank."""
        mesh, mine_s = self._mesh, median(self._compute_s) if self._compute_s else None  # steps without a target
        first, self._first_looked, self._compute_s = self._first_looked, steps_done + 1, []
        if mesh.world.size < 2 or self._job.health.slow_share == 0 or mine_s is None:
            return []
        held = torch.tensor([mine_s], dtype=torch.float64, device=mesh.device)
        of_all = all_gather(held, mesh.world).tolist()
        return [slow.sentence(self._who(slow.rank)) for slow in self._stragglers.look(first, of_all)]

    def _who(self, rank: int) -> str:
        here = self._mesh.ledger.ranks_per_node
        return self._mesh.shape.describe(rank) + (f" on node {rank // here}" if here else "")


def was_computed(results: list[StepResult], drains: bool) -> bool:
    """True if ranks computed anything in a span: for a step without a target they do not, where the pipeline drains."""
    return not drains or any(result.loss is not None for result in results)


def _peers(job: JobSpec, mesh: Mesh) -> list[list[int]]:
    """Ranks by their place in the pipeline: those of one place do the same work."""
    found: dict[int, list[int]] = {}
    for rank in range(job.plan.world):
        found.setdefault(mesh.shape.coordinates(rank)["pp"], []).append(rank)
    return list(found.values())
