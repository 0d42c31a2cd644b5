"""A job in the form of the cost model: its model and its plan (layers/query.py) on its cluster."""

import math
from functools import partial

from shardwright.config.cluster import ClusterSpec
from shardwright.config.cluster_facts import network_gb_per_s, node_devices, node_gb_per_s
from shardwright.config.job import JobSpec
from shardwright.config.kept_results import kept_by_identity
from shardwright.config.model_shape import shape_of
from shardwright.config.phrase import say
from shardwright.layers.query import Run, Topology, grid_of


@partial(kept_by_identity, most=512)  # a search asks for the run of each plan several times
def run_of(job: JobSpec) -> Run:
    """The run of a job on its cluster. A budget for its activations must have been resolved before (memory/budget.py).

    KeyError if the network between its nodes is unknown.
    """
    cluster, links = job.cluster, job.cluster.topology
    node_size = math.prod(links.torus) if links.torus else node_devices(cluster) or job.plan.world
    _check_network(cluster, node_size, max(job.plan.world, cluster.num_devices))
    ports = links.rails / node_size if links.rails and not links.torus else 1.0
    return Run(
        shape_of(job.model),
        grid_of(job),
        device=cluster.device,
        software=cluster.software,
        devices_per_node=node_size,
        node_bytes_per_s=node_gb_per_s(cluster) * 1e9,
        network_bytes_per_s=ports * network_gb_per_s(cluster) * 1e9,
        node_latency_s=cluster.intra_node.latency_us * 1e-6,
        network_latency_s=cluster.inter_node.latency_us * 1e-6,
        network=cluster.network.kind,
        topology=Topology(tuple((level.devices, level.share) for level in links.levels), tuple(links.torus)),
        job=job,
    )


def _check_network(cluster: ClusterSpec, node_size: int, num_devices: int) -> None:
    if cluster.parts or cluster.device == "unknown" or num_devices <= node_size or network_gb_per_s(cluster):
        return
    raise KeyError(
        say(
            "{devices:,} devices are more than a node of {node:,}, and the catalog knows no usual network of {device}; "
            "set cluster.inter_node.bandwidth_gb_per_s to what joins the nodes",
            devices=num_devices,
            node=node_size,
            device=cluster.device,
        )
    )
