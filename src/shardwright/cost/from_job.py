"""A job as the cost model sees it: its model and its plan (workload/query.py) on its cluster."""

import math

from shardwright.config.cluster import ClusterSpec
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.usual_links import network_gb_per_s, node_devices, node_gb_per_s
from shardwright.workload.query import Run, Topology, grid_of


def run_of(job: JobSpec) -> Run:
    """A job on its cluster; a budget for its activations has been met before (account/budget.py).

    KeyError where nodes are joined by a network of which nothing is known.
    """
    cluster, links = job.cluster, job.cluster.topology
    together = math.prod(links.torus) if links.torus else node_devices(cluster) or job.plan.world
    _check_network(cluster, together, max(job.plan.world, cluster.num_devices))
    ports = links.rails / together if links.rails and not links.torus else 1.0
    return Run(
        shape_of(job.model), grid_of(job), cluster.device, cluster.software, together,
        node_gb_per_s(cluster) * 1e9, ports * network_gb_per_s(cluster) * 1e9,
        cluster.intra_node.latency_us * 1e-6, cluster.inter_node.latency_us * 1e-6,
        Topology(tuple((level.devices, level.share) for level in links.levels), tuple(links.torus)), job,
    )  # fmt: skip


def _check_network(cluster: ClusterSpec, together: int, num_devices: int) -> None:
    if cluster.parts or cluster.device == "unknown" or num_devices <= together or network_gb_per_s(cluster):
        return
    raise KeyError(
        f"{num_devices:,} devices are more than a node of {together:,}, and the catalog knows no usual network of "
        f"{cluster.device}; set cluster.inter_node.bandwidth_gb_per_s to what joins the nodes"
    )
