"""The host memory of a checkpoint's copies, against the copies that ranks of dry runs make."""

from typing import Any

import pytest

from shardwright.config.checkpoint import CheckpointSpec
from shardwright.config.job import JobSpec
from shardwright.config.load import load_job
from shardwright.measure.checks.recorded_streams import OperatorAccesses, RecordedStreams
from shardwright.memory.checkpoint_copies import copied_bytes, most_copied_bytes
from shardwright.memory.rank_state import rank_state, shard_indices
from shardwright.parallel.comm.transport import DryTransport
from shardwright.report.estimate_text import estimate_dict
from shardwright.schedule.job_program import job_program
from shardwright.sharding.mesh import MeshShape
from shardwright.train.checkpoint.saved_state import SavedState
from shardwright.train.dry_steps import DrySteps
from support.cases import small_job

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("llama", {}),
    "replicas": ("gpt", {"dp": 4, "zero": 0, "batch": 8}),
    "zero1": ("llama", {"dp": 2, "zero": 1}),
    "zero3": ("llama", {"dp": 2, "zero": 3, "batch": 8}),
    "hybrid": ("gpt", {"dp": 4, "zero": 3, "zero_ranks": 2, "batch": 8}),
    "offloaded": ("llama", {"dp": 2, "zero": 3, "offload_optimizer": 0.5, "offload_parameters": True, "batch": 8}),
    "tp": ("gpt", {"tp": 2, "sequence_parallel": True}),
    "tied": ("gpt-tied", {"pp": 2, "dp": 2, "zero": 1, "batch": 8}),
    "experts": ("mixtral", {"dp": 2, "ep": 2}),
    "int8": ("llama", {"dp": 2, "zero": 2, "compress": "int8"}),
    "powersgd": ("llama", {"dp": 2, "compress": "powersgd"}),
    "topk": ("llama", {"dp": 2, "compress": "topk"}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLANS)
def test_copies_take_what_is_predicted_to_within_rows(name: str) -> None:
    kind, fields = PLANS[name]
    job = small_job(kind, **fields)
    job = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"every_steps": 5})})
    program = job_program(job)
    for rank in range(job.plan.world):
        copied = _copied(job, rank)
        place = MeshShape.of(job.plan).coordinates(rank)
        states = rank_state(job, program, place["pp"], place["tp"], shard_indices(job.plan, rank))
        units = [unit for stage in states.values() for unit in stage.units]
        # The prediction counts a row of each parameter more, padding, and parameters that another tp rank writes.
        rows = 12 * sum(part.shape[-1] for unit in units for part in unit.places)
        padding = 12 * sum(unit.layout.size - sum(part.num_elements for part in unit.places) for unit in units)
        of_others = 12 * sum(
            part.num_elements
            for unit in units
            for part in unit.places
            if (place["tp"] and not {"tp", "etp"} & set(part.sharded_over)) or part.is_tied
        )
        predicted = copied_bytes(job, states)
        assert copied <= predicted <= copied + rows + padding + of_others
        assert copied <= most_copied_bytes(job)


def test_a_job_without_checkpoints_copies_nothing() -> None:
    job = small_job("llama")
    assert most_copied_bytes(job.model_copy(update={"checkpoint": CheckpointSpec()})) == 0


def _copied(job: JobSpec, rank: int) -> int:
    """Bytes that a rank copies to host memory for a checkpoint, in a dry run on CUDA."""
    streams = RecordedStreams()
    with OperatorAccesses(streams):
        steps = DrySteps(job, rank, "cuda", streams.connecting(lambda lines: DryTransport(is_gloo=False)), streams)
        steps.run()
        boxes = SavedState(steps.replica, steps.mesh).copy().wait()
        return sum(box.values.nbytes for box in boxes)


def test_an_estimate_says_what_a_checkpoint_takes_of_the_host() -> None:
    fields = ["checkpoint.every_steps=100", "cluster.host_memory_gib=4"]
    answer = estimate_dict(load_job("yi-34b", fields))
    (note,) = [note for note in answer["notes"] if note.startswith("a checkpoint copies at most")]
    assert "is 512.0 MiB" in note and "shard over more replicas" in note
