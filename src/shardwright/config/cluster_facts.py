"""The facts of a cluster that its devices' entries fill in: links, nodes, host memory, failures. Each is as the cluster
states it, or else as usual for its device."""

import math
from functools import lru_cache

from shardwright.config.catalog_entry import read_entry
from shardwright.config.cluster import ClusterSpec, DeviceSpec
from shardwright.config.phrase import both, say
from shardwright.config.units import GIB

USUAL_NODE = 8  # devices, if nothing is known about the device


def usual_divisor(world: int) -> int:
    """The largest usual size of a node that divides a number of ranks: 8, 4, 2 or 1."""
    return math.gcd(world, USUAL_NODE)


def filled_nodes(shared: int, least: int) -> int:
    """The smallest number of ranks, at least `least`, that is a multiple of `shared` and fills usual nodes, or is less
    than a node."""
    count = -(-max(1, least) // shared) * shared
    return count if count < USUAL_NODE else -(-count // math.lcm(shared, USUAL_NODE)) * math.lcm(shared, USUAL_NODE)


@lru_cache(maxsize=64)
def device_entry(name: str) -> DeviceSpec:
    """A device of the catalog or of a user's file. Cached, because a search asks often."""
    return read_entry("devices", name, DeviceSpec)


def usual_node(device: str) -> int:
    """Number of devices in the usual node of a device: those joined by its fast links. 0 if it has no fast links, or
    if unknown."""
    if device == "unknown":
        return 0
    domain = device_entry(device).link_domain
    return domain if domain > 1 else 0


def node_devices(cluster: ClusterSpec) -> int:
    """Number of devices in a node, from the cluster or else the entry of its device; 0 if unknown."""
    return cluster.devices_per_node or usual_node(cluster.device)


def node_gb_per_s(cluster: ClusterSpec) -> float:
    """Bandwidth of a device to other devices of its node, in 1e9 bytes per second; 0 if unknown."""
    return cluster.intra_node.bandwidth_gb_per_s or _device_field(cluster.device, "link_gb_per_s")


def network_gb_per_s(cluster: ClusterSpec) -> float:
    """Bandwidth of a device to other nodes, in 1e9 bytes per second; 0 if unknown."""
    return cluster.inter_node.bandwidth_gb_per_s or _device_field(cluster.device, "network_gb_per_s")


def _device_field(device: str, field: str) -> float:
    return 0.0 if device == "unknown" else float(getattr(device_entry(device), field))


def _domain(cluster: ClusterSpec) -> str:
    """The word for a domain of fast links of the cluster's device."""
    return device_entry(cluster.device).domain


def usual_link_notes(cluster: ClusterSpec, world: int) -> list[str]:
    """One sentence about the links that predictions of `world` ranks take from the device, because the cluster states
    none; an empty list if there are none."""
    if cluster.parts or cluster.device == "unknown":
        return []
    world = max(world, cluster.num_devices)
    node = node_devices(cluster) or world
    intra_node, inter_node = cluster.intra_node.bandwidth_gb_per_s, cluster.inter_node.bandwidth_gb_per_s
    links = {}
    if not intra_node and min(node, world) > 1 and (usual := node_gb_per_s(cluster)):
        links["intra_node"] = say(
            "{rate:g} GB/s within a {domain} of {node:,}", rate=usual, domain=say(_domain(cluster)), node=node
        )
    if not inter_node and world > node and (usual := network_gb_per_s(cluster)):
        links["inter_node"] = say(
            "{rate:g} GB/s between {domains} of {node:,}", rate=usual, domains=say(f"{_domain(cluster)}s"), node=node
        )
    if not links:
        return []
    return [
        say(
            "the cluster does not state all of its links, so those usual for {device} hold: {links}; set {fields} if "
            "yours are others",
            device=cluster.device,
            links=both(list(links.values())),
            fields=both([f"cluster.{name}.bandwidth_gb_per_s" for name in links]),
        )
    ]


def host_memory_bytes(cluster: ClusterSpec) -> float | None:
    """Host memory in bytes per device, for the tensors that a plan offloads: that of a node divided evenly. None if
    unknown; then it is not checked."""
    if cluster.host_memory_gib:
        return cluster.host_memory_gib * GIB / max(1, cluster.devices_per_node)
    if cluster.parts or cluster.device == "unknown":
        return None
    return device_entry(cluster.device).host_memory_gib * GIB or None


def host_room_bytes(cluster: ClusterSpec) -> float:
    """Host memory in bytes per device, as a limit: infinite if unknown."""
    num_bytes = host_memory_bytes(cluster)
    return math.inf if num_bytes is None else num_bytes


def device_hours_between_failures(cluster: ClusterSpec) -> float:
    """Mean hours of one device between failures that interrupt a job, over all devices if there are several kinds. 0 if
    unknown. KeyError or PlanError for an unknown or faulty device."""
    if cluster.hours_between_failures:
        return cluster.hours_between_failures
    counts = [(part.device, part.num_devices) for part in cluster.parts] or [(cluster.device, 1)]
    hours = [(_hours_of(device), count) for device, count in counts]
    if not all(device_hours for device_hours, _ in hours):
        return 0.0
    if len(hours) == 1:
        return hours[0][0]
    return sum(count for _, count in hours) / sum(count / device_hours for device_hours, count in hours)


def _hours_of(device: str) -> float:
    return 0.0 if device == "unknown" else device_entry(device).hours_between_failures
