"""How much host memory there is for what a plan offloads."""

import math
from functools import lru_cache

from shardwright.config.catalog_entry import read_entry
from shardwright.config.cluster import ClusterSpec, DeviceSpec
from shardwright.config.units import GIB


def host_memory_bytes(cluster: ClusterSpec) -> float | None:
    """Host memory for each device of a cluster, a node's divided evenly. None where it is not known, so not checked."""
    if cluster.host_memory_gib:
        return cluster.host_memory_gib * GIB / max(1, cluster.devices_per_node)
    if cluster.parts or cluster.device == "unknown":
        return None
    return _beside_device(cluster.device) or None


@lru_cache(maxsize=64)
def _beside_device(name: str) -> float:
    """Host memory of a device; 0 where it is not known. A search asks for each of its blocks."""
    return read_entry("devices", name, DeviceSpec).host_memory_gib * GIB


def host_room_bytes(cluster: ClusterSpec) -> float:
    """Bytes of host memory for one device, as a limit: endless where it is not known."""
    known = host_memory_bytes(cluster)
    return math.inf if known is None else known
