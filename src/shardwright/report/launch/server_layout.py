"""The layout of a job's ranks on servers: the number of servers, and the ranks on each.

A node of the cluster is a group of devices that fast links join. It is one server, unless these links join several
servers, as in a rack of GB200. A launcher starts ranks by server, since an operating system sees the devices of one.
"""

from dataclasses import dataclass

from shardwright.config.base import PlanError
from shardwright.config.cluster import ClusterSpec
from shardwright.config.cluster_facts import device_entry, node_devices, usual_divisor
from shardwright.config.job import JobSpec
from shardwright.config.phrase import both, say
from shardwright.config.units import counted


@dataclass(frozen=True)
class ServerLayout:
    """Servers and the ranks of each.

    `least_servers` is the number of servers of the job's smallest fallback plan. A node of fast links has
    `servers_per_node` servers. If `is_full`, a server has as many ranks as devices.
    """

    servers: int
    ranks_per_server: int
    least_servers: int
    servers_per_node: int
    is_full: bool

    @property
    def words(self) -> str:
        """The layout in words: "16 ranks on 2 servers of 8"."""
        ranks = counted(self.servers * self.ranks_per_server, "rank")
        return f"{ranks} on {counted(self.servers, 'server')}" + (
            f" of {self.ranks_per_server}" if self.servers > 1 else ""
        )


def server_layout(job: JobSpec) -> ServerLayout:
    """The layout of a job's ranks. PlanError if its cluster does not say enough, or ranks do not fill whole servers."""
    per_server, world = _server_devices(job), job.plan.world
    if world > per_server and world % per_server:
        smaller, larger = world // per_server * per_server, (world // per_server + 1) * per_server
        fault = say(
            "{degrees} = {world} ranks do not fill whole servers of {per_server} ({world} / {per_server} = "
            "{quotient:.2f}), and each server starts as many; use degrees whose product is {smaller} or {larger}, or "
            "set cluster.devices_per_node to a divisor of {world}",
            degrees=job.plan.degrees,
            world=world,
            per_server=per_server,
            quotient=world / per_server,
            smaller=smaller,
            larger=larger,
        )
        raise PlanError(say("job {name}", name=job.name), [fault])
    servers, ranks = max(1, world // per_server), min(world, per_server)
    fallback_servers = [
        plan.world // per_server
        for plan in job.plan.fallback
        if plan.world >= per_server and plan.world % per_server == 0
    ]
    num_node_devices = per_server if job.cluster.parts else node_devices(job.cluster)
    per_node = min(servers, max(1, num_node_devices // per_server))
    return ServerLayout(servers, ranks, min([servers, *fallback_servers]), per_node, is_full=ranks == per_server)


def _server_devices(job: JobSpec) -> int:
    """Devices of one server. PlanError if they are unknown, or differ between servers."""
    cluster = job.cluster
    if cluster.parts:
        counts = sorted({part.devices_per_node for part in cluster.parts})
        if len(counts) > 1:
            fault = say(
                "cluster.parts has nodes of {counts} devices, and what is written starts as many ranks on each; "
                "describe all parts by nodes of {count}, or start the ranks by other means",
                counts=both(list(map(str, counts))),
                count=counts[0],
            )
            raise PlanError(say("job {name}", name=job.name), [fault])
        return counts[0]
    num_node_devices = node_devices(cluster)
    if not num_node_devices and cluster.device != "unknown" and cluster.nodes == 1:
        num_node_devices = job.plan.world  # devices without fast links: one server has them all
    if not num_node_devices:
        size = usual_divisor(job.plan.world)
        example = f"--set cluster.devices_per_node={size} --set cluster.nodes={job.plan.world // size}"
        fault = say(
            "nothing is known of the nodes of cluster {cluster}, so there is no saying how many ranks a node starts; "
            "set cluster.devices_per_node and cluster.nodes, such as {example}, or cluster.name",
            cluster=repr(cluster.name),
            example=example,
        )
        raise PlanError(say("job {name}", name=job.name), [fault])
    return _within_node(cluster, num_node_devices)


def _within_node(cluster: ClusterSpec, num_node_devices: int) -> int:
    server_devices = device_entry(cluster.device).server_devices if cluster.device != "unknown" else 0
    return server_devices if server_devices and num_node_devices % server_devices == 0 else num_node_devices
