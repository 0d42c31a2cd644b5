"""Environment variables of NCCL and Gloo for a cluster's links: only documented ones that follow from fields.

NCCL User Guide, environment variables: NCCL_NET ("IB" is verbs, for InfiniBand and RoCE alike, "Socket" is TCP; if it
is set, NCCL fails rather than take a slower network), NCCL_IB_HCA and NCCL_SOCKET_IFNAME (a name behind "=" is a full
name, and not a prefix), NCCL_MNNVL_ENABLE (1: fail if NVLink does not reach the other servers of its domain).
"""

from dataclasses import dataclass

from shardwright.config.base import PlanError
from shardwright.config.cluster_facts import device_entry
from shardwright.config.job import JobSpec
from shardwright.config.network_facts import NETWORKS
from shardwright.config.phrase import say
from shardwright.config.units import counted, counted_phrase
from shardwright.report.launch.server_layout import ServerLayout


@dataclass(frozen=True)
class Placeholder:
    """A variable without a known value: the text that stands for the value, and its meaning."""

    variable: str
    value: str
    meaning: str


@dataclass(frozen=True)
class LinkEnvironment:
    """Variables of the ranks, the variables that the user has to set, and notes."""

    variables: dict[str, str]
    placeholders: tuple[Placeholder, ...] = ()
    notes: tuple[str, ...] = ()


def link_environment(job: JobSpec, layout: ServerLayout, on_cpu: bool) -> LinkEnvironment:
    """The variables for a job's ranks. PlanError if a server does not have as many adapters as rails."""
    network = job.cluster.network
    if layout.servers == 1:
        return LinkEnvironment({})
    uses_network = layout.servers > layout.servers_per_node  # not only fast links
    if on_cpu:
        library, variables = "Gloo", {}
        name = "GLOO_SOCKET_IFNAME"
    else:
        library, name = "NCCL", "NCCL_SOCKET_IFNAME"
        has_nvlink = layout.servers_per_node > 1 and device_entry(job.cluster.device).link_name == "NVLink"
        variables = {"NCCL_MNNVL_ENABLE": "1"} if has_nvlink else {}
        if uses_network and NETWORKS[network.kind].nccl_net:
            variables["NCCL_NET"] = NETWORKS[network.kind].nccl_net
    notes, placeholders = list[str](), []
    if network.interface:
        variables[name] = network.interface if on_cpu else f"={network.interface}"
    else:
        placeholders.append(Placeholder(name, "INTERFACE", "the interface by which the nodes meet, such as eth0"))
        notes.append(
            say(
                "the interface by which the nodes meet is not said, so {library} looks for one; where it takes the "
                "wrong one, set {name} in what is written, or cluster.network.interface",
                library=library,
                name=name,
            )
        )
    if not on_cpu and uses_network and network.kind == "unknown":
        notes.append(
            say(
                "whether InfiniBand, RoCE or TCP joins the nodes is not said, so NCCL takes what it finds, which may "
                "be TCP; set cluster.network.kind"
            )
        )
    if not on_cpu and uses_network and NETWORKS[network.kind].adapter:
        _set_adapters(job, layout, variables, placeholders, notes)
    return LinkEnvironment(variables, tuple(placeholders), tuple(notes))


def _set_adapters(
    job: JobSpec, layout: ServerLayout, variables: dict[str, str], placeholders: list[Placeholder], notes: list[str]
) -> None:
    """Add NCCL_IB_HCA to the variables, or a placeholder for it and a note."""
    network, rails = job.cluster.network, rails_of_server(job, layout)
    adapters = counted(rails, NETWORKS[network.kind].adapter)
    if network.adapters and len(network.adapters) != rails:
        stated_rails = job.cluster.topology.rails
        origin = say("is {rails}", rails=stated_rails) if stated_rails else say("0 means one for each device")
        fault = say(
            "cluster.network.adapters names {named}, and a server of {ranks_per_server} ranks has {rails}: "
            "cluster.topology.rails {origin}; name {count_needed}, or set cluster.topology.rails",
            named=len(network.adapters),
            ranks_per_server=layout.ranks_per_server,
            rails=counted_phrase(rails, "rail"),
            origin=origin,
            count_needed=rails,
        )
        raise PlanError(say("job {name}", name=job.name), [fault])
    if network.adapters:
        variables["NCCL_IB_HCA"] = f"={','.join(network.adapters)}"
        return
    placeholders.append(
        Placeholder(
            "NCCL_IB_HCA",
            "=" + ",".join(f"ADAPTER_{rail}" for rail in range(rails)),
            f"the {adapters} of a server, one a rail, as ibv_devices names them",
        )
    )
    notes.append(
        say(
            "the names of a server's {adapters} are not said, so NCCL takes all that it finds; where some are for "
            "storage, set NCCL_IB_HCA in what is written, or cluster.network.adapters",
            adapters=adapters,
        )
    )


def rails_of_server(job: JobSpec, layout: ServerLayout) -> int:
    """Network ports of one server: those of a node, shared by its servers, or one for each device."""
    stated = job.cluster.topology.rails
    return max(1, stated // layout.servers_per_node) if stated else layout.ranks_per_server
