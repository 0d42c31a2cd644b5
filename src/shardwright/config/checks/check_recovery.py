"""Check that the run can write checkpoints and respond to bad steps as the job asks."""

from shardwright.config.catalog_entry import entry_faults
from shardwright.config.cluster import DeviceSpec
from shardwright.config.cluster_facts import device_hours_between_failures
from shardwright.config.job import JobSpec
from shardwright.config.phrase import any_of, say
from shardwright.config.schedule_facts import SCHEDULES


def health_faults(job: JobSpec) -> list[str]:
    """Faults of `health`: requests that the job can't carry out, each with a way out."""
    health, faults = job.health, list[str]()
    policies = {"not_finite": health.not_finite, "spike": health.spike}
    for field, policy in policies.items():
        if policy == "rewind" and not job.checkpoint.is_on:
            faults.append(
                say(
                    'health.{field} = "rewind" goes back to the last checkpoint, and the run writes none; set '
                    'checkpoint.every_steps, or health.{field} to "stop"',
                    field=field,
                )
            )
        if policy == "skip" and not SCHEDULES[job.plan.schedule].drains:
            faults.append(
                say(
                    'health.{field} = "skip" leaves the update of a step out, and schedule {schedule} has made it '
                    'before the loss of the step is known; use "stop" or "rewind", or a schedule that drains',
                    field=field,
                    schedule=repr(job.plan.schedule),
                )
            )
    if health.repeat_every and not SCHEDULES[job.plan.schedule].drains:
        faults.append(
            say(
                "health.repeat_every {repeat_every} computes a step twice from the same weights, and schedule "
                "{schedule} updates them while the pipeline is full; set it to 0, or use a schedule that drains",
                repeat_every=health.repeat_every,
                schedule=repr(job.plan.schedule),
            )
        )
    if health.repeat_every and job.plan.compress != "none":
        faults.append(
            say(
                "health.repeat_every {repeat_every} computes a step twice, and plan.compress = {compress} would add "
                "what it lost to the next gradient twice; set one of them to nothing",
                repeat_every=health.repeat_every,
                compress=repr(job.plan.compress),
            )
        )
    return faults


def checkpoint_faults(job: JobSpec) -> list[str]:
    """Faults of `checkpoint`: requests that can't be carried out, each with a way out."""
    return _place_faults(job) + _auto_faults(job) + _best_faults(job)


def _best_faults(job: JobSpec) -> list[str]:
    best, sets = job.checkpoint.keep_best, job.data.evaluated
    if not best:
        return []
    faults: list[str] = []
    if best not in sets:
        names = say("evaluated are {sets}", sets=tuple(sets)) if sets else say("nothing is evaluated")
        faults.append(
            say(
                "checkpoint.keep_best {best} is no set that is evaluated ({names}); name one, or give "
                "data.validation a set of that name",
                best=repr(best),
                names=names,
            )
        )
    if not job.checkpoint.is_on:
        faults.append(
            say(
                "checkpoint.keep_best is {best}, and no checkpoints are written; set checkpoint.every_steps, or "
                "leave keep_best out",
                best=repr(best),
            )
        )
    return faults


def _place_faults(job: JobSpec) -> list[str]:
    path, world = job.checkpoint.path, job.plan.world
    if not (path.startswith("memory://") and job.checkpoint.is_on and world > 1):
        return []
    return [
        say(
            "checkpoint.path {path} is the memory of each process, and {world} ranks can't see one another's; name a "
            "folder, or an address that all of them reach",
            path=path,
            world=world,
        )
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
    reason: str = (
        say("cluster.device is unknown")
        if devices == ["unknown"]
        else say("{devices} has none in the catalog", devices=any_of(devices))
    )
    return [
        say(
            "checkpoint.auto weighs what a checkpoint costs against how often devices fail, which is not known: "
            "cluster.hours_between_failures is 0, and {reason}; set cluster.hours_between_failures, or "
            "checkpoint.every_steps or every_s in place of auto",
            reason=reason,
        )
    ]
