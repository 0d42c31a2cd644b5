"""The training run of one rank, from its first line to its last. Every rank calls `train`; rank 0 speaks."""

import time
from pathlib import Path

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.collectives import barrier
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.health.step_judge import Course
from shardwright.train.run_lines import RunResult, conclude
from shardwright.train.text_generation import sample_text
from shardwright.train.training_run import RunStart, TrainingRun
from shardwright.train.warm_up import warm_up


def train(job: JobSpec, mesh: Mesh, folder: Path, start: RunStart | None = None) -> RunResult:
    """Train to the end of the job, from the newest whole checkpoint of its folder on."""
    start_s = time.perf_counter()
    run = TrainingRun(job, mesh, folder, start or RunStart())
    warm_up(job, mesh, run.replica.program, lambda line: run.tell([line]))
    with run.batches:
        is_done = train_steps(run)
    if is_done:
        run.refuse_no_numbers()
    sample = sample_text(run.replica) if is_done else ""
    barrier(mesh.world)
    result = RunResult(
        steps=run.done,
        first_loss=run.losses[0] if run.losses else None,
        last_loss=run.losses[-1] if run.losses else None,
        validation_losses=run.held_out.losses,
        unigram_losses=run.held_out.baselines() if mesh.rank == 0 and is_done else {},
        sample=sample,
        folder=str(folder),
        seconds=time.perf_counter() - start_s,
        preempted=not is_done,
        measured=run.recorder.measured(),
        performed={mesh.pp.index: run.performed} if mesh.is_first_replica and run.performed else {},
    )
    if run.log is not None:
        run.tell([run.health.conclusion()])
        conclude(result, run.log, keeps=job.checkpoint.is_on)
        run.log.close()
    return result


def train_steps(run: TrainingRun) -> bool:
    """The loop: train until the job is done, or until the run is asked to leave. Returns True if the job is done.

    One pass is one span of steps, up to the next moment at which the pipeline drains. That is one step, unless the
    schedule keeps the pipeline full between steps.
    """
    is_asked_to_leave = False
    while run.done < run.job.optimizer.steps and not is_asked_to_leave:
        span = run.train_span()  # forward, backward and update of its steps
        if span.decision.course is Course.STOP:
            run.stop(span)
        if span.decision.course is Course.REWIND:
            run.rewind(span)
            continue
        run.count(span)
        run.read_measurements_if_due()
        run.health.compare_replicas(run.done)
        run.measure_memory_once(span)
        run.evaluate_if_due()
        is_asked_to_leave = run.save_if_due()
    is_done = run.done >= run.job.optimizer.steps
    if is_done:
        run.finish_saving()
    return is_done
