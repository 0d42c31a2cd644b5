"""How much host memory there is for what a plan offloads."""

import math

from shardwright.spec.cluster import ClusterSpec, DeviceSpec
from shardwright.spec.entry import read_entry


def host_memory_bytes(cluster: ClusterSpec) -> float | None:
    """Host memory for each device of a cluster, a node's divided evenly. None where it is not known, so not checked."""
    if cluster.host_memory_gib:
        return cluster.host_memory_gib * 2**30 / max(1, cluster.devices_per_node)
    if cluster.parts or cluster.device == "unknown":
        return None
    by_device = read_entry("devices", cluster.device, DeviceSpec).host_memory_gib
    return by_device * 2**30 if by_device else None


def host_room_bytes(cluster: ClusterSpec) -> float:
    """The same as a limit: endless where it is not known."""
    known = host_memory_bytes(cluster)
    return math.inf if known is None else known
