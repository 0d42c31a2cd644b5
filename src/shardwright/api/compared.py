"""The result of `compare`: the best plan of a job on each of several clusters, side by side."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.api.asked_job import AskedJob, JobToPlan
from shardwright.api.found_plans import PlanQuestion, found_plans
from shardwright.api.shown import Shown
from shardwright.config import catalog
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError, error_text, together
from shardwright.config.cluster_facts import usual_node
from shardwright.config.device_name import catalog_device, device_name
from shardwright.config.divisors import divisors
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.job_file import read_fields
from shardwright.config.phrase import ENGLISH, any_of, each, say
from shardwright.config.progress_records import tell_part
from shardwright.planner.advice.priced_plan import PricedPlan
from shardwright.planner.search.objectives import Objective
from shardwright.report.cluster_comparison import ClusterPlan, comparison_dict, comparison_screen
from shardwright.report.rendered import rendered

_CLUSTER = re.compile(r"(?P<device>.+):((?P<nodes>[0-9]{1,9})x)?(?P<devices>[0-9]{1,9})(@(?P<usd>[0-9.]{1,20}))?")
_EXAMPLE = say("h100-sxm:64, or with its price a device and hour h100-sxm:64@2.50")
_OWN_FIELDS = tuple(f"cluster.{name}" for name in ("name", "device", "devices_per_node", "nodes", "parts"))


@dataclass(frozen=True)
class OfferedCluster:
    """A cluster that may be taken, and its price in US dollars a device and hour; empty for the list price."""

    cluster: AskedCluster
    usd: str = ""


@dataclass(frozen=True, repr=False)
class Compared(Shown):
    """The best plan on each cluster, in the order in which they were asked for. `notes` are about values that nobody
    stated."""

    clusters: tuple[ClusterPlan, ...]
    notes: tuple[str, ...]

    @property
    def text(self) -> str:
        return self.screen()

    def in_language(self, language: str) -> str:
        return self.screen(language=language)

    def screen(self, coloured: bool = False, language: str = ENGLISH) -> str:
        """The clusters side by side, and which is the cheapest, the fastest and takes the least energy."""
        return rendered(comparison_screen(self.clusters, self.notes), coloured, language)

    def to_dict(self) -> dict[str, Any]:
        return comparison_dict(self.clusters)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each cluster; names within a section are joined by a dot, as in plan.step_s."""
        return [flat_keys(cluster.to_dict()) for cluster in self.clusters]


def compared(
    job: str | Mapping[str, Any], overrides: Sequence[str], names: Sequence[str], question: PlanQuestion
) -> Compared:
    """Search for a job's best plan on each of some clusters, such as "h100-sxm:64". Raises PlanError with every fault
    of the clusters, or if no cluster has a legal plan."""
    subject = AskedJob(job).subject
    question = question.read(subject)

    def read() -> list[JobToPlan]:
        offers, _ = together(subject, lambda: offered_clusters(names), lambda: read_fields(job, subject))
        return _jobs(job, overrides, offers, question.tokens)

    jobs, _ = together(subject, read, question.constraints)  # faults of these options are no cluster's
    tokens = Objective(tokens=question.tokens).with_tokens_of(jobs[0].job).run_tokens
    clusters = []
    for number, to_plan in enumerate(jobs):
        tell_part(f"{to_plan.job.cluster.num_devices:,} {to_plan.job.cluster.device}", number, len(jobs))
        clusters.append(ClusterPlan(to_plan.job, *_plan_on(subject, to_plan, question), tokens))
    if all(cluster.refusal for cluster in clusters):
        raise PlanError(subject, [_refusal(cluster) for cluster in clusters])
    return Compared(tuple(clusters), tuple(dict.fromkeys(note for to_plan in jobs for note in to_plan.notes)))


def _refusal(cluster: ClusterPlan) -> str:
    return say("{cluster}: {reason}", cluster=cluster.name, reason=cluster.refusal)


def offered_clusters(names: Sequence[str]) -> list[OfferedCluster]:
    """The clusters of texts such as "h100-sxm:64@2.50". Raises PlanError with every fault."""
    matches = [_CLUSTER.fullmatch(name.strip()) for name in names]
    faults = [fault for name, match in zip(names, matches, strict=True) if (fault := _offer_fault(name, match))]
    if not names:
        faults = [say("no cluster is named; use --on twice or more, such as {example}", example=_EXAMPLE)]
    elif len(names) < 2 and not faults:
        faults = [
            say("1 cluster has none to be compared with; use --on twice or more, such as {example}", example=_EXAMPLE)
        ]
    if faults:
        raise PlanError("compare", faults)
    return [_offered(match) for match in matches if match is not None]


def _offer_fault(name: str, match: re.Match[str] | None) -> str:
    """The fault of a text that names no cluster, or whose device is unknown; empty for any other."""
    if "," in name and all(map(_CLUSTER.fullmatch, parts := [part.strip() for part in name.split(",")])):
        return say(
            "--on {name}: each cluster has an --on of its own; write {options}",
            name=repr(name),
            options=" ".join(f"--on {part}" for part in parts),
        )
    if match is None or not int(match["devices"]) * int(match["nodes"] or 1):
        return say(
            "--on {name} is no cluster; write a device and how many, such as {example}",
            name=repr(name),
            example=_EXAMPLE,
        )
    try:
        if not catalog.is_file(match["device"]):
            device_name(match["device"])
    except KeyError as error:
        return say("--on {name}: {reason}", name=repr(name), reason=error_text(error))
    return "" if match["nodes"] else _nodes_fault(name, match["device"], int(match["devices"]))


def _nodes_fault(name: str, device: str, num_devices: int) -> str:
    """The fault of devices that are not whole usual nodes; empty if they are."""
    try:
        size = usual_node(catalog_device(device))
    except (KeyError, ValueError):  # of a file that is wrong, which is told with the job
        return ""
    if size and num_devices % min(size, num_devices) == 0:
        return ""
    if not size and num_devices == 1:
        return ""
    in_node = max(divisor for divisor in divisors(num_devices) if divisor <= (size or num_devices))
    example = say(
        "--on {device}:{nodes}x{devices} (nodes of {devices})",
        device=device,
        nodes=num_devices // in_node,
        devices=in_node,
    )
    if not size:
        return say(
            "--on {name}: nothing is known of the usual node of {device}; write the nodes, such as {example}",
            name=repr(name),
            device=device,
            example=example,
        )
    return say(
        "--on {name}: {devices:,} devices are not whole nodes of {size} ({devices} / {size} = {quotient:.2f}); use "
        "{choices}, or write the nodes, such as {example}",
        name=repr(name),
        devices=num_devices,
        size=size,
        quotient=num_devices / size,
        choices=any_of([f"{device}:{n * size}" for n in (num_devices // size, num_devices // size + 1)]),
        example=example,
    )


def _offered(match: re.Match[str]) -> OfferedCluster:
    size = int(match["devices"])
    if not match["nodes"]:
        return OfferedCluster(AskedCluster(size, match["device"]), match["usd"] or "")
    return OfferedCluster(AskedCluster(int(match["nodes"]) * size, match["device"], size), match["usd"] or "")


def _jobs(
    job: str | Mapping[str, Any], overrides: Sequence[str], offers: Sequence[OfferedCluster], run_tokens: float
) -> list[JobToPlan]:
    """The job on each cluster, of a model with as many steps as take `run_tokens`, if any. Raises PlanError with the
    faults on all of them."""
    own_fields = [override for override in overrides if override.partition("=")[0].strip() in _OWN_FIELDS]
    if own_fields:
        fault = say(
            "--set {field} would hold on every cluster; name each cluster with --on, such as {example}",
            field=own_fields[0],
            example=_EXAMPLE,
        )
        raise PlanError("compare", [fault])
    jobs, faults, subject = [], [], "compare"
    for offer in offers:
        price = (f"cluster.usd_per_device_hour={offer.usd}",) if offer.usd else ()
        try:
            jobs.append(AskedJob(job, (*overrides, *price), offer.cluster, run_tokens).to_plan())
        except PlanError as error:
            faults += error.faults
            subject = error.subject
    if faults:
        raise PlanError(subject, faults)
    return jobs


def _plan_on(subject: str, to_plan: JobToPlan, question: PlanQuestion) -> tuple[PricedPlan | None, str]:
    """(the plan to take on one cluster, by the search of `plan`, or None; the reason if none is legal or priced)."""
    try:
        recommendation = found_plans(subject, to_plan, question).advice.recommendation
    except PlanError as error:
        return None, each(error.faults)
    return (recommendation.plan if recommendation else None), ""
