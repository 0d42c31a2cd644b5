"""Check that the run can write checkpoints as the job asks."""

from shardwright.config.catalog_entry import entry_faults
from shardwright.config.cluster import DeviceSpec
from shardwright.config.failure_rate import device_hours_between_failures
from shardwright.config.job import JobSpec


def checkpoint_faults(job: JobSpec) -> list[str]:
    """Faults of `checkpoint`: requests that can't be carried out, each with a way out."""
    return _place_faults(job) + _auto_faults(job) + _best_faults(job)


def _best_faults(job: JobSpec) -> list[str]:
    best, sets = job.checkpoint.keep_best, job.data.evaluated
    if not best:
        return []
    faults = []
    if best not in sets:
        names = f"evaluated are {', '.join(sets)}" if sets else "nothing is evaluated"
        faults.append(
            f"checkpoint.keep_best {best!r} is no set that is evaluated ({names}); name one, or give data.validation a "
            "set of that name"
        )
    if not job.checkpoint.is_on:
        faults.append(
            f"checkpoint.keep_best is {best!r}, and no checkpoints are written; set checkpoint.every_steps, or leave "
            "keep_best out"
        )
    return faults


def _place_faults(job: JobSpec) -> list[str]:
    path, world = job.checkpoint.path, job.plan.world
    if not (path.startswith("memory://") and job.checkpoint.is_on and world > 1):
        return []
    return [
        f"checkpoint.path {path} is the memory of each process, and {world} ranks can't see one another's; name a "
        "folder, or an address that all of them reach"
    ]


def _auto_faults(job: JobSpec) -> list[str]:
    cluster = job.cluster
    devices = list(dict.fromkeys(part.device for part in cluster.parts)) or [cluster.device]
    if not job.checkpoint.auto or any(
        entry_faults("", "devices", name, DeviceSpec) for name in devices if name != "unknown"
    ):
        return []  # another check reports a name that is no device
    if device_hours_between_failures(cluster):
        return []
    reason = (
        "cluster.device is unknown" if devices == ["unknown"] else f"{' or '.join(devices)} has none in the catalog"
    )
    return [
        f"checkpoint.auto weighs what a checkpoint costs against how often devices fail, which is not known: "
        f"cluster.hours_between_failures is 0, and {reason}; set cluster.hours_between_failures, or "
        "checkpoint.every_steps or every_s in place of auto"
    ]
