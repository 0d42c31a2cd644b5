"""A bad step inside a run of `train`: what each policy makes of it, on every axis, to the run's end and over a restart.

The fault is put in from outside: a gradient of one rank is no number, or the loss of all is far too high. On ranks that
were forked once, one after the other: a run that stops, one that skips, one that goes back, is killed and goes on, and
one without a fault that sees the samples of that one in their order, whose state must be the same bit for bit.
"""

import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from health.watched import heal, spoil_gradients
from shardwright.config.base import RunError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train import async_step, span, train_step
from shardwright.train.build import Replica
from shardwright.train.checkpoint.kept import manifest_of, steps_kept
from shardwright.train.checkpoint.saved_state import SavedState
from shardwright.train.checkpoint.storage import open_storage
from shardwright.train.metrics import MetricsLog
from shardwright.train.run_lines import RunResult
from shardwright.train.trainer import train
from shardwright.train.training_run import RunStart, TrainingRun
from support.cases import small_job
from support.ranks import run_on_mesh

pytestmark = pytest.mark.processes

BATCH, BAD_RANK = 2, 1
State = dict[str, torch.Tensor]


def job_on_text(folder: Path, kind: str = "llama", sections: dict[str, Any] | None = None, **plan: Any) -> JobSpec:
    """A small model that reads bytes, writes a checkpoint every two steps, and drains at every line."""
    text = folder / "text.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 40)
    fields = small_job(kind, batch=BATCH, **plan).model_dump(mode="json", exclude_unset=True)
    given: dict[str, Any] = {
        "model": {"vocab": 256},
        "data": {"path": str(text)},
        "optimizer": {"steps": 6},
        "run": {"eval_batches": 1, "log_every": 2, "sample_tokens": 0},
        "checkpoint": {"every_steps": 2, "keep_last": 9},
        "health": {"slow_share": 0},
    }
    for section, values in [*given.items(), *(sections or {}).items()]:
        fields[section] = fields.get(section, {}) | values
    return make_job(fields)


def with_fields(job: JobSpec, section: str, **fields: Any) -> JobSpec:
    """The job with other fields."""
    return job.model_copy(update={section: getattr(job, section).model_copy(update=fields)})


class KilledError(Exception):
    """Stands for the end of a process: nothing is told, and nothing tidied up."""


@dataclass
class Seen:
    """Records of a rank: spans with the first of their samples, lines, how the run ended, and its state at the end."""

    spans: list[tuple[int, int]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    states: dict[int, State] = field(default_factory=dict)  # before the span of a step
    end: str = ""
    result: RunResult | None = None
    state: State = field(default_factory=dict)


@dataclass(frozen=True)
class Plot:
    """Harms of a run: steps that are bad the first `times` that they come, by a gradient of one rank or by a spike
    of the loss; the step that it is killed before; and (step, number) for each step from which on samples are taken so
    many further behind."""

    bad: tuple[int, ...] = ()
    times: int = 99
    spike: bool = False
    killed_at: int = -1
    killed_after: int = 0  # spans at least, so that a step may be meant when it comes again
    spoils_weights: bool = False  # after the last update of the span, in place of a gradient
    moved: tuple[tuple[int, int], ...] = ()


def state_of(replica: Replica) -> State:
    """All that this rank would write."""
    return {f"{box.name} {box.box}": box.values.clone() for box in SavedState(replica, replica.mesh).held()}


@contextmanager
def faults(plot: Plot, seen: Seen) -> Iterator[None]:
    """While this lasts, spans go as the plot has it."""
    visits: Counter[int] = Counter()
    span_of, means_of = span.train_span, train_step.means_of
    is_high = [False]

    def watched(replica: Replica, start: span.SpanStart, *rest: Any) -> Any:
        first, num_steps = start.step, start.num_steps
        heal(replica)
        if first == plot.killed_at and len(seen.spans) >= plot.killed_after and "killed" not in seen.lines:
            seen.lines.append("killed")
            raise KilledError
        consumed = start.samples + sum(behind for step, behind in plot.moved if step <= first)
        seen.spans.append((first, consumed))
        seen.states[first] = state_of(replica)
        here = [step for step in plot.bad if first <= step < first + num_steps]
        visits.update(here)
        is_bad = any(visits[step] <= plot.times for step in here)
        is_mine = is_bad and not plot.spike and replica.mesh.rank == BAD_RANK
        if is_mine and not plot.spoils_weights:
            spoil_gradients(replica, 10**6)
        is_high[0] = is_bad and plot.spike
        results = span_of(replica, replace(start, samples=consumed), *rest)
        is_high[0] = False
        if is_mine and plot.spoils_weights:
            unit = next(iter(replica.shards.values())).units[0]
            unit.masters.memory(False)[0].view(-1)[0] = torch.nan
            unit.take_up()
        return results

    def losses_of(*args: Any) -> list[float]:
        return [loss * (10.0 if is_high[0] else 1.0) for loss in means_of(*args)]

    def told(log: MetricsLog, text: str) -> None:
        seen.lines.append(text)

    with (
        patch.object(span, "train_span", watched), patch.object(MetricsLog, "tell", told),
        patch.object(train_step, "means_of", losses_of), patch.object(async_step, "means_of", losses_of),
    ):  # fmt: skip
        yield


def run_of(mesh: Mesh, job: JobSpec, folder: Path, plot: Plot) -> Seen:
    """`train`, in which that happens; after a kill it is called again."""
    seen = Seen()
    runs: list[TrainingRun] = []
    begin = TrainingRun.__init__

    def begun(run: TrainingRun, *args: Any) -> None:
        begin(run, *args)
        runs.append(run)

    with faults(plot, seen), patch.object(TrainingRun, "__init__", begun):
        for _ in range(3):
            try:
                seen.result = train(job, mesh, folder, RunStart())
            except KilledError:
                assert runs[-1].writer is not None
                runs[-1].writer.wait()  # so that it is known which checkpoint is the last
                continue
            except RunError as error:
                seen.end = str(error)
            break
    seen.state = state_of(runs[-1].replica)
    assert not [thread for thread in threading.enumerate() if thread.name == "batches"]
    return seen


def all_of(mesh: Mesh, runs: Sequence[tuple[JobSpec, Path, Plot]]) -> list[Seen]:
    """One after the other, on the same ranks."""
    return [run_of(mesh, *run) for run in runs]


def same(one: State, other: State) -> bool:
    """True if two states are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def same_weights(one: State, other: State) -> bool:
    """The same of weights and moments: what compressed gradients lost goes on in a step that is left out."""
    of = ("weights.", "exp_avg")
    return same(*({name: values for name, values in state.items() if name.startswith(of)} for state in (one, other)))


def recorded_steps(folder: Path) -> list[int]:
    """The steps of metrics.jsonl, evaluations once each; and TensorBoard shows the same."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert sum("memory" in line for line in lines) == 1
    board = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    assert [event.step for event in board.Scalars("loss")] == steps
    evaluated = [line["step"] for line in lines if "validation_loss" in line]
    assert [event.step for event in board.Scalars("validation_loss")] == evaluated == sorted(set(evaluated))
    drawn = {event.step: event.value for event in board.Scalars("loss")}
    assert drawn == pytest.approx({line["step"]: line["loss"] for line in lines if "loss" in line})
    return steps


def places_of(folder: Path) -> dict[int, tuple[int, int]]:
    """(samples, passed over) of each checkpoint, by step."""
    storage = open_storage(str(folder / "checkpoints"))
    manifests = [manifest_of(storage, step) for step in steps_kept(storage)]
    return {manifest.step: (manifest.samples, manifest.passed_over) for manifest in manifests}


def unhealthy(folder: Path) -> dict[int, str]:
    """Why each checkpoint that is not healthy is not, by step."""
    storage = open_storage(str(folder / "checkpoints"))
    answer = {step: manifest_of(storage, step).health for step in steps_kept(storage)}
    return {step: health.sentence for step, health in answer.items() if not health.is_healthy}


AXES: dict[str, tuple[str, dict[str, Any]]] = {
    "dp zero 3": ("llama", {"dp": 2, "zero": 3}),
    "tp": ("llama", {"tp": 2, "sequence_parallel": True}),
    "pp": ("llama-tied", {"pp": 2}),
    "ep": ("deepseek", {"dp": 2, "ep": 2}),
    "top-k": ("llama", {"dp": 2, "compress": "topk", "compress_share": 0.1, "compress_least": 1}),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("axis", AXES)
def test_a_gradient_that_is_no_number(axis: str, tmp_path: Path) -> None:
    kind, plan = AXES[axis]
    job = job_on_text(tmp_path, kind, **plan)
    policies = {name: with_fields(job, "health", not_finite=name) for name in ("stop", "skip", "rewind")}
    # Steps 2 and 3 come again with the samples behind the 16 that were seen; the run is killed before step 5.
    runs = [
        (policies["stop"], tmp_path / "stop", Plot(bad=(3,))),
        (policies["skip"], tmp_path / "skip", Plot(bad=(3,))),
        (policies["rewind"], tmp_path / "rewind", Plot(bad=(3,), times=1, killed_at=5)),
        (job, tmp_path / "straight", Plot(moved=((2, 2 * BATCH),))),
        (policies["rewind"], tmp_path / "again", Plot(bad=(3,))),
        (policies["rewind"], tmp_path / "too early", Plot(bad=(1,))),
    ]
    ranks = run_on_mesh(job, all_of, runs)
    for stop, skip, rewind, straight, again, early in ranks:
        for run in (stop, early):
            assert "(gradient norm nan)" in run.end and (axis in ("top-k", "PowerSGD") or " on rank 1 (" in run.end)
        assert "the loss is " in stop.end and " in step 4 (" in stop.end
        assert same_weights(stop.state, stop.states[3])
        assert same_weights(skip.states[4], skip.states[3])
        assert not same_weights(skip.states[5], skip.states[4])
        assert all(bool(values.isfinite().all()) for values in skip.state.values())
        assert [samples for _, samples in skip.spans] == [BATCH * step for step in range(6)]
        batches = [(0, 0), (1, 1), (2, 2), (3, 3), (2, 4), (3, 5), (4, 6), (4, 6), (5, 7)]
        assert rewind.spans == [(step, BATCH * i) for step, i in batches]
        assert straight.spans == [(step, BATCH * i) for step, i in enumerate([0, 1, 4, 5, 6, 7])]
        assert same(rewind.state, straight.state)
        assert again.spans == [(step, BATCH * i) for i, step in enumerate([0, 1, 2, 3, 2, 3, 4, 5])]
        assert same_weights(again.states[4], again.states[3])  # the step that is bad again is left out
        assert "; there is no healthy checkpoint to go back to: save more often" in early.end
    stop, skip, rewind, _, again, _ = ranks[0]
    assert any("; its update is left out" in line for line in skip.lines)
    assert "health: 1 step not finite (1 left out)" in skip.lines
    assert any(line.endswith("going on after step 2, with the data behind these steps") for line in rewind.lines)
    assert "health: 1 step not finite (0 left out), 1 rewind" in rewind.lines
    assert "health: 2 steps not finite (1 left out), 1 rewind" in again.lines
    for name in ("skip", "rewind", "again"):
        assert recorded_steps(tmp_path / name) == [1, 2, 3, 4, 5, 6]
    later = {step: (BATCH * (step + 2), 2 * BATCH) for step in (4, 6)}
    assert places_of(tmp_path / "rewind") == places_of(tmp_path / "again") == {2: (2 * BATCH, 0)} | later
    assert places_of(tmp_path / "skip") == {step: (BATCH * step, 0) for step in (2, 4, 6)}
    # The step before the checkpoint of step 4 was bad, and left out: whoever goes on takes the one before.
    assert unhealthy(tmp_path / "skip") == unhealthy(tmp_path / "again") == {4: "the gradient of step 4 is not finite"}
    assert unhealthy(tmp_path / "rewind") == {}
    assert stop.end.endswith(f"{tmp_path}/stop/checkpoints/step-00000002, and the same command goes on from it")


def test_one_bad_step_after_the_other(tmp_path: Path) -> None:
    """Each has its rewind. The second goes back to a checkpoint that was written after the first."""
    job = with_fields(job_on_text(tmp_path, dp=2), "health", not_finite="rewind")
    for run in run_on_mesh(job, run_of, job, tmp_path, Plot(bad=(3, 4), times=1)):
        batches = [(0, 0), (1, 1), (2, 2), (3, 3), (2, 4), (3, 5), (4, 6), (4, 7), (5, 8)]
        assert run.spans == [(step, BATCH * i) for step, i in batches]
    assert places_of(tmp_path) == {2: (2 * BATCH, 0), 4: (6 * BATCH, 2 * BATCH), 6: (9 * BATCH, 3 * BATCH)}
    assert recorded_steps(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_killed_after_a_rewind_and_before_the_next_checkpoint(tmp_path: Path) -> None:
    """The rewind is forgotten, so the bad samples come once more, and it is made anew."""
    job = with_fields(job_on_text(tmp_path, dp=2), "health", not_finite="rewind")
    runs = [
        (job, tmp_path / "killed", Plot(bad=(3,), times=2, killed_at=3, killed_after=5)),
        (job, tmp_path / "straight", Plot(moved=((2, 2 * BATCH),))),
    ]
    for killed, straight in run_on_mesh(job, all_of, runs):
        batches = [(0, 0), (1, 1), (2, 2), (3, 3), (2, 4), (2, 2), (3, 3), (2, 4), (3, 5), (4, 6), (5, 7)]
        assert killed.spans == [(step, BATCH * i) for step, i in batches]
        assert same(killed.state, straight.state)
    assert places_of(tmp_path / "killed")[6] == (8 * BATCH, 2 * BATCH)
    assert recorded_steps(tmp_path / "killed") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_where_the_update_was_made_already(schedule: str, tmp_path: Path) -> None:
    """The pipeline drains every two steps. Weights that are no numbers are found before a checkpoint has them."""
    job = job_on_text(tmp_path, pp=2, schedule=schedule, sections={"optimizer": {"clip_grad_norm": 0.0, "steps": 6}})
    rewind = with_fields(job, "health", not_finite="rewind")
    runs = [
        (job, tmp_path / "stop", Plot(bad=(2,))),
        (rewind, tmp_path / "rewind", Plot(bad=(2,), times=1)),
        (rewind, tmp_path / "weights", Plot(bad=(2,), times=1, spoils_weights=True)),
        (job, tmp_path / "straight", Plot(moved=((2, 2 * BATCH),))),
        (rewind, tmp_path / "again", Plot(bad=(2,), spoils_weights=True)),
    ]
    ranks = run_on_mesh(job, all_of, runs)
    for stop, gradient, weights, straight, again in ranks:
        assert "the loss is nan in step " in stop.end or "weights are not finite after step 4" in stop.end
        assert "weights of rank 0 (pp 0, dp 0, tp 0)" in stop.end or "weights of rank 1 (pp 1, dp 0, tp 0)" in stop.end
        for run in (gradient, weights):
            assert run.spans == [(0, 0), (2, 2 * BATCH), (2, 4 * BATCH), (4, 6 * BATCH)]
            assert same(run.state, straight.state)
        assert again.end.startswith("weights are not finite after step 4, whose loss was, as before the rewind; ")
        assert "weights of rank 1 (pp 1, dp 0, tp 0) are not finite; the last healthy checkpoint is " in again.end
    for name in ("rewind", "weights"):
        assert recorded_steps(tmp_path / name) == [1, 2, 3, 4, 5, 6]
        assert places_of(tmp_path / name)[6] == (8 * BATCH, 2 * BATCH)
    assert sorted(places_of(tmp_path / "again")) == sorted(places_of(tmp_path / "stop")) == [2]


SPIKES = {
    "dp": {"dp": 2},
    "dp zero 3": {"dp": 2, "zero": 3},
    "pp": {"pp": 2},
    "tp": {"tp": 2},
    "pipedream": {"pp": 2, "schedule": "pipedream"},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("axis", SPIKES)
def test_a_spike_of_the_loss(axis: str, tmp_path: Path) -> None:
    """There is a verdict from the ninth loss on. Step 10 is bad, or the span of steps 9 and 10."""
    sections = {"optimizer": {"steps": 12, "clip_grad_norm": 0.0}, "health": {"slow_share": 0, "spike_window": 8}}
    job, drains = job_on_text(tmp_path, sections=sections, **SPIKES[axis]), axis != "pipedream"
    plots = {"tell": 99, "ignore": 99, "stop": 99, "rewind": 1} | ({"skip": 99} if drains else {})
    runs = [(with_fields(job, "health", spike=name), tmp_path / name, Plot((9,), n, True)) for name, n in plots.items()]
    runs.append((job, tmp_path / "straight", Plot(moved=((8, 2 * BATCH),))))
    answer = "a spike: the last ones have a median of "
    for rank, result in enumerate(run_on_mesh(job, all_of, runs)):
        of = dict(zip([*plots, "straight"], result, strict=True))
        first = "in step 10, " if drains else "in step 9, "
        assert first in of["stop"].end and answer in of["stop"].end
        assert same(of["tell"].state, of["ignore"].state)
        assert same(of["rewind"].state, of["straight"].state)
        if drains:
            assert same(of["skip"].states[10], of["skip"].states[9]) and same(of["stop"].state, of["stop"].states[9])
        for name, run in of.items() if rank == 0 else ():
            lines = [line for line in run.lines if answer in line]
            assert len(lines) == (
                0 if name in ("stop", "ignore", "straight") else 1 if drains or name == "rewind" else 2
            )
            assert name == "stop" or recorded_steps(tmp_path / name) == list(range(1, 13))
    assert places_of(tmp_path / "rewind")[12] == (14 * BATCH, 2 * BATCH)


def test_another_batch_neither_repeats_nor_leaves_out_samples(tmp_path: Path) -> None:
    """Batches of 4, 8 and 2 samples for two steps each; and one of 8 is bad, so that those behind are taken."""
    parts = [(4, 2, Plot()), (8, 4, Plot(bad=(3,), times=1)), (2, 6, Plot())]
    runs = [(resized(tmp_path, samples, steps), tmp_path, plot) for samples, steps, plot in parts]
    for results in run_on_mesh(runs[0][0], all_of, runs):
        first, second, third = (run.spans for run in results)
        assert first == [(0, 0), (1, 4)]
        assert second == [(2, 8), (3, 16), (2, 24), (3, 32)]
        assert third == [(4, 40), (5, 42)]
    assert places_of(tmp_path) == {2: (8, 0), 4: (40, 16), 6: (44, 16)}
    assert recorded_steps(tmp_path) == [1, 2, 3, 4, 5, 6]


def resized(folder: Path, samples: int, steps: int) -> JobSpec:
    """The job with another batch, up to a step."""
    sections = {"batch": {"global_batch_size": samples}, "optimizer": {"steps": steps}}
    return with_fields(job_on_text(folder, dp=2, sections=sections), "health", not_finite="rewind")
