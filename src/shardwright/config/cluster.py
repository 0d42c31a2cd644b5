"""The cluster: devices, nodes and the links between them."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from shardwright.config import largest
from shardwright.config.base import SectionSpec, Spec
from shardwright.config.calibration_file import CalibrationSpec
from shardwright.config.field_types import DeviceName, Month, Ranks, RanksOr0
from shardwright.config.measured_table import MeasuredTable
from shardwright.config.network_facts import NetworkName
from shardwright.config.number_types import NUMBER_TYPES
from shardwright.config.phrase import say
from shardwright.config.units import GIB


def _shell_name(value: str) -> str:
    """Check a name: it has no characters that are special in a shell. ValueError if it has some."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,63}", value):
        raise ValueError(say("it should be a name of at most 64 letters, digits and _ . : - such as eth0 or mlx5_0"))
    return value


def _shell_name_or_empty(value: str) -> str:
    return _shell_name(value) if value else value


class NetworkSpec(Spec):
    """Kind of the network between nodes, and its names that the launcher of a job passes to NCCL and Gloo. Predictions
    read the kind, for its latencies and its share of the bandwidth."""

    kind: NetworkName = Field(
        "unknown",
        description="What joins the nodes; launch tells NCCL to use that and nothing slower, and predictions take its "
        "latencies. Unknown: InfiniBand's.",
    )
    interface: Annotated[str, AfterValidator(_shell_name_or_empty)] = Field(
        "",
        description="Interface by which nodes meet, as `ip link` names it, such as eth0; empty: NCCL and Gloo look for "
        "one.",
    )
    adapters: list[Annotated[str, AfterValidator(_shell_name)]] = Field(
        default_factory=list,
        max_length=largest.ADAPTERS,
        description="InfiniBand or RoCE adapters of a server, one for each rail, as `ibv_devices` names them, such as "
        "mlx5_0; empty: NCCL takes all that it finds.",
    )


def _checked_rate(value: float) -> float:
    """Check a rate that is a divisor if it is known. ValueError if it is too small for that, and not 0."""
    if 0 < value < largest.LEAST_RATE:
        raise ValueError(say("it should be 0, which is unknown, or at least {least:g}", least=largest.LEAST_RATE))
    return value


KnownRate = Annotated[float, Field(ge=0, le=largest.RATE), AfterValidator(_checked_rate)]


class LinkSpec(Spec):
    """One kind of link, as one device sees it."""

    bandwidth_gb_per_s: KnownRate = Field(
        0.0,
        description="Bandwidth of one device in one direction, in 1e9 bytes per second; 0 is the usual one of the "
        "device, from the catalog.",
    )
    latency_us: Annotated[float, Field(ge=0, le=largest.RATE)] = Field(
        0.0, description="Latency of one message, in microseconds; 0 is that of the device's calibration."
    )


class LevelSpec(Spec):
    """One level of switches above the nodes, as of a fat tree (Leiserson 1985)."""

    devices: Ranks = Field(description="Devices below one switch of this level.")
    share: Annotated[float, Field(ge=largest.LEAST_RATE, le=1)] = Field(
        1.0,
        description="Bandwidth upward, as a share of what the devices below have: 1 / 7 where it is 7 times "
        "oversubscribed.",
    )


class TopologySpec(Spec):
    """The links between nodes, or between the devices of a torus."""

    levels: list[LevelSpec] = Field(
        default_factory=list,
        max_length=largest.SWITCH_LEVELS,
        description="Levels of switches above the nodes, lowest first; none is a full fat tree.",
    )
    rails: RanksOr0 = Field(
        0, description="Network ports of a node, each of inter_node's bandwidth; 0 is one for each device."
    )
    torus: list[Ranks] = Field(
        default_factory=list,
        max_length=largest.TORUS_AXES,
        description="Devices along each axis of a 2-D or 3-D torus, in which intra_node's bandwidth is that of all "
        "links of a device; plan axes lie in it in the order tp, cp, dp, pp.",
    )


_MOST_OF_PEAK = 1.01  # highest share of the peak that a measured product may reach, because both are rounded


_RESERVED = 0.012  # share of a device's memory that it does not offer, if its entry has no reserved_gib
_HEADROOM = 0.04  # further share that a process of this runtime needs, if its entry has no headroom_gib


class DeviceSpec(Spec):
    """One accelerator. Rates are dense peaks; a dtype that is not listed has no known rate."""

    name: str
    memory_gib: Annotated[float, Field(ge=largest.LEAST_MEMORY_GIB, le=largest.MEMORY_GIB)]
    reserved_gib: Annotated[float, Field(ge=0, le=largest.MEMORY_GIB)] = Field(
        0.0,
        description="What of its memory no process can have, since the driver and error correction keep it: the "
        "device shows so much less, in GiB; 0 means 1.2 % of it.",
    )
    headroom_gib: Annotated[float, Field(ge=0, le=largest.MEMORY_GIB)] = Field(
        0.0,
        description="What of its memory a run of this runtime can't fill: what is reserved, the process's context, "
        "buffers of communication, and what is lost between blocks of the allocator, in GiB, at least: many "
        "communicators take more (communicator_channels); 0 means what is reserved "
        "and 4 % of it.",
    )
    communicator_channels: Annotated[int, Field(ge=0, le=64)] = Field(
        0,
        description="Channels of one of NCCL's communicators within a domain of fast links, as NCCL_DEBUG=INFO tells "
        "them (coll channels); 0: not known, and the headroom has their buffers.",
    )
    peak_tflops: dict[str, Annotated[float, Field(ge=largest.LEAST_RATE, le=largest.RATE)]] = Field(
        default_factory=dict, description="Dense peak by compute dtype, in 1e12 FLOP/s."
    )
    memory_gb_per_s: KnownRate = Field(
        0.0, description="Peak bandwidth of its memory, in 1e9 bytes per second; 0 is unknown."
    )
    multiprocessors: RanksOr0 = Field(
        0, description="Streaming multiprocessors (or what runs one tile of a product at a time); 0 is unknown."
    )
    array_side: RanksOr0 = Field(
        0,
        description="Rows of the systolic array that multiplies: products of attention, which go over the width of a "
        "head, fill no more of it; 0: none limits it.",
    )
    exponentials_t_per_s: KnownRate = Field(
        0.0,
        description="Exponentials that it takes, in 1e12 per second: attention takes one for each score, which its "
        "products do not hide; 0 is unknown, and they are counted in what its attention reaches.",
    )
    link_gb_per_s: KnownRate = Field(
        0.0, description="Links within a domain, in 1e9 bytes per second, of one device in one direction."
    )
    link_name: str = Field("", description="Name of these links, such as NVLink or PCIe; empty: not said.")
    domain: Literal["node", "slice"] = Field(
        "node", description="Word for a domain: TPUs that a torus joins are a slice, all others a node."
    )
    link_domain: RanksOr0 = Field(
        0, description="Devices in such a domain, which is the device's usual node; 1 has no such links, 0 is unknown."
    )
    server_devices: RanksOr0 = Field(
        0,
        description="Devices of one server, which an operating system sees, where fast links join several servers to a "
        "node; 0 means that a node is a server.",
    )
    network_gb_per_s: KnownRate = Field(
        0.0,
        description="Network of its usual node, in 1e9 bytes per second, of one device in one direction; 0 is unknown.",
    )
    host_gb_per_s: KnownRate = Field(
        0.0, description="Link to the host, in 1e9 bytes per second in one direction; 0 is unknown."
    )
    host_memory_gib: Annotated[float, Field(ge=0, le=largest.MEMORY_GIB)] = Field(
        0.0, description="Host memory by device, of the usual server, in GiB; 0 is unknown."
    )
    host_memory_gb_per_s: KnownRate = Field(
        0.0, description="Peak bandwidth of that memory by device, in 1e9 bytes per second; 0 is unknown."
    )
    in_use: Month = Field("", description="Month of a usual run on it; empty: the newest software is usual.")
    generation: str = Field(
        "",
        description="Calibration whose efficiencies hold for it: the name of its architecture, or the path of a TOML "
        "file like the catalog's.",
    )
    aliases: list[str] = Field(default_factory=list, description="What tables of measured runs call it.")
    cuda_names: list[str] = Field(
        default_factory=list, description="What the CUDA driver calls this device, so that it is recognised."
    )
    usd_per_hour: Annotated[float, Field(ge=0, le=largest.RATE)] = Field(
        0.0, description="Price of renting one for an hour, with its share of the server, in US dollars; 0 is unknown."
    )
    power_w: Annotated[float, Field(ge=0, le=largest.RATE)] = Field(
        0.0, description="Most power that it takes for long (TDP), in watts, without the server; 0 is unknown."
    )
    same_chip: str = Field(
        "",
        description="Device of the same chip under another power limit, on which the efficiencies of its generation "
        "were measured; empty: there is none. Rates of products and attention go as the root of power.",
    )
    hours_between_failures: KnownRate = Field(
        0.0,
        description="Mean hours of one device between failures, of any part of the cluster, that interrupt a job; a "
        "job on n devices is interrupted n times as often. 0 is unknown.",
    )
    source: str = Field("", description="Where the numbers come from.")
    sources: dict[str, str] = Field(
        default_factory=dict,
        description="Where its rates, network, price, power and failures come from, by field; prices with their date.",
    )
    constants: CalibrationSpec | None = Field(
        None, description="Constants of this very device, which hold before those of its generation."
    )
    measured: list[MeasuredTable] = Field(
        default_factory=list,
        max_length=largest.TABLES,
        description="Seconds of this runtime's operators and collectives on it, as calibrate writes them.",
    )

    @field_validator("peak_tflops")
    @classmethod
    def _names_are_known(cls, peaks: dict[str, float]) -> dict[str, float]:
        """Check the names of number types: a peak of another name would never be read."""
        known = tuple(dict.fromkeys(number.peak for number in NUMBER_TYPES.values()))
        for name in peaks:
            if name not in known:
                meant = NUMBER_TYPES[name].peak if name in NUMBER_TYPES else ""
                hint = say("did you mean {meant}?", meant=meant) if meant else say("use {names}", names=tuple(known))
                raise ValueError(
                    say(
                        "it should have names of number types, and {name} is none; {hint}",
                        name=repr(name),
                        hint=hint,
                    )
                )
        return peaks

    @field_validator("reserved_gib", "headroom_gib")
    @classmethod
    def _leaves_memory(cls, gib: float, info: ValidationInfo) -> float:
        """Check that a part of the memory is left for a plan."""
        memory_gib = info.data.get("memory_gib", 0.0)
        if 0 < memory_gib <= gib:
            raise ValueError(
                say(
                    "it should be less than the device's memory: {gib:g} GiB of {memory_gib:g} GiB leave nothing for "
                    "a plan; state a smaller one, or 0 for the usual share",
                    gib=gib,
                    memory_gib=memory_gib,
                )
            )
        return gib

    @field_validator("measured")
    @classmethod
    def _is_within_peaks(cls, tables: list[MeasuredTable], info: ValidationInfo) -> list[MeasuredTable]:
        """Check that no measured product is faster than the peak; if one is, either the table or the peak is wrong."""
        peaks: dict[str, float] = info.data.get("peak_tflops", {})
        for number, table in enumerate(tables):
            name, most = NUMBER_TYPES[table.number].peak, table.most_flops() / 1e12
            if 0 < _MOST_OF_PEAK * peaks.get(name, 0.0) < most:
                raise ValueError(
                    say(
                        "it should have no product faster than the peak, and table {number} has one of {most:.3g} "
                        "TFLOP/s where peak_tflops.{name} is {peak:.3g}; mend the one that is wrong",
                        number=number,
                        most=most,
                        name=name,
                        peak=peaks[name],
                    )
                )
        return tables

    @property
    def memory_bytes(self) -> float:
        """The device's memory in bytes."""
        return self.memory_gib * GIB

    @property
    def offered_bytes(self) -> float:
        """The bytes of memory that all processes together can have, which the device shows."""
        return max(0.0, self.memory_gib - (self.reserved_gib or _RESERVED * self.memory_gib)) * GIB

    @property
    def room_bytes(self) -> float:
        """The bytes of memory that a plan of this runtime may fill."""
        if not self.headroom_gib:
            return max(0.0, self.offered_bytes - _HEADROOM * self.memory_bytes)
        return min(self.offered_bytes, max(0.0, self.memory_gib - self.headroom_gib) * GIB)

    def peak_flops(self, number: str) -> float:
        """Dense peak rate of products in a number type such as "bf16" or "fp8", in FLOP/s; 0 if unknown."""
        return 1e12 * self.peak_tflops.get(NUMBER_TYPES[number].peak, 0.0)

    @property
    def knows_host(self) -> bool:
        """True if the rates of its host are known, so that the time of offloading can be predicted."""
        return self.host_gb_per_s > 0 and self.host_memory_gb_per_s > 0


class PartSpec(Spec):
    """Nodes of equal devices within a cluster of several kinds."""

    device: DeviceName = Field(description="Catalog name of the part's device.")
    devices_per_node: Ranks = Field(description="Devices in a node of the part.")
    nodes: Ranks = Field(1, description="Nodes of the part.")
    intra_node: LinkSpec = Field(LinkSpec(), description="Link between devices of one of its nodes.")
    inter_node: LinkSpec = Field(LinkSpec(), description="Link between its nodes.")

    @property
    def num_devices(self) -> int:
        """Number of devices of the part."""
        return self.devices_per_node * self.nodes


class ClusterSpec(SectionSpec):
    """Nodes of equal devices, or parts with different devices. `this-machine` is the machine that runs the command."""

    name: str = Field(
        "this-machine",
        description="Catalog name, the path of a TOML file like the catalog's, or any name for your own cluster.",
    )
    device: DeviceName = Field(
        "unknown",
        description="Catalog name of the device, or the path of a TOML file like the catalog's; unknown means: look "
        "when the run starts.",
    )
    devices_per_node: RanksOr0 = Field(
        0,
        description="Devices in a node; 0 means as many as this machine can host, and for predictions the usual node "
        "of the device.",
    )
    nodes: Ranks = Field(1, description="Number of nodes.")
    software: str = Field(
        "shardwright",
        description="Generation of training software whose kernels and overlaps predictions count on; catalog name, "
        "also with changes (megatron-core+overlap-dp), or the path of a TOML file like the catalog's.",
    )
    intra_node: LinkSpec = Field(LinkSpec(), description="Link between devices of one node.")
    inter_node: LinkSpec = Field(LinkSpec(), description="Link between nodes.")
    topology: TopologySpec = Field(TopologySpec(), description="How nodes are joined.")
    network: NetworkSpec = Field(NetworkSpec(), description="What joins nodes, by the names of software.")
    parts: list[PartSpec] = Field(
        default_factory=list,
        max_length=largest.PARTS,
        description="Parts with devices of different kinds, in the order of their ranks: each with device, "
        "devices_per_node, nodes, intra_node and inter_node. A pipeline stage lies within one part. Leave device, "
        "devices_per_node and nodes of the cluster out then.",
    )
    host_memory_gib: Annotated[float, Field(ge=0, le=largest.MEMORY_GIB)] = Field(
        0.0,
        description="Host memory of a node that what is offloaded may fill, in GiB; 0 means the catalog's of the "
        "device, for each of a node's devices.",
    )
    told_devices: RanksOr0 = Field(
        0,
        description="Devices that the plan is said to use; predictions note where its degrees do not make so many. 0 "
        "means that nothing is said.",
    )
    usd_per_device_hour: Annotated[float, Field(ge=0, le=largest.RATE)] = Field(
        0.0, description="What you pay for a device and hour, in US dollars; 0 means the catalog's price of the device."
    )
    power_share: Annotated[float, Field(ge=largest.LEAST_RATE, le=1)] = Field(
        1.0, description="Share of the most power of its devices that training takes; 1 is the most there can be."
    )
    pue: Annotated[float, Field(ge=1, le=largest.FACTOR)] = Field(
        1.0,
        description="Power usage effectiveness: energy that the site takes for each that its devices take, with "
        "servers, network and cooling; 1 counts the devices alone.",
    )
    same_chip: str = Field(
        "",
        description="Device of the same chip under another power limit, on which the efficiencies of its generation "
        "were measured; empty: there is none. Rates of products and attention go as the root of power.",
    )
    hours_between_failures: KnownRate = Field(
        0.0,
        description="Mean hours of one device between failures that interrupt a job; 0 means the catalog's of the "
        "device.",
    )
    checkpoint_gb_per_s: KnownRate = Field(
        0.0,
        description="Rate at which all ranks together write a checkpoint while the job waits, in 1e9 bytes per "
        "second; 0 is unknown.",
    )
    restart_s: Annotated[float, Field(ge=0, le=largest.SECONDS)] = Field(
        600.0,
        description="Seconds from a failure until the job trains again: noticing it, replacing a node, starting, "
        "reading the checkpoint. Jiang et al. 2024 (arXiv 2402.15627, section 6.3) notice and diagnose within 600.",
    )

    @property
    def num_devices(self) -> int:
        """Number of all devices; 0 if it depends on this machine."""
        return sum(part.num_devices for part in self.parts) or self.devices_per_node * self.nodes

    def alone(self, part: PartSpec) -> "ClusterSpec":
        """A part as a cluster of its own."""
        return self.model_copy(update={name: getattr(part, name) for name in PartSpec.model_fields} | {"parts": []})
