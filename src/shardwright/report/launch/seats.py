"""Where the ranks of a job sit: how many servers, and how many ranks on each.

A node of the cluster is what fast links join. That is a server, but for devices whose links join several to a node, as
in a rack of GB200: an operating system sees the devices of one server, and a launcher starts ranks there.
"""

from dataclasses import dataclass

from shardwright.config.base import PlanError
from shardwright.config.cluster import ClusterSpec
from shardwright.config.job import JobSpec
from shardwright.config.units import counted
from shardwright.config.usual_links import device_entry, node_devices, usual_divisor


@dataclass(frozen=True)
class Seats:
    """Servers and the ranks of each. `least_servers` are those of the smallest plan that the job falls back to, and a
    node of fast links is `servers_per_node`. A server has as many devices as ranks where it `is_full`."""

    servers: int
    ranks_per_server: int
    least_servers: int
    servers_per_node: int
    is_full: bool

    @property
    def words(self) -> str:
        """ "16 ranks on 2 servers of 8"."""
        ranks = counted(self.servers * self.ranks_per_server, "rank")
        return f"{ranks} on {counted(self.servers, 'server')}" + (
            f" of {self.ranks_per_server}" if self.servers > 1 else ""
        )


def seats_of(job: JobSpec) -> Seats:
    """The seats of a job's ranks. PlanError where its cluster does not say them, or they don't fill whole servers."""
    each, world = _server_devices(job), job.plan.world
    if world > each and world % each:
        below, above = world // each * each, (world // each + 1) * each
        fault = (
            f"{job.plan.degrees} = {world} ranks do not fill whole servers of {each} ({world} / {each} = "
            f"{world / each:.2f}), and each server starts as many; use degrees whose product is {below} or {above}, or "
            f"set cluster.devices_per_node to a divisor of {world}"
        )
        raise PlanError(f"job {job.name}", [fault])
    servers, ranks = max(1, world // each), min(world, each)
    smaller = [plan.world // each for plan in job.plan.fallback if plan.world >= each and plan.world % each == 0]
    node = each if job.cluster.parts else node_devices(job.cluster)
    per_node = min(servers, max(1, node // each))
    return Seats(servers, ranks, min([servers, *smaller]), per_node, is_full=ranks == each)


def _server_devices(job: JobSpec) -> int:
    """Devices of one server. PlanError where they are not known, or differ."""
    cluster = job.cluster
    if cluster.parts:
        counts = sorted({part.devices_per_node for part in cluster.parts})
        if len(counts) > 1:
            fault = (
                f"cluster.parts has nodes of {' and '.join(map(str, counts))} devices, and what is written starts as "
                f"many ranks on each; describe all parts by nodes of {counts[0]}, or start the ranks by other means"
            )
            raise PlanError(f"job {job.name}", [fault])
        return counts[0]
    node = node_devices(cluster)
    if not node and cluster.device != "unknown" and cluster.nodes == 1:
        node = job.plan.world  # devices without fast links: one server has them all
    if not node:
        size = usual_divisor(job.plan.world)
        example = f"--set cluster.devices_per_node={size} --set cluster.nodes={job.plan.world // size}"
        fault = (
            f"nothing is known of the nodes of cluster {cluster.name!r}, so there is no saying how many ranks a node "
            f"starts; set cluster.devices_per_node and cluster.nodes, such as {example}, or cluster.name"
        )
        raise PlanError(f"job {job.name}", [fault])
    return _of_a_server(cluster, node)


def _of_a_server(cluster: ClusterSpec, node: int) -> int:
    own = device_entry(cluster.device).server_devices if cluster.device != "unknown" else 0
    return own if own and node % own == 0 else node
