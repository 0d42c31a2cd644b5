"""The health checks of a run, in one object per rank that the training loop calls.

In the loop, for a span of steps from `first` on, counted from 0:

    health.before_span(...)                  computes a step in advance, if it is to be computed twice
    with health.recording(first, num_steps): the span itself, in which every step asks `health.judge`
    health.after_span(...)                   the decision on the span, and lines for the user
    health.check_stragglers(...)             once the times of spans are read, lines about slow ranks
    health.compare_replicas(...)             before a checkpoint of the state is written
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.phrase import each, say
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.units import counted_phrase
from shardwright.parallel.comm.collectives import all_gather
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.precision.fixed_order import in_fixed_order
from shardwright.train.build import Replica
from shardwright.train.checkpoint.manifest import HEALTHY, StateHealth
from shardwright.train.health.first_not_finite import weights_not_finite, where_not_finite
from shardwright.train.health.gpu_readings import GpuReading, open_readings
from shardwright.train.health.profiled_steps import ProfiledSteps
from shardwright.train.health.repeated_step import GradientHashes, RepeatedStep, observed_gradients
from shardwright.train.health.replica_hashes import ReplicaComparison
from shardwright.train.health.step_judge import Course, Decision, StepJudge
from shardwright.train.health.stragglers import Stragglers
from shardwright.train.train_step import StepResult


class RunHealth:
    """Checks the health of a run on one rank. Every rank has one, and all call the same methods at the same steps."""

    def __init__(self, replica: Replica, folder: Path, first_step: int = 1) -> None:
        """`first_step`, counted from 1, is the first step of this part of the run."""
        self._replica, self._job, self._mesh = replica, replica.job, replica.mesh
        job, mesh = self._job, self._mesh
        drains = SCHEDULES[job.plan.schedule].drains
        self.judge = StepJudge(job.health, job.optimizer.learning_rate, job.precision.scales_loss, can_skip=drains)
        self._drains = drains
        self._profiled = ProfiledSteps(job, mesh.rank, mesh.device, folder)
        self._replicas = ReplicaComparison(job)
        self._repeated = RepeatedStep(job.health.repeat_every)
        self._hashes: GradientHashes | None = None
        self._stragglers = Stragglers(job.health.slow_share, _peers(job, mesh))
        self._compute_s: list[float] = []  # seconds per step, for each span since the last progress line
        self._first_unchecked = first_step  # the first step that `_stragglers` has not seen
        self._step_health = HEALTHY  # of the last step that had a target
        self._gpus, self.startup_message = open_readings(mesh.device) if mesh.rank == 0 else (None, "")

    def before_span(self, first: int, tokens_BS: Tensor | None) -> None:
        """Compute the step `first` in advance, if it is to be computed twice. Call it before the ledger of the span is
        cleared and its time begins. `tokens_BS` are the samples of this rank's replica in the step, needed if
        `repeats(first)`."""
        self._hashes = None
        if self.repeats(first):
            assert tokens_BS is not None, "a step can't be repeated without its samples"
            self._repeated.compute_first_pass(self._replica, first, tokens_BS)
            self._hashes = GradientHashes()

    def repeats(self, step: int) -> bool:
        """True if a step, counted from 0, is computed twice."""
        return self._repeated.is_due(step)

    @contextmanager
    def recording(self, first: int, num_steps: int) -> Iterator[None]:
        """A context for a span: it is profiled if chosen, and its gradients are hashed if the step is repeated."""
        with self._profiled.recording(first + 1, num_steps):
            if self._hashes is None:
                yield
            else:
                with observed_gradients(self._replica, self._hashes), in_fixed_order(self._mesh.device):
                    yield

    def after_span(self, first: int, results: list[StepResult], tokens_BS: Tensor | None) -> tuple[Decision, list[str]]:
        """The decision on a span, and lines that rank 0 prints first.

        Call it after the blocked time of the span is taken from the ledger. `tokens_BS` are the samples of the span's
        only step, None if it had several. If the course is SKIP, the update was left out already. If it is REWIND, load
        the last checkpoint and call `judge.rewound(decision.step)`. If it is STOP, raise a RunError with the sentence
        of the decision. Moves small collectives over the world if a step was not finite, or repeated.
        """
        mesh, num_steps = self._mesh, len(results)
        decision, lines = self._decide(first, results)
        if decision.cause == "not finite" and tokens_BS is not None and self._drains:
            origin = where_not_finite(self._replica, first, tokens_BS)
            if decision.course is Course.SKIP:
                lines.append(origin)
            else:
                decision = replace(decision, sentence=each([decision.sentence, origin]))
        elif not self._drains:
            decision = self._check_weights(first + num_steps - 1, decision)
        elif self._hashes is not None and ran_compute(results, self._drains):
            difference = self._repeated.compare(first, mesh, self._hashes)
            lines += [difference] if difference else []
        return decision, lines

    def check_stragglers(self, steps_done: int, compute_s: Sequence[float]) -> list[str]:
        """Sentences about slow ranks, at progress lines. `compute_s` are the seconds per step in which this rank was
        not blocked, of each span that was measured since the last call. Moves an all-gather of one number per rank at
        progress lines."""
        self._compute_s += compute_s
        if not self.is_log_step(steps_done):
            return []
        mesh = self._mesh
        own_s = median(self._compute_s) if self._compute_s else None  # None if no step had a target
        first, self._first_unchecked, self._compute_s = self._first_unchecked, steps_done + 1, []
        if mesh.world.size < 2 or self._job.health.slow_share == 0 or own_s is None:
            return []
        own_tensor = torch.tensor([own_s], dtype=torch.float64, device=mesh.device)
        seconds = mesh.numbers_or_ones(all_gather(own_tensor, mesh.world))
        return [slow.sentence(self._describe(slow.rank)) for slow in self._stragglers.look(first, seconds)]

    def _decide(self, first: int, results: list[StepResult]) -> tuple[Decision, list[str]]:
        """The decision on the steps of a span, from their losses and gradient norms, and sentences about them."""
        lines, decision = list[str](), Decision()
        for step, result in enumerate(results, first):
            if result.loss is None:
                self.judge.had_no_target()
                continue
            step_decision = result.decision if self._drains else self.judge(step, result.loss, result.grad_norm)
            loss_scale = self._replica.loss_scale
            can_fall = loss_scale is not None and loss_scale.can_fall
            self._step_health = step_health(step + 1, result, step_decision, can_fall) or self._step_health
            if step_decision.course in (Course.REWIND, Course.STOP):
                return replace(step_decision, step=step), lines
            lines += [step_decision.sentence] if step_decision.sentence else []
            decision = step_decision if step_decision.course is Course.SKIP else decision
        return decision, lines

    def _check_weights(self, last: int, decision: Decision) -> Decision:
        """The decision on a span up to step `last`, if its weights were updated before its losses were known: weights
        that are not finite must not get into a checkpoint. Moves an all-gather of one number per rank."""
        bad_weights = weights_not_finite(self._replica)
        if bad_weights and decision.course is Course.GO_ON:
            decision = self.judge.weights_not_finite(last)
        return replace(decision, sentence=each([decision.sentence, bad_weights])) if bad_weights else decision

    def compare_replicas(self, steps_done: int, before_save: bool = False) -> None:
        """Compare the state that is replicated across ranks, if a comparison is due. Raises ReplicasDifferError on all
        ranks if the state differs. Moves an all-gather of 5 numbers per rank if one is due, else nothing.

        A comparison is also due before a save, because each replica writes a part of the state: the checkpoint would
        hide a difference, and a wrong part would reach every rank that loads it."""
        if self._replicas.is_due(steps_done, before_save):
            self._replicas.compare(self._replica, steps_done)

    def restore_state_health(self, health: StateHealth) -> None:
        """Take over the health of the state that the run resumes from."""
        self._step_health = health

    def state_health(self, steps_done: int, held_out_loss: float | None) -> StateHealth:
        """The health of the state after the steps so far, the same on every rank. `held_out_loss` is its loss on
        held-out text, None if not measured. Moves an all-gather of one number per rank."""
        return state_health(steps_done, self._step_health, weights_not_finite(self._replica), held_out_loss)

    def gpus(self, steps_done: int) -> list[GpuReading]:
        """Readings of the GPUs of rank 0's node, on rank 0 at progress lines; else an empty list."""
        return self._gpus.read() if self._gpus is not None and self.is_log_step(steps_done) else []

    def conclusion(self) -> str:
        """The events of the run in one sentence; "" if there were none."""
        parts = self.judge.counts.sentences()
        if self._replicas.num_compared:
            parts.append(
                say("replicas compared {times}, all alike", times=counted_phrase(self._replicas.num_compared, "time"))
            )
        if self._repeated.num_repeated:
            parts.append(
                say(
                    "{steps} computed twice, {count} differed",
                    steps=counted_phrase(self._repeated.num_repeated, "step"),
                    count=self._repeated.num_different or say("none"),
                )
            )
        if self._stragglers.reported:
            ranks = ", ".join(str(rank) for rank in sorted(self._stragglers.reported)[:8])
            parts.append(
                say(
                    "{count} slow at times ({ranks})",
                    count=counted_phrase(len(self._stragglers.reported), "rank"),
                    ranks=ranks,
                )
            )
        return say("health: {parts}", parts=tuple(parts)) if parts else ""

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, the same on every rank."""
        return {"judge": self.judge.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        self.judge.load_state_dict(state["judge"])

    def is_log_step(self, steps_done: int) -> bool:
        """True if the last of these steps has a progress line."""
        return steps_done % self._job.run.log_every == 0 or steps_done == self._job.optimizer.steps

    def _describe(self, rank: int) -> str:
        ranks_per_node = self._mesh.ledger.ranks_per_node
        name = self._mesh.shape.describe(rank)
        return say("{rank} on node {node}", rank=name, node=rank // ranks_per_node) if ranks_per_node else name


def ran_compute(results: list[StepResult], drains: bool) -> bool:
    """True if ranks computed anything in a span. If the pipeline drains, they skip a step without a target."""
    return not drains or any(result.loss is not None for result in results)


def _peers(job: JobSpec, mesh: Mesh) -> list[list[int]]:
    """The ranks of each pipeline rank, in lists: the ranks of one list do the same work."""
    peers_of_pp_rank: dict[int, list[int]] = {}
    for rank in range(job.plan.world):
        peers_of_pp_rank.setdefault(mesh.shape.coordinates(rank)["pp"], []).append(rank)
    return list(peers_of_pp_rank.values())


def step_health(step: int, result: StepResult, decision: Decision, scale_can_fall: bool) -> StateHealth | None:
    """The health of a step, counted from 1, after the decision on it; None if no token of it has a loss. A step is
    healthy if its loss and its gradients are finite, and the loss is not above its band. While `scale_can_fall`, an
    overflow of fp16 gradients is healthy: it is how the loss scale is adjusted."""
    if result.loss is None:
        return None
    if not math.isfinite(result.loss):
        return _not_finite(say("the loss is {loss} in step {step}", loss=result.loss, step=step))
    if decision.cause == "not finite":
        return _not_finite(say("the gradient of step {step} is not finite", step=step))
    if decision.cause == "overflow" and not scale_can_fall:
        return _not_finite(say("gradients of step {step} overflow at the least loss scale", step=step))
    if decision.cause == "spike":
        return StateHealth(
            cause="spike",
            sentence=say("the loss of step {step}, {loss:.4f}, is above its band", step=step, loss=result.loss),
        )
    return HEALTHY


def state_health(step: int, of_step: StateHealth, weights: str, held_out_loss: float | None) -> StateHealth:
    """The health of the state after a step, for the manifest of its checkpoint: besides the step, its weights and their
    loss on held-out text must be finite. `weights` is a sentence about weights that are not, "" if all are;
    `held_out_loss` is None if not measured."""
    if of_step.cause == "not finite":
        return of_step
    if weights:
        return _not_finite(say("{weights} after step {step}", weights=weights, step=step))
    if held_out_loss is not None and not math.isfinite(held_out_loss):
        return _not_finite(
            say("the held-out loss is {held_out_loss} after step {step}", held_out_loss=held_out_loss, step=step)
        )
    return of_step


def _not_finite(sentence: str) -> StateHealth:
    return StateHealth(cause="not finite", sentence=sentence)
