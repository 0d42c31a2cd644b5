"""The result of `collective`: one collective over a group of ranks, step by step and in seconds by algorithm."""

from dataclasses import asdict, dataclass
from typing import Any

from shardwright.api.shown import Shown
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError, error_text
from shardwright.config.load import job_of_fields
from shardwright.config.named_entries import resolve_names
from shardwright.config.number_types import half_numbers
from shardwright.config.phrase import ENGLISH, say
from shardwright.cost.calibration import device_of
from shardwright.cost.collective_algorithms import PricedCollective, priced_collective
from shardwright.cost.from_job import run_of
from shardwright.report.collective_picture import collective_picture
from shardwright.report.collective_text import collective_text
from shardwright.sharding.collective_steps import CollectiveKind

_USUAL_RANKS, _USUAL_DEVICE = 8, "h100-sxm"


@dataclass(frozen=True)
class CollectiveQuestion:
    """A collective of a tensor of `num_bytes` over neighbouring ranks of a cluster, which is a name of the catalog, or
    devices of a kind in their usual nodes. 0 ranks are all devices of the cluster. `algorithm` is the one to draw, and
    `overrides` are of fields of the cluster."""

    kind: CollectiveKind
    num_bytes: int
    ranks: int = 0
    device: str = ""
    devices_per_node: int = 0
    cluster: str = ""
    algorithm: str = ""
    overrides: tuple[str, ...] = ()

    def faults(self) -> list[str]:
        """The options that do not go together."""
        faults: list[str] = []
        if self.cluster and (self.device or self.devices_per_node):
            faults.append(say("--cluster has devices of its own; leave --device and --devices-per-node out"))
        others = [override for override in self.overrides if not override.strip().startswith("cluster.")]
        return faults + [
            say("--set {other} is no field of the cluster; use cluster.FIELD=VALUE", other=other) for other in others
        ]


@dataclass(frozen=True, repr=False)
class OneCollective(Shown):
    """One collective: who holds what, the steps of an algorithm, and the seconds of each."""

    priced: PricedCollective

    @property
    def text(self) -> str:
        return collective_text(self.priced)

    def in_language(self, language: str) -> str:
        """The text in a language."""
        return collective_text(self.priced, language)

    def to_dict(self) -> dict[str, Any]:
        priced = self.priced
        return {
            "collective": priced.kind,
            "ranks": priced.num_ranks,
            "bytes": priced.num_bytes,
            "device": priced.cluster.device,
            "ranks_in_node": int(priced.group.inside),
            "link_bytes_per_s": priced.rates.link_bytes_per_s if priced.group.inside > 1 else None,
            "network_bytes_per_s": priced.rates.network_bytes_per_s if priced.group.domains > 1 else None,
            "drawn": priced.drawn or None,
            "steps": [[asdict(move) | {"pieces": list(move.pieces)} for move in step] for step in priced.steps],
            "algorithms": self.rows(),
        }

    def rows(self) -> list[dict[str, Any]]:
        """A row for each algorithm."""
        return [asdict(row) | {"num_steps": row.num_steps or None} for row in self.priced.rows]

    def svg(self, language: str = ENGLISH) -> str:
        """The pieces of each rank after each step, as a picture with words of a language."""
        return collective_picture(self.priced, language)

    def _repr_html_(self) -> str:
        return self.svg()


def one_collective(question: CollectiveQuestion) -> OneCollective:
    """Price a collective on its cluster. PlanError if the cluster or one of its rates is unknown."""
    if faults := question.faults():
        raise PlanError("collective", faults)
    try:
        cluster, num_ranks = _cluster_of(question)
        peaks = device_of(cluster["device"]).peak_flops
        number = next((number.name for number in half_numbers() if peaks(number.name)), "float32")
        job = job_of_fields(
            {
                "model": {"layers": 1, "hidden": 64, "heads": 1, "vocab": 64, "sequence": 16},
                "cluster": cluster,
                "plan": {"dp": num_ranks},
                "batch": {"global_batch_size": num_ranks},
                "precision": {"compute": number},
            },
            question.overrides,
            "collective",
        )
        priced = priced_collective(run_of(job), job.cluster, question.kind, question.num_bytes, question.algorithm)
    except (KeyError, ValueError) as error:
        raise error if isinstance(error, PlanError) else PlanError("collective", [error_text(error)]) from None
    return OneCollective(priced)


def _cluster_of(question: CollectiveQuestion) -> tuple[dict[str, Any], int]:
    """The fields of a cluster of as many devices as there are ranks, and the number of ranks."""
    if not question.cluster:
        num_ranks = question.ranks or _USUAL_RANKS
        asked = AskedCluster(num_ranks, question.device or _USUAL_DEVICE, question.devices_per_node)
        return asked.over({}), num_ranks
    named: dict[str, Any] = {"cluster": {"name": question.cluster}}
    if faults := resolve_names(named):
        raise PlanError("collective", faults)
    fields = named["cluster"]
    if fields.get("device", "unknown") == "unknown":
        fault = say("the device of {cluster} is unknown; use --device, such as h100-sxm", cluster=question.cluster)
        raise PlanError("collective", [fault])
    node = int(fields.get("devices_per_node", 1))
    num_ranks = question.ranks or node * int(fields.get("nodes", 1))
    if num_ranks > node and num_ranks % node:
        fault = say("{ranks} ranks are not whole nodes of {node}; ask for a multiple of it", ranks=num_ranks, node=node)
        raise PlanError("collective", [fault])
    return fields | {"nodes": -(-num_ranks // node), "devices_per_node": min(node, num_ranks)}, num_ranks
