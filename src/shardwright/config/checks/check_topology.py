"""Does what joins a cluster's nodes go together? Every fault, with its arithmetic and a way out."""

import math

from shardwright.config.cluster import ClusterSpec


def topology_faults(cluster: ClusterSpec) -> list[str]:
    """A level's switches hold whole ones of the level below, and a torus all devices in whole copies."""
    faults, below, what = [], cluster.devices_per_node, "cluster.devices_per_node"
    for number, level in enumerate(cluster.topology.levels):
        name = f"cluster.topology.levels[{number}].devices"
        if below and (level.devices % below or level.devices <= below):
            faults.append(
                f"{name} {level.devices} is no multiple of {what} {below} ({level.devices} / {below} = "
                f"{level.devices / below:.2f}); use {2 * below}, {4 * below}, ..."
            )
        below, what = level.devices, name
    torus = cluster.topology.torus
    size = math.prod(torus)
    if torus and cluster.num_devices % size:
        faults.append(
            f"cluster.topology.torus {' x '.join(map(str, torus))} = {size} devices does not divide the cluster's "
            f"{cluster.num_devices} ({cluster.num_devices} / {size} = {cluster.num_devices / size:.2f}); use axes "
            "whose product does"
        )
    return faults
