"""Environment variables of NCCL and Gloo for a cluster's links: only documented ones that follow from fields.

NCCL User Guide, environment variables: NCCL_NET ("IB" is verbs, for InfiniBand and RoCE alike, "Socket" is TCP; where
it is set, NCCL fails rather than take a slower one), NCCL_IB_HCA and NCCL_SOCKET_IFNAME (behind "=" a name is a whole
one, and not the beginning of several), NCCL_MNNVL_ENABLE (1: fail where NVLink does not reach the other servers of its
domain).
"""

from dataclasses import dataclass

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.units import counted
from shardwright.config.usual_links import device_entry
from shardwright.report.launch.seats import Seats

_NET = {"infiniband": "IB", "roce": "IB", "tcp": "Socket"}
_ADAPTER = {"infiniband": "InfiniBand adapter", "roce": "RoCE adapter"}


@dataclass(frozen=True)
class Placeholder:
    """A variable whose value nobody has said: what stands for it, and what it is."""

    variable: str
    value: str
    meaning: str


@dataclass(frozen=True)
class LinkEnvironment:
    """Variables of the ranks, what of them is left to the user, and what is said beside."""

    variables: dict[str, str]
    placeholders: tuple[Placeholder, ...] = ()
    notes: tuple[str, ...] = ()


def link_environment(job: JobSpec, seats: Seats, on_cpu: bool) -> LinkEnvironment:
    """The variables for a job's ranks. PlanError where a server has not as many adapters as rails."""
    network = job.cluster.network
    if seats.servers == 1:
        return LinkEnvironment({})
    crosses = seats.servers > seats.servers_per_node  # the network, and not fast links alone
    if on_cpu:
        library, variables = "Gloo", {}
        name = "GLOO_SOCKET_IFNAME"
    else:
        library, name = "NCCL", "NCCL_SOCKET_IFNAME"
        joined = seats.servers_per_node > 1 and device_entry(job.cluster.device).link_name == "NVLink"
        variables = {"NCCL_MNNVL_ENABLE": "1"} if joined else {}
        if network.kind != "unknown" and crosses:
            variables["NCCL_NET"] = _NET[network.kind]
    notes, placeholders = [], []
    if network.interface:
        variables[name] = network.interface if on_cpu else f"={network.interface}"
    else:
        placeholders.append(Placeholder(name, "INTERFACE", "the interface by which the nodes meet, such as eth0"))
        notes.append(
            f"the interface by which the nodes meet is not said, so {library} looks for one; where it takes the wrong "
            f"one, set {name} in what is written, or cluster.network.interface"
        )
    if not on_cpu and crosses and network.kind == "unknown":
        notes.append(
            "whether InfiniBand, RoCE or TCP joins the nodes is not said, so NCCL takes what it finds, which may be "
            "TCP; set cluster.network.kind"
        )
    if not on_cpu and crosses and network.kind in _ADAPTER:
        _adapters(job, seats, variables, placeholders, notes)
    return LinkEnvironment(variables, tuple(placeholders), tuple(notes))


def _adapters(
    job: JobSpec, seats: Seats, variables: dict[str, str], placeholders: list[Placeholder], notes: list[str]
) -> None:
    """The value of NCCL_IB_HCA, or its placeholder."""
    network, rails = job.cluster.network, rails_of_server(job, seats)
    what = counted(rails, _ADAPTER[network.kind])
    if network.adapters and len(network.adapters) != rails:
        own = job.cluster.topology.rails
        why = f"is {own}" if own else "0 means one for each device"
        fault = (
            f"cluster.network.adapters names {len(network.adapters)}, and a server of {seats.ranks_per_server} ranks "
            f"has {counted(rails, 'rail')}: cluster.topology.rails {why}; name {rails}, or set cluster.topology.rails"
        )
        raise PlanError(f"job {job.name}", [fault])
    if network.adapters:
        variables["NCCL_IB_HCA"] = f"={','.join(network.adapters)}"
        return
    placeholders.append(
        Placeholder(
            "NCCL_IB_HCA",
            "=" + ",".join(f"ADAPTER_{rail}" for rail in range(rails)),
            f"the {what} of a server, one a rail, as ibv_devices names them",
        )
    )
    notes.append(
        f"the names of a server's {what} are not said, so NCCL takes all that it finds; where some are for storage, "
        "set NCCL_IB_HCA in what is written, or cluster.network.adapters"
    )


def rails_of_server(job: JobSpec, seats: Seats) -> int:
    """Network ports of one server: those of a node, shared by its servers, or one for each device."""
    stated = job.cluster.topology.rails
    return max(1, stated // seats.servers_per_node) if stated else seats.ranks_per_server
