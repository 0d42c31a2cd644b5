"""The cluster: devices, nodes and the links between them."""

from typing import Annotated

from pydantic import Field

from shardwright.spec.base import Spec


class LinkSpec(Spec):
    """One kind of link, as one device sees it."""

    bandwidth_gb_per_s: Annotated[float, Field(gt=0)] = Field(
        10.0, description="Bandwidth of one device in one direction, in 1e9 bytes per second."
    )
    latency_us: Annotated[float, Field(ge=0)] = Field(10.0, description="Latency of one message, in microseconds.")


class DeviceSpec(Spec):
    """One accelerator. Rates are dense peaks; a dtype that is not listed has no known rate."""

    name: str
    memory_gib: Annotated[float, Field(gt=0)]
    peak_tflops: dict[str, float] = Field(
        default_factory=dict, description="Dense peak by compute dtype, in 1e12 FLOP/s."
    )
    memory_gb_per_s: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Peak bandwidth of its memory, in 1e9 bytes per second; 0 is unknown."
    )
    multiprocessors: Annotated[int, Field(ge=0)] = Field(
        0, description="Streaming multiprocessors (or what runs one tile of a product at a time); 0 is unknown."
    )
    link_gb_per_s: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Links within a domain, in 1e9 bytes per second, of one device in one direction."
    )
    link_domain: Annotated[int, Field(ge=0)] = Field(0, description="Devices in such a domain; 0 is unknown.")
    host_gb_per_s: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Link to the host, in 1e9 bytes per second in one direction; 0 is unknown."
    )
    host_memory_gib: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Host memory by device, of the usual server, in GiB; 0 is unknown."
    )
    host_memory_gb_per_s: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Peak bandwidth of that memory by device, in 1e9 bytes per second; 0 is unknown."
    )
    generation: str = Field(
        "", description="Name of the calibration whose efficiencies hold for it: that of its architecture."
    )
    aliases: list[str] = Field(default_factory=list, description="What tables of measured runs call it.")
    cuda_names: list[str] = Field(
        default_factory=list, description="What the CUDA driver calls this device, so that it is recognised."
    )
    source: str = Field("", description="Where the numbers come from.")


class ClusterSpec(Spec):
    """Nodes of equal devices. `this-machine` is whatever the command runs on."""

    name: str = Field("this-machine", description="Catalog name, or any name for your own cluster.")
    device: str = Field("unknown", description="Catalog name of the device; unknown means: look when the run starts.")
    devices_per_node: Annotated[int, Field(ge=0)] = Field(
        0, description="Devices in a node; 0 means as many as this machine can host."
    )
    nodes: Annotated[int, Field(gt=0)] = Field(1, description="Number of nodes.")
    software: str = Field(
        "megatron-core",
        description="Generation of training software whose kernels and overlaps predictions count on; catalog name.",
    )
    intra_node: LinkSpec = Field(LinkSpec(), description="Link between devices of one node.")
    inter_node: LinkSpec = Field(LinkSpec(), description="Link between nodes.")

    @property
    def num_devices(self) -> int:
        """Devices in all; 0 when this machine decides."""
        return self.devices_per_node * self.nodes
