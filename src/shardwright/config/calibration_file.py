"""A calibration: the shares of their peaks that devices, links and kernels reach, and the further costs of a step.

benchmarks/fit_costs.py writes the catalog's calibrations. A device or a generation of software may name a user's file
with some of these constants; common.toml has the defaults of the others.
"""

from typing import Annotated

from pydantic import Field

from shardwright.config.base import Spec

# A share of a peak: nothing runs faster than the peak that its device states.
Share = Annotated[float, Field(ge=1e-6, le=1)]
# The ratio of two rates.
Ratio = Annotated[float, Field(ge=1e-6, le=2)]
# A share that is added or exposed, and may be 0.
Part = Annotated[float, Field(ge=0, le=1e3)]
# How much wider a range is, beside that of usual runs.
Spread = Annotated[float, Field(ge=0, le=100)]
Factor = Annotated[float, Field(ge=1e-3, le=1e3)]
Seconds = Annotated[float, Field(ge=0, le=1e3)]
Half = Annotated[float, Field(ge=0, le=1e9)]


class CalibrationSpec(Spec):
    """Constants of one generation of devices or of software."""

    name: str = ""
    product: Share = Field(0.7, description="Share of its peak that a large product reaches.")
    alone: Factor = Field(
        1.0, description="Rate of products where no other device computes, over that in runs of several."
    )
    product8: Share = Field(0.58, description="The same in fp8.")
    product4: Share = Field(0.45, description="The same in nvfp4.")
    attention_flash1: Share = Field(0.4, description="Share of the peak that FlashAttention reaches.")
    attention_flash2: Share = Field(0.55, description="The same of FlashAttention 2.")
    attention_sdpa: Share = Field(
        0.55, description="The same of torch's scaled_dot_product_attention, where it is not FlashAttention 2."
    )
    attention_cudnn: Share = Field(0.55, description="The same of cuDNN's, and of FlashAttention 3.")
    attention_float8: Share = Field(0.4, description="The same of cuDNN's in fp8, of the peak in fp8.")
    attention_backward: Ratio = Field(0.8, description="Rate of attention's backward, as a share of its forward's.")
    attention_float8_backward: Ratio = Field(0.7, description="The same of attention in fp8.")
    attention_half: Half = Field(300.0, description="Keys of a sequence at which attention reaches half its rate.")
    exponentials_hidden: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Share of the shorter of attention's products and its exponentials that the longer hides."
    )
    memory: Share = Field(0.85, description="Share of the memory's bandwidth that elementwise kernels reach.")
    inner_half: Half = Field(150.0, description="Inner dim at which a product reaches half its rate.")
    misaligned: Share = Field(0.8, description="Rate of products whose rows are not whole cache lines.")
    unaligned: Share = Field(
        0.25, description="The same of products whose rows are no multiple of 16 bytes, which tensor cores load slowly."
    )
    gap_s: Seconds = Field(2e-6, description="Seconds between two kernels that the host launched in time.")
    launch_s: Seconds = Field(1.5e-5, description="Seconds that the host takes to launch a kernel.")
    link: Share = Field(0.8, description="Share of a link's bandwidth within a node.")
    link_pcie: Share = Field(0.6, description="The same of PCIe.")
    network_default: Annotated[float, Field(ge=1, le=1e21)] = Field(
        12.5e9, description="Bandwidth of the network by device where nothing is said, in bytes a second."
    )
    switch_reduce: Part = Field(
        0.0,
        description="Share of a link's bandwidth at which switches sum the tensor of an all-reduce; 0: they can't.",
    )
    link_latency_s: Seconds = Field(3.4e-6, description="Latency of a step of a collective within a node.")
    collective_s: Seconds = Field(1.5e-5, description="Seconds that any collective takes beside its steps.")
    leak: Part = Field(0.15, description="Share of a hidden collective's time that computing is slowed by.")
    tensor_exposed: Part = Field(0.4, description="Share of overlapped tensor-parallel collectives that shows.")
    cast: Part = Field(0.6, description="Share of the traffic of casts to fp8 that is not fused.")
    imbalance: Factor = Field(1.0, description="How much more the fullest expert rank has than the mean.")
    expert_spread: Part = Field(
        0.35, description="Relative deviation of experts' rows from their mean, where a loss balances a natural gate."
    )
    bias_spread: Part = Field(
        0.014, description="The same over all data, where biases of the gate that follow its loads balance it."
    )
    text_spread: Part = Field(0.27, description="The same within texts of one kind.")
    expert_exposed: Part = Field(0.5, description="Share of tokens' journeys to experts that overlapping leaves.")
    host: Share = Field(0.8, description="Share of the bandwidth to the host and of its memory.")
    host_thread: Annotated[float, Field(ge=1, le=1e21)] = Field(
        1.34e10, description="Bytes a second that one thread of the host reads and writes in its memory."
    )
    tensor_factor: Factor = Field(1.0, description="How much longer tensor-parallel collectives take than links say.")
    shard_factor: Factor = Field(1.0, description="The same of ZeRO-3's gathers and scatters.")
    rate: Factor = Field(1.0, description="Rate of products of this software, as a share of others'.")
    step_s: Seconds = Field(0.02, description="Seconds of a step beside: host, loader, norm of gradients.")
    jitter: Part = Field(0.003, description="Share that a step is longer by, for each doubling of the nodes.")
    memory_lost: Annotated[float, Field(ge=0, le=1)] = Field(0.02, description="Share of memory lost to fragments.")
    memory_idle: Annotated[float, Field(ge=0, le=1)] = Field(
        0.12,
        description="Share of a step's memory that torch's allocator has beside what it gave out, where there is room "
        "and segments do not grow.",
    )
    stream_blocks: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0,
        description="Share of the blocks in use by a collective's stream that stays out of use until that has passed.",
    )
    context_bytes: Annotated[float, Field(ge=0, le=2**40)] = Field(
        1.2e9, description="What the driver's context takes."
    )
    low: Factor = Field(0.9, description="Measured over predicted seconds: a tenth of usual runs is below.")
    high: Factor = Field(1.1, description="And a tenth above.")
    unfitted_range: Spread = Field(
        1.0,
        description="How much wider the range is, beside that of usual runs, for a run that is like a measured one but "
        "like none that constants are fitted to.",
    )
    unmeasured_range: Spread = Field(1.0, description="The same for a run that is like no measured one.")
    device_range: Spread = Field(1.0, description="The same where few runs tell a device's rate.")
    experts_range: Spread = Field(1.0, description="The same for models with experts.")
    small_range: Spread = Field(1.0, description="The same for models with a hidden size up to 1,024.")
    software_range: Spread = Field(1.0, description="The same where nothing says what software runs.")
    host_range: Spread = Field(1.0, description="The same where all of a step is work on the host.")
