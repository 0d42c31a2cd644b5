"""Check that the topology of a cluster is consistent, and that the plan fits parts with devices of different kinds."""

import math

from shardwright.config.catalog_entry import entry_faults
from shardwright.config.cluster import ClusterSpec, DeviceSpec, PartSpec
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.plan import PlanSpec
from shardwright.config.rank_order import DEFAULT_ORDER


def part_faults(job: JobSpec) -> list[str]:
    """All faults of cluster.parts, and of the plan on them."""
    if not job.cluster.parts:
        return []
    faults = _faults_beside_parts(job.cluster)
    if fault := _order_fault(job.plan):
        faults.append(fault)
    for number, part in enumerate(job.cluster.parts):
        field = f"cluster.parts[{number}]"
        faults += entry_faults(f"{field}.device", "devices", part.device, DeviceSpec)
        if fault := _fault_of_part(job.plan, part, field):
            faults.append(fault)
    return faults


def _faults_beside_parts(cluster: ClusterSpec) -> list[str]:
    """Faults of what the cluster states of all nodes while its parts state it of each."""
    faults = list[str]()
    if cluster.device != "unknown":
        faults.append(
            say(
                "cluster.device {device} is of all nodes, and cluster.parts names a device for each part; leave "
                "cluster.device out",
                device=repr(cluster.device),
            )
        )
    num_stated = cluster.devices_per_node * cluster.nodes
    if num_stated and num_stated != cluster.num_devices:
        parts = " + ".join(f"{part.nodes} x {part.devices_per_node}" for part in cluster.parts)
        faults.append(
            say(
                "cluster.nodes {nodes} x devices_per_node {devices_per_node} = {num_stated} devices, and "
                "cluster.parts has {parts} = {num_devices}; leave cluster.nodes and devices_per_node out",
                nodes=cluster.nodes,
                devices_per_node=cluster.devices_per_node,
                num_stated=num_stated,
                parts=parts,
                num_devices=cluster.num_devices,
            )
        )
    return faults


def _order_fault(plan: PlanSpec) -> str:
    """A fault if ranks of other stages stand between those of a stage; empty if there is none."""
    if plan.block >= plan.stage_ranks:
        return ""
    return say(
        "plan.order {order} has {block} of the {stage} ranks of a stage behind each other and then those of "
        "others, and cluster.parts needs a stage on devices of one kind; use the order {default}",
        order=plan.order,
        block=plan.block,
        stage=plan.stage_ranks,
        default=DEFAULT_ORDER,
    )


def _fault_of_part(plan: PlanSpec, part: PartSpec, field: str) -> str:
    """A fault if a part does not hold a whole number of stages; empty if it does."""
    stage = plan.stage_ranks
    if part.num_devices % stage == 0:
        return ""
    axes = f"dp {plan.dp} x tp {plan.tp}" if plan.cp == 1 else f"dp {plan.dp} x cp {plan.cp} x tp {plan.tp}"
    return say(
        "{field} has {nodes} x {devices_per_node} = {num_devices} devices, and a stage takes {axes} = "
        "{stage} of one kind ({num_devices} / {stage} = {quotient:.2f}); use degrees whose product "
        "divides it, and more plan.pp",
        field=field,
        nodes=part.nodes,
        devices_per_node=part.devices_per_node,
        num_devices=part.num_devices,
        axes=axes,
        stage=stage,
        quotient=part.num_devices / stage,
    )


def topology_faults(cluster: ClusterSpec) -> list[str]:
    """Faults of a level whose switches do not hold an integer number of switches of the level below, or of a torus that
    does not divide the cluster."""
    faults, lower, lower_name = list[str](), cluster.devices_per_node, "cluster.devices_per_node"
    for number, level in enumerate(cluster.topology.levels):
        name = f"cluster.topology.levels[{number}].devices"
        if lower and (level.devices % lower or level.devices <= lower):
            faults.append(
                say(
                    "{name} {devices} is no multiple of {lower_name} {lower} ({devices} / {lower} = {quotient:.2f}); "
                    "use {first}, {second}, ...",
                    name=name,
                    devices=level.devices,
                    lower_name=lower_name,
                    lower=lower,
                    quotient=level.devices / lower,
                    first=2 * lower,
                    second=4 * lower,
                )
            )
        lower, lower_name = level.devices, name
    torus = cluster.topology.torus
    size = math.prod(torus)
    if torus and cluster.num_devices % size:
        faults.append(
            say(
                "cluster.topology.torus {lengths} = {size} devices does not divide the cluster's {num_devices} "
                "({num_devices} / {size} = {quotient:.2f}); use axes whose product does",
                lengths=" x ".join(map(str, torus)),
                size=size,
                num_devices=cluster.num_devices,
                quotient=cluster.num_devices / size,
            )
        )
    return faults
