"""The goodput of a job's run: the bytes of its checkpoints, and the shares of its time with a checkpoint as often as
loses the least."""

from shardwright.config.job import JobSpec
from shardwright.cost.failures import Goodput, best_interval_s, checkpoint_bytes, goodput, reliability_of
from shardwright.sharding.optimizer_state import is_by_matrix, moment_bytes
from shardwright.sharding.stage_parameters import model_parameters, num_trained_parameters


def job_checkpoint_bytes(job: JobSpec) -> float:
    """Bytes of a checkpoint of the job, with the moments that its optimizer keeps of each parameter."""
    num_elements, num_by_matrix = num_trained_parameters(job.model), 0  # those that a checkpoint has
    if job.optimizer.facts.matrix_update != "none":
        num_by_matrix = sum(
            place.num_elements
            for place in model_parameters(job.model)
            if not place.is_frozen and is_by_matrix(job.optimizer, place.name, place.full_shape)
        )
    total_moment_bytes = sum(
        count * moment_bytes(job.optimizer, job.precision, by_matrix)
        for by_matrix, count in ((True, num_by_matrix), (False, num_elements - num_by_matrix))
    )
    return checkpoint_bytes(
        num_elements, job.precision.compute_bytes, total_moment_bytes / num_elements, job.precision.master_bytes
    )


def job_goodput(job: JobSpec) -> Goodput | None:
    """The shares of the time of a run on all devices of the job's cluster; None if `reliability_gaps` is not empty."""
    reliability = reliability_of(job.cluster, job.cluster.num_devices, job_checkpoint_bytes(job))
    return None if reliability is None else goodput(reliability, best_interval_s(reliability))
