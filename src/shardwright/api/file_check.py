"""The check of a file with a job, in any system's language: legality, memory, batch, experts and time."""

from collections.abc import Sequence
from pathlib import Path, PurePath

from shardwright.api.asked_job import AskedJob, planned
from shardwright.api.estimated import estimated
from shardwright.config import catalog
from shardwright.config.asked_cluster import NOTHING_ASKED, AskedCluster
from shardwright.config.base import PlanError, error_text
from shardwright.config.cluster_facts import node_devices
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.units import MIB
from shardwright.config.user_file import FileFault, read_text, system_reason
from shardwright.explain.rank_groups import groups_of_rank_0
from shardwright.interchange.foreign_job import read_job_of
from shardwright.interchange.imported import Asked, split_sets
from shardwright.interchange.job_files import JobFiles, origin_of
from shardwright.interchange.recognised import JOB, system_name_of
from shardwright.interchange.system import SOURCES
from shardwright.memory.job_memory import job_memory
from shardwright.report.file_check_text import FileCheck, no_fit
from shardwright.report.fit_verdict import fit_of
from shardwright.schedule.job_program import job_program


def file_checks(
    paths: Sequence[str], overrides: tuple[str, ...], cluster: AskedCluster = NOTHING_ASKED, system: str = ""
) -> list[FileCheck]:
    """The checks of files, each alone. Overrides go to all, and a variable of scripts to those that have it. A single
    config.json among them is the model of those that alone lack one."""
    texts = {path: _text(path) for path in paths}
    checks = []
    models = [path for path in paths if PurePath(path).name == "config.json"]
    model = models[0] if len(models) == 1 and len(paths) > 1 else ""
    for path in paths:
        others = "".join(text for other, text in texts.items() if other != path)
        own = tuple(
            text
            for text in overrides
            if "." in (name := text.partition("=")[0]) or name in texts[path] or name not in others
        )
        alone = file_check(path, own, cluster, system)
        is_foreign = alone.readable and alone.system != JOB and path != model
        beside = file_check(path, own, cluster, system, model) if model and is_foreign and not alone.legal else alone
        checks.append(beside if beside.legal else alone)
    return checks


def _text(path: str) -> str:
    """The text of a file; empty if it can't be read."""
    try:
        return read_text(Path(path), MIB, say("job or configuration"))
    except (FileFault, OSError):
        return ""


def file_check(
    path: str,
    overrides: tuple[str, ...] = (),
    cluster: AskedCluster = NOTHING_ASKED,
    system: str = "",
    model: str = "",
) -> FileCheck:
    """The check of a file or a name of the catalog; `system` is recognised if it is empty. `model` is the
    config.json of a file that lacks one; empty if none is."""
    try:
        system = system or _recognised(path)
    except (PlanError, FileFault, OSError) as error:
        text = error_text(error)
        if isinstance(error, OSError):
            text = say("can't be read: {reason}; check the path", reason=system_reason(error))
        faults = error.faults if isinstance(error, PlanError) else [text]
        return FileCheck(path, "unknown", readable=False, findings=tuple(faults))
    try:
        job, origin = _job(path, overrides, cluster, system, model)
    except PlanError as error:
        return FileCheck(path, system, findings=tuple(error.faults))
    return _job_check(path, system, job, origin)


def _recognised(path: str) -> str:
    if not Path(path).exists() and path in (*catalog.names("jobs"), *catalog.names("models")):
        return JOB
    return JOB if Path(path).is_dir() else system_name_of(path, read_text(Path(path), MIB, say("job or configuration")))


def _job(
    path: str, overrides: tuple[str, ...], cluster: AskedCluster, system: str, model: str
) -> tuple[JobSpec, JobFiles | None]:
    """The checked job of a file, and its files if they are another system's. Raises PlanError."""
    if system == JOB:
        return AskedJob(path, overrides, cluster).to_predict()[0], None
    variables, fields = split_sets(overrides)
    paths = (path, model) if model else (path,)
    imported = read_job_of(SOURCES[system], paths, Asked(variables, fields, cluster))
    return planned(path, imported.job), origin_of(system, paths, imported)


def _job_check(path: str, system: str, job: JobSpec, origin: JobFiles | None) -> FileCheck:
    """The findings on a legal job."""
    estimate = estimated(path, job, origin=origin)
    findings, missing_bytes = list[str](), 0
    if estimate.fits is False:
        missing_bytes = _missing_bytes(job)
        nearest = estimate.to_dict()["nearest"]
        way_out = say("use more devices, or larger ones")
        if nearest:
            fewest = min((near["set"] for near in nearest), key=lambda options: options.count("--set "))
            way_out = say("the nearest plan that does: {options}", options=fewest)
        findings.append(no_fit(way_out))
    expert_nodes = _expert_nodes(job)
    if expert_nodes is not None and expert_nodes > 1:
        findings.append(
            say(
                "a group of {ep} ranks with experts spreads over {count} domains of {size} devices, so tokens cross "
                "the network; lower plan.ep, or use larger domains",
                ep=job.plan.ep,
                count=expert_nodes,
                size=node_devices(job.cluster),
            )
        )
    return FileCheck(
        path,
        system,
        legal=True,
        findings=tuple(findings),
        fits=estimate.fits,
        missing_bytes=missing_bytes,
        slack_bytes=_slack_bytes(job),
        batch=job.batch.global_batch_size,
        microbatches=job.num_microbatches,
        expert_nodes=expert_nodes,
        step_s=estimate.step_s,
    )


def _missing_bytes(job: JobSpec) -> int:
    """The bytes by which the fullest rank exceeds its device, as `estimate` judges it; 0 if its host lacks memory."""
    from shardwright.planner.own_plan import estimate

    try:
        fit = fit_of(job, job_memory(job), estimate(job))
    except (KeyError, ValueError) as error:  # a plan without a price is judged by the account
        fit = fit_of(job, job_memory(job), error_text(error))
    return max(0, max(need.device_bytes for need in fit.needs) - fit.offered_bytes) if fit else 0


def _slack_bytes(job: JobSpec) -> int | None:
    """The most bytes that the allocator of any rank holds beside those given out; None if the device is unknown."""
    if job.cluster.device == "unknown":
        return None
    from shardwright.cost.calibration import shipped
    from shardwright.memory.job_memories import job_memories

    try:
        return max(int(memory.slack) for memory in job_memories(job, shipped()))
    except (KeyError, ValueError):
        return None


def _expert_nodes(job: JobSpec) -> int | None:
    """The number of domains of the ranks that exchange tokens with rank 0; None if domains are unknown."""
    if not job.model.moe.experts:
        return 0
    if not node_devices(job.cluster):
        return None
    groups = groups_of_rank_0(job, job_program(job).placement)
    return max((len(set(group.nodes)) for group in groups if group.axis in ("ep", "etp")), default=1)
