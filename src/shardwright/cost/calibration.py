"""Efficiencies, read from calibration files: the share of its peak that a device, a link or a kernel reaches.

A constant has a name such as "ampere.product": a generation of devices (catalog/calibrations/NAME.toml) and a name in
it. common.toml has the constants that a generation leaves out. A constant is never about a run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod, sqrt

import numpy as np

from shardwright.config import catalog
from shardwright.config.attention_kernels import ATTENTION_KERNELS
from shardwright.config.calibration_file import CalibrationSpec
from shardwright.config.catalog_entry import read_entry
from shardwright.config.cluster import DeviceSpec
from shardwright.config.device_name import device_name
from shardwright.config.network_facts import NETWORKS
from shardwright.config.number_types import NUMBER_TYPES, half_numbers, narrow_numbers
from shardwright.config.phrase import both, say
from shardwright.config.software import SoftwareSpec, software_of
from shardwright.config.update_passes import update_pass_bytes
from shardwright.cost.device_facts import known_fact, known_peak, link_bytes_per_s
from shardwright.cost.measured_time import MeasuredDevice, measured_device
from shardwright.layers.arrays import Numbers
from shardwright.layers.layer_tensors import FLOAT32
from shardwright.layers.query import Run

Constants = Mapping[str, float]

# Launches that take the host as long as what it does for a step behind the step's graph. An optimizer in a graph, too,
# made a step of 39.5 ms on H100 6.4 ms shorter (Megatron-LM, pull request 7446), which is 400 launches of 16 us.
_AFTER_GRAPH = 400


@lru_cache(maxsize=1)
def shipped() -> dict[str, float]:
    """All constants of the catalog, by generation and name."""
    constants: dict[str, float] = {}
    for name in catalog.names("calibrations"):
        constants |= _constants_in(name)
    return constants


def left_out() -> dict[str, dict[str, float]]:
    """The constants that differ if a family of published runs is left out of the fit, by family."""
    return catalog.read_left_out()


def left_out_generations() -> dict[str, dict[str, float]]:
    """The constants that differ if the runs on a generation of devices are left out of the fit, by generation."""
    return catalog.read_left_out_generations()


def pessimistic() -> dict[str, float]:
    """The constants, each at the unfavourable end of the fits that leave one family of runs out."""
    every_constant = shipped()
    return every_constant | {
        name.removeprefix(_PESSIMISTIC): every_constant[name]
        for name in every_constant
        if name.startswith(_PESSIMISTIC)
    }


_PESSIMISTIC = "pessimistic."


@lru_cache(maxsize=64)
def _constants_in(name: str) -> dict[str, float]:
    """The constants of one calibration, from the catalog or a file of the user's. PlanError if the file is wrong."""
    if catalog.is_file(name):
        fields = read_entry("calibrations", name, CalibrationSpec).model_dump(exclude_unset=True)
    else:
        fields = catalog.read("calibrations", name)
    return {f"{name}.{key}": float(value) for key, value in fields.items() if isinstance(value, int | float)}


@lru_cache(maxsize=64)
def device_of(name: str) -> DeviceSpec:
    """A device by catalog name, by its name in tables of runs, or from a file. KeyError tells what to do instead."""
    return read_entry("devices", name if catalog.is_file(name) else device_name(name), DeviceSpec)


def software_under(run: Run) -> SoftwareSpec:
    """The software of a run with the choices of its plan: number types of gradients, of moments and of rows sent to
    experts, and how tokens are dispatched."""
    grid = run.grid
    numbers = (grid.precision, grid.gradient_bytes, grid.reduce_bytes, grid.moment_bytes, grid.has_masters)
    in_float8 = (grid.float8_weight_gradients, grid.float8_dispatch)
    return _software_with(run.software, numbers, in_float8, grid.dispatch == "node-aware")


@lru_cache(maxsize=64)
def _software_with(
    name: str, numbers: tuple[str, int, int, int, bool], in_float8: tuple[bool, bool], is_node_aware: bool
) -> SoftwareSpec:
    software = software_of(name)
    precision, gradient_bytes, reduce_bytes, moment_bytes, has_masters = numbers
    in_bf16, number_bytes = precision == "bf16", NUMBER_TYPES[precision].num_bytes
    # Gradients of parameters in float32 are in float32.
    usual = software.bf16_gradient_bytes if in_bf16 else number_bytes * (number_bytes == FLOAT32)
    copy = software.bf16_gradient_copy if in_bf16 and (gradient_bytes or usual) == usual else 0
    changes = {} if has_masters else {"bf16_moments_update": software.narrow_update}
    gradient = gradient_bytes or usual or software.gradient_bytes
    passes = update_pass_bytes(software.update_passes, gradient, is_scaled=precision == "fp16")
    return software.model_copy(
        update=changes
        | {
            "gradient_bytes": gradient,
            "update": software.update + passes,
            "bf16_gradient_copy": copy,
            "step_bytes": 0.0 if copy else software.step_bytes,
            "update_blocks": software.bf16_update_blocks if in_bf16 else software.update_blocks,
            "reduce_bytes": reduce_bytes or usual or software.reduce_bytes,
            "zero": software.zero.model_copy(update={"scattered_bytes": 0}) if reduce_bytes or usual else software.zero,
            "moment_bytes": moment_bytes or software.moment_bytes,
            "float8_weight_gradients": software.float8_weight_gradients or in_float8[0],
            "dispatch_bytes": 1 if in_float8[1] else software.dispatch_bytes,
            "expert_dedupe": software.expert_dedupe or is_node_aware,
        }
    )


def known_host(run: Run, rates: "Rates") -> "Rates":
    """The rates of a plan that offloads to the host. KeyError if those of the device's host are unknown."""
    if not (rates.host_bytes_per_s and rates.host_memory_bytes_per_s):
        raise KeyError(
            say(
                "the plan keeps something in host memory, and {device} has no known host; add host_gb_per_s, "
                "host_memory_gib and host_memory_gb_per_s to its file in devices",
                device=run.device,
            )
        )
    return rates


@dataclass(frozen=True)
class Rates:
    """The rates that a device reaches under a generation of software, in FLOP/s, bytes/s and seconds.

    `link` and `network` are of one device in one direction; `domain` devices share the faster one.
    """

    flops: float
    flops_product: float  # with the number type of the products: more than `flops` with fp8
    alone: float  # rate of wide products where no other device computes, over `flops`
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    domain: int
    multiprocessors: int
    switch_reduce_bytes_per_s: float  # bytes/s at which switches sum the tensor of an all-reduce; 0 if they can't
    link_latency_s: float  # of a step of a collective within a domain
    network_latency_s: float  # of a step between domains
    switched_trees: bool  # NCCL sums by trees over domains inside which switches sum
    peer_s: float  # that an all-to-all between domains takes longer for each further rank
    collective_s: float  # that any collective takes beside its steps
    aggregated_trees: bool  # True if gathers and scatters over nodes with one rank each may take them
    gap_s: float  # between two kernels that the host launched in time
    launch_s: float  # of the host, to launch a kernel
    attention_number: str  # number type of its products
    attention_forward: float
    attention_backward: float
    exponentials: float  # by second; infinite if they are unknown
    exponentials_hidden: float  # share of the shorter of exponentials and products that the longer hides
    attention_half: float  # keys of a sequence at which attention reaches half its rate
    inner_half: float  # inner dim at which a product reaches half its rate
    misaligned: float  # share of its rate that a product with rows of no whole cache lines reaches
    unaligned: float  # the same with rows of no multiple of 16 bytes
    leak: float  # share of a hidden collective's time that computing is slowed by
    step_s: float  # further seconds of a step: the host, the loader, the norm of gradients
    tensor_exposed: float  # exposed share of overlapped tensor-parallel collectives
    jitter: float  # relative increase of a step for each doubling of the nodes
    imbalance: float  # rows of the fullest expert rank over those of the mean rank
    expert_spread: float  # relative deviation of experts' rows under a loss of balance
    bias_spread: float  # the same over all data, if biases of the gate follow loads
    text_spread: float  # the same within texts of one kind
    expert_exposed: float  # exposed share of overlapped dispatch and combine
    tensor_factor: float  # seconds of tensor-parallel collectives over those that the links explain
    shard_factor: float  # the same for ZeRO-3's gathers and scatters
    cast: float  # share of the traffic of casts to fp8 that is not fused
    element_bytes: int  # of a number of 16 or 32 bits
    host_bytes_per_s: float  # between the device and its host, in one direction; 0 is unknown
    host_memory_bytes_per_s: float  # of the host's memory, for each device; 0 is unknown
    host_thread_bytes_per_s: float  # that one thread of the host reads and writes in its memory
    measured: MeasuredDevice | None = None  # measurements of the device, which take precedence over these rates
    number: str = "bf16"  # number type of the computation, except narrow products
    busy: Numbers = 1  # ranks that compute at the same time

    @property
    def flops_wide(self) -> Numbers:
        """Rate of products in the number type of the computation, on as many devices as compute."""
        return self.flops * np.where(np.asarray(self.busy) > 1, 1.0, self.alone)


def product_constants(number: str) -> tuple[str, ...]:
    """The names of the constants that scale the peak of products: wide ones, and narrow ones if `number` is narrow."""
    facts = NUMBER_TYPES[number]
    return ("product", facts.product_constant) if facts.is_narrow else ("product",)


def peak_flops(run: Run) -> float:
    """The device's peak in the number type of the run's products, in FLOP/s; of 16 bits if that is unknown."""
    device = device_of(run.device)
    numbers = (run.grid.precision, *(number.name for number in half_numbers()))
    return next((peak for number in numbers if (peak := device.peak_flops(number))), 0.0)


def constant(constants: Constants, generation: str, name: str) -> float:
    """A constant of a generation of devices or of software, or the common one.

    KeyError names the missing constant and its file.
    """
    file_constants = _constants_in(generation) if catalog.is_file(generation) else {}
    for key in (f"{generation}.{name}", f"common.{name}"):
        for source in (constants, file_constants):
            if key in source:
                return source[key]
    raise KeyError(
        say(
            "no calibration {name} for {quoted}; add it to catalog/calibrations/{generation}.toml",
            name=repr(name),
            quoted=repr(generation),
            generation=generation,
        )
    )


def device_constant(constants: Constants, device: DeviceSpec, name: str) -> float:
    """A constant for a device: its own, that of its generation, or the common one. KeyError as in `constant`."""
    if device.constants is not None and name in device.constants.model_fields_set:
        return float(getattr(device.constants, name))
    return constant(constants, device.generation, name)


def _attention_constant(constants: Constants, device: DeviceSpec, software: SoftwareSpec) -> str:
    """The name of the constant for the share of the peak that this software's attention reaches."""
    kernel = ATTENTION_KERNELS[software.attention]
    if kernel.otherwise and not is_known(constants, device, kernel.constant):
        return kernel.otherwise
    return kernel.constant


def is_known(constants: Constants, device: DeviceSpec, name: str) -> bool:
    """True if a device or its generation has a value of its own for a constant; else the common one applies."""
    is_own = device.constants is not None and name in device.constants.model_fields_set
    key, file_constants = f"{device.generation}.{name}", {}
    if catalog.is_file(device.generation):
        file_constants = _constants_in(device.generation)
    return is_own or key in constants or key in file_constants


def power_share(device: DeviceSpec) -> float:
    """Share of its peak that a device reaches, over that which the device of the same chip reaches; 1 if there is none.

    Products and attention run at the clock that the power limit sustains. Power goes as the clock times the square of
    the voltage, and voltage rises less than the clock does: rates go as the root of power. H100 at 500 W and at 700 W,
    both fitted by themselves, reached 0.60 and 0.71 of the same peak: 0.84, the root of 5 / 7.
    """
    if not device.same_chip:
        return 1.0
    measured = device_of(device.same_chip)
    if not (device.power_w and measured.power_w):
        raise KeyError(
            say(
                "{device} has no known power beside that of {measured}; add power_w to its file",
                device=device.name,
                measured=measured.name,
            )
        )
    peaks = [entry.peak_flops(half_numbers()[0].name) for entry in (measured, device)]
    return sqrt(device.power_w / measured.power_w) * (peaks[0] / peaks[1] if all(peaks) else 1.0)


@lru_cache(maxsize=64)
def _check_shares_of_peak(device_entry: str, software_entry: str) -> None:
    """Raise KeyError if the product of its constants makes a kernel faster than the peak of its device.

    All number types are checked, even if no run uses them. The constants are those of the files: an analysis may scale
    its own, so that computing takes no time.
    """
    device, software = device_of(device_entry), software_of(software_entry)

    def device_rate(name: str) -> float:
        return device_constant(shipped(), device, name)

    rate = constant(shipped(), software.calibration, "rate")
    forward = _attention_constant(shipped(), device, software)
    backward = ATTENTION_KERNELS[software.attention].backward_constant
    power = {"share by power": power_share(device)} if device.same_chip else {}
    pairs = [
        {name: device_rate(name), "rate": rate} | power
        for name in ("product", *(number.product_constant for number in narrow_numbers()))
    ]
    pairs.append({forward: device_rate(forward), backward: device_rate(backward)} | power)
    faults = []
    for pair in pairs:
        if (share := prod(pair.values())) > 1:
            product = " x ".join(f"{name} {value:g}" for name, value in pair.items())
            faults.append(f"{product} = {share:.4g}")
    if faults:
        raise KeyError(
            say(
                "{shares} of the peak of {device}, by the calibrations {generation} and {calibration}, and no kernel "
                "is faster than its device's peak; make one of them smaller, or state a higher peak_tflops in the "
                "device's file",
                shares=both(faults),
                device=device.name,
                generation=device.generation,
                calibration=software.calibration,
            )
        )


@lru_cache(maxsize=64)
def _measured_of(name: str) -> MeasuredDevice | None:
    return measured_device(device_of(name))


def _step_s(device_rate: Callable[[str], float], software: SoftwareSpec) -> float:
    """Seconds of a step beside its work on the device.

    While a graph of forward and backward runs, the host loads what comes next and waits. The optimizer is behind it.
    """
    usual_s = device_rate("step_s")
    return min(usual_s, _AFTER_GRAPH * device_rate("launch_s")) if software.graphs_step else usual_s


def rates_of(run: Run, constants: Constants) -> Rates:
    """The rates of a run. KeyError names what is unknown."""
    device, software = device_of(run.device), software_of(run.software)

    def device_rate(name: str) -> float:
        return device_constant(constants, device, name)

    def software_rate(name: str) -> float:
        return constant(constants, software.calibration, name)

    precision, wide = run.grid.precision, run.grid.wide_number
    narrow_constant = NUMBER_TYPES[precision].product_constant
    network = NETWORKS[run.network]
    _check_shares_of_peak(run.device, run.software)
    share = power_share(device)
    flops = product = known_peak(device, wide) * device_rate("product") * software_rate("rate") * share
    if narrow_constant:
        product = known_peak(device, precision) * device_rate(narrow_constant) * software_rate("rate") * share
    filled = min(1.0, run.shape.head_dim / device.array_side) if device.array_side else 1.0
    is_pcie = device.link_name == "PCIe"  # whose switches sum nothing
    usual_network = device.network_gb_per_s * 1e9 or device_rate("network_default")
    kernel = ATTENTION_KERNELS[software.attention]
    attention_number = kernel.number or wide
    other_kernel = say(", or name software whose attention is in 16 bits")
    attention = known_peak(device, attention_number, other_kernel) * share
    # Of an array that is filled in part products alone take longer, and not what the kernel does beside them.
    attention /= 1 / device_rate(_attention_constant(constants, device, software)) + 1 / filled - 1
    return Rates(
        flops=flops, flops_product=product,
        memory_bytes_per_s=known_fact(device, "memory_gb_per_s") * 1e9 * device_rate("memory"),
        link_bytes_per_s=link_bytes_per_s(run, device) * device_rate("link_pcie" if is_pcie else "link"),
        network_bytes_per_s=network.bytes_per_s(run.network_bytes_per_s or usual_network, max(1, run.devices_per_node)),
        domain=max(1, run.devices_per_node), multiprocessors=int(known_fact(device, "multiprocessors")),
        link_latency_s=run.node_latency_s or device_rate("link_latency_s"),
        network_latency_s=run.network_latency_s or network.step_s, gap_s=device_rate("gap_s"),
        launch_s=device_rate("launch_s"), switched_trees=network.switched_trees,
        peer_s=network.peer_s, collective_s=device_rate("collective_s"),
        switch_reduce_bytes_per_s=0.0 if is_pcie else link_bytes_per_s(run, device) * device_rate("switch_reduce"),
        attention_number=attention_number,
        attention_forward=attention, attention_backward=attention * device_rate(kernel.backward_constant),
        exponentials=device.exponentials_t_per_s * 1e12 * share or inf,
        exponentials_hidden=device_rate("exponentials_hidden"), aggregated_trees=software.aggregated_trees,
        attention_half=device_rate("attention_half"), inner_half=device_rate("inner_half"),
        alone=device_rate("alone"),
        misaligned=device_rate("misaligned"), unaligned=device_rate("unaligned"), element_bytes=run.grid.element_bytes,
        host_bytes_per_s=device.host_gb_per_s * 1e9 * device_rate("host"),
        host_memory_bytes_per_s=device.host_memory_gb_per_s * 1e9 * device_rate("host"), leak=device_rate("leak"),
        host_thread_bytes_per_s=device_rate("host_thread"),
        step_s=_step_s(device_rate, software), tensor_exposed=device_rate("tensor_exposed"),
        jitter=device_rate("jitter"), imbalance=device_rate("imbalance"),
        expert_spread=device_rate("expert_spread"), cast=device_rate("cast"),
        bias_spread=device_rate("bias_spread"), text_spread=device_rate("text_spread"),
        expert_exposed=device_rate("expert_exposed"),
        tensor_factor=software_rate("tensor_factor"), shard_factor=software_rate("shard_factor"),
        measured=_measured_of(run.device), number=wide, busy=run.grid.world,
    )  # fmt: skip
