"""Check that the topology of a cluster's nodes is consistent. Every fault has its arithmetic and a way out."""

import math

from shardwright.config.cluster import ClusterSpec


def topology_faults(cluster: ClusterSpec) -> list[str]:
    """Faults of a level whose switches do not hold an integer number of switches of the level below, or of a torus that
    does not divide the cluster."""
    faults, lower, lower_name = [], cluster.devices_per_node, "cluster.devices_per_node"
    for number, level in enumerate(cluster.topology.levels):
        name = f"cluster.topology.levels[{number}].devices"
        if lower and (level.devices % lower or level.devices <= lower):
            faults.append(
                f"{name} {level.devices} is no multiple of {lower_name} {lower} ({level.devices} / {lower} = "
                f"{level.devices / lower:.2f}); use {2 * lower}, {4 * lower}, ..."
            )
        lower, lower_name = level.devices, name
    torus = cluster.topology.torus
    size = math.prod(torus)
    if torus and cluster.num_devices % size:
        faults.append(
            f"cluster.topology.torus {' x '.join(map(str, torus))} = {size} devices does not divide the cluster's "
            f"{cluster.num_devices} ({cluster.num_devices} / {size} = {cluster.num_devices / size:.2f}); use axes "
            "whose product does"
        )
    return faults
