"""Check that the topology of a cluster is consistent, and that the plan fits parts with devices of different kinds."""

import math

from shardwright.config.catalog_entry import entry_faults
from shardwright.config.cluster import ClusterSpec, DeviceSpec
from shardwright.config.job import JobSpec
from shardwright.config.rank_order import DEFAULT_ORDER


def part_faults(job: JobSpec) -> list[str]:
    """All faults of cluster.parts, and of the plan on them."""
    cluster, plan = job.cluster, job.plan
    if not cluster.parts:
        return []
    faults = []
    if cluster.device != "unknown":
        faults.append(
            f"cluster.device {cluster.device!r} is of all nodes, and cluster.parts names a device for each part; leave "
            f"cluster.device out"
        )
    num_stated = cluster.devices_per_node * cluster.nodes
    if num_stated and num_stated != cluster.num_devices:
        parts = " + ".join(f"{part.nodes} x {part.devices_per_node}" for part in cluster.parts)
        faults.append(
            f"cluster.nodes {cluster.nodes} x devices_per_node {cluster.devices_per_node} = {num_stated} devices, and "
            f"cluster.parts has {parts} = {cluster.num_devices}; leave cluster.nodes and devices_per_node out"
        )
    stage = plan.stage_ranks
    if plan.block < stage:
        faults.append(
            f"plan.order {plan.order} has {plan.block} of the {stage} ranks of a stage behind each other and then "
            f"those of others, and cluster.parts needs a stage on devices of one kind; use the order {DEFAULT_ORDER}"
        )
    for number, part in enumerate(cluster.parts):
        field = f"cluster.parts[{number}]"
        faults += entry_faults(f"{field}.device", "devices", part.device, DeviceSpec)
        if part.num_devices % stage:
            axes = f"dp {plan.dp} x tp {plan.tp}" if plan.cp == 1 else f"dp {plan.dp} x cp {plan.cp} x tp {plan.tp}"
            faults.append(
                f"{field} has {part.nodes} x {part.devices_per_node} = {part.num_devices} devices, and a stage "
                f"takes {axes} = {stage} of one kind ({part.num_devices} / {stage} = "
                f"{part.num_devices / stage:.2f}); use degrees whose product divides it, and more plan.pp"
            )
    return faults


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
