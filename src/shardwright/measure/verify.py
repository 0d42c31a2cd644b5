"""The check that a plan computes what one rank would compute: run both on the same data, and compare everything."""

import math
from functools import partial
from pathlib import Path

from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.progress_records import tell_part
from shardwright.config.units import counted_phrase
from shardwright.measure.machine_memory import refuse_small_machine
from shardwright.measure.record_files import read_record, write_record
from shardwright.measure.rounding import MOVES, moved_weights
from shardwright.measure.verdict import Record, Verdict, compare
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.sharding.groups import loses_gradients
from shardwright.train.build import build
from shardwright.train.checkpoint.starting_weights import initial_values, released_weights_of, take_correction_biases
from shardwright.train.data.batch_reader import my_share
from shardwright.train.data.prepare import prepare_tokens
from shardwright.train.data.progress import tell_aside
from shardwright.train.launch.full_disk import telling_of_full_disk
from shardwright.train.launch.launch import launch
from shardwright.train.launch.scratch_folder import scratch_folder
from shardwright.train.launch.this_machine import on_this_machine
from shardwright.train.train_step import StepResult, evaluate, refuse_asynchronous, train_step


def record_steps(num_steps: int, data_folder: Path, moved_by: int, job: JobSpec, mesh: Mesh, folder: Path) -> None:
    """Do the job's first steps on this rank, evaluate the next batch, and write a Record to `folder`.

    If `moved_by` is not 0, the weights are moved by a rounding; it is the number of the move.
    """
    samples = prepare_tokens(job.data, job.model, job.run.seed, data_folder).train_samples()
    released = released_weights_of(job)
    initial = initial_values(job, released)
    replica = build(job, mesh, moved_weights(job, initial, moved_by) if moved_by else initial)
    take_correction_biases(replica.stages, released)

    def batch(step: int) -> Tensor:
        return my_share(samples, job.batch.samples_before(step), job.at_step(step), mesh)

    steps = list[StepResult]()
    for step in range(num_steps):
        left_out = sum(result.skipped for result in steps)
        steps.append(train_step(replica, step, batch(step), left_out=left_out))
    with replica.gathered():
        parameters = [p for stage in replica.stages.values() for p in placed_parameters(stage).values()]
        # Copies, because a view would be saved with the whole buffer that it lies in.
        boxes = [(p.place, p.box_values()) for p in parameters]
    following = my_share(samples, job.batch.samples_before(num_steps), job, mesh)
    record = Record(steps, boxes, evaluate(replica, following))
    with telling_of_full_disk(folder / "record", way_out=say("name another folder in TMPDIR")):
        write_record(record, folder, mesh.rank)


def verify(job: JobSpec, num_steps: int, tolerance: float) -> tuple[Verdict, list[Verdict]]:
    """Run the job's first steps under its plan and on one rank, with one thread per rank, and compare.

    Every parameter of every rank is compared, copies included. If a difference exceeds the tolerance, one rank runs
    again from weights that are moved by a rounding: the second result has the difference of each of these runs from the
    first run on one rank. Raises PlanError and RunError as `launch` does.
    """
    refuse_asynchronous(job, "verify")
    job = on_this_machine(job, job.plan.world, tell_aside)  # the one rank runs on the same device as those of the plan
    refuse_small_machine(job)
    with scratch_folder() as scratch:
        data_folder = scratch / "data"
        prepare_tokens(job.data, job.model, job.run.seed, data_folder)  # errors in the data show here

        def run(run_job: JobSpec, name: str, moved_by: int = 0) -> list[Record]:
            launch(partial(record_steps, num_steps, data_folder, moved_by), run_job, scratch / name, num_threads=1)
            return [read_record(scratch / name, rank) for rank in range(run_job.plan.world)]

        tell_part(say("running on {ranks}", ranks=counted_phrase(job.plan.world, "rank")), 0, 2)
        ranks = run(job, "plan")
        tell_part(say("running on one"), 1, 2)
        (reference,) = run(job.as_one_rank(), "one")
        verdict = compare(ranks, reference)
        if verdict.within(tolerance) or math.inf in verdict.differences or loses_gradients(job.plan):
            return verdict, []
        tell_part(say("running on one from weights moved by a rounding"), 1, 2)
        return verdict, [compare(run(job.as_one_rank(), f"moved{number}", number), reference) for number in MOVES]
