"""The host memory for the tensors that a plan offloads."""

import math
from functools import lru_cache

from shardwright.config.catalog_entry import read_entry
from shardwright.config.cluster import ClusterSpec, DeviceSpec
from shardwright.config.units import GIB


def host_memory_bytes(cluster: ClusterSpec) -> float | None:
    """Host memory in bytes per device of a cluster: that of a node divided evenly. None if unknown; then it is not
    checked."""
    if cluster.host_memory_gib:
        return cluster.host_memory_gib * GIB / max(1, cluster.devices_per_node)
    if cluster.parts or cluster.device == "unknown":
        return None
    return _host_bytes_of_device(cluster.device) or None


@lru_cache(maxsize=64)
def _host_bytes_of_device(name: str) -> float:
    """Host memory in bytes per device, from its catalog entry; 0 if unknown. Cached, because a search asks often."""
    return read_entry("devices", name, DeviceSpec).host_memory_gib * GIB


def host_room_bytes(cluster: ClusterSpec) -> float:
    """Host memory in bytes per device, as a limit: infinite if unknown."""
    num_bytes = host_memory_bytes(cluster)
    return math.inf if num_bytes is None else num_bytes
