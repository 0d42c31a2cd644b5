"""Efficiencies, read from calibration files: what share of its peak a device, a link and a kernel reach.

A constant has a name such as "ampere.product": that of a generation of devices (catalog/calibrations/NAME.toml) and its
own. What a generation does not say, common.toml says. A constant is never about a run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod

from shardwright.config import catalog
from shardwright.config.calibration_file import CalibrationSpec
from shardwright.config.catalog_entry import read_entry
from shardwright.config.cluster import PEAK_NAMES, DeviceSpec
from shardwright.config.device_name import device_name
from shardwright.config.software import SoftwareSpec, software_of
from shardwright.cost.measured_time import MeasuredDevice, measured_device
from shardwright.workload.arrays import Numbers
from shardwright.workload.query import Run

Constants = Mapping[str, float]


@lru_cache(maxsize=1)
def shipped() -> dict[str, float]:
    """All constants of the catalog, by generation and name."""
    constants: dict[str, float] = {}
    for name in catalog.names("calibrations"):
        constants |= _constants_in(name)
    return constants


def left_out() -> dict[str, dict[str, float]]:
    """The constants that differ where a family of published runs is left out of the fit, by family."""
    return catalog.read_left_out()


def pessimistic() -> dict[str, float]:
    """The constants, each at the unfavourable end of the fits that leave one family of runs out."""
    known = shipped()
    return known | {name.removeprefix(_PESSIMISTIC): known[name] for name in known if name.startswith(_PESSIMISTIC)}


_PESSIMISTIC = "pessimistic."


@lru_cache(maxsize=64)
def _constants_in(name: str) -> dict[str, float]:
    """The constants of one calibration, of the catalog or in a file of your own. PlanError if that is wrong."""
    if catalog.is_file(name):
        fields = read_entry("calibrations", name, CalibrationSpec).model_dump(exclude_unset=True)
    else:
        fields = catalog.read("calibrations", name)
    return {f"{name}.{key}": float(value) for key, value in fields.items() if isinstance(value, int | float)}


@lru_cache(maxsize=64)
def device_of(name: str) -> DeviceSpec:
    """A device by catalog name, by what tables of runs call it, or of a file of yours. KeyError with a way out."""
    return read_entry("devices", name if catalog.is_file(name) else device_name(name), DeviceSpec)


def software_under(run: Run) -> SoftwareSpec:
    """The software of a run as its plan has it: in which numbers gradients, moments and rows to experts are, how tokens
    cross."""
    grid = run.grid
    numbers = (grid.precision, grid.gradient_bytes, grid.reduce_bytes, grid.moment_bytes)
    in_float8 = (grid.float8_weight_gradients, grid.float8_dispatch)
    return _software_with(run.software, numbers, in_float8, grid.dispatch == "node-aware")


@lru_cache(maxsize=64)
def _software_with(
    name: str, numbers: tuple[str, int, int, int], in_float8: tuple[bool, bool], is_node_aware: bool
) -> SoftwareSpec:
    software = software_of(name)
    precision, gradient_bytes, reduce_bytes, moment_bytes = numbers
    usual = software.bf16_gradient_bytes if precision == "bf16" else 0
    return software.model_copy(
        update={
            "gradient_bytes": gradient_bytes or usual or software.gradient_bytes,
            "reduce_bytes": reduce_bytes or usual or software.reduce_bytes,
            "moment_bytes": moment_bytes or software.moment_bytes,
            "float8_weight_gradients": software.float8_weight_gradients or in_float8[0],
            "dispatch_bytes": 1 if in_float8[1] else software.dispatch_bytes,
            "expert_dedupe": software.expert_dedupe or is_node_aware,
        }
    )


def known_host(run: Run, rates: "Rates") -> "Rates":
    """The rates, where a plan sends to the host. KeyError if what its device has is not known."""
    if not (rates.host and rates.host_memory):
        raise KeyError(
            f"the plan keeps something in host memory, and {run.device} has no known host; add host_gb_per_s, "
            "host_memory_gib and host_memory_gb_per_s to its file in devices"
        )
    return rates


@dataclass(frozen=True)
class Rates:
    """The rates that a device reaches under a generation of software, in FLOP/s, bytes/s and seconds.

    `link` and `network` are of one device in one direction; `domain` devices share the faster one.
    """

    flops: float
    flops_product: float  # with the number type of the products: more than `flops` with fp8
    memory: float
    link: float
    network: float
    domain: int
    multiprocessors: int
    link_latency_s: float
    network_latency_s: float
    gap_s: float
    attention_forward: float
    attention_backward: float
    attention_half: float  # keys of a sequence at which attention reaches half its rate
    inner_half: float  # inner dim at which a product reaches half its rate
    misaligned: float
    leak: float  # share of a hidden collective's time that computing is slowed by
    step_s: float  # what a step takes beside: the host, the loader, the norm of gradients
    tensor_exposed: float  # share of overlapped tensor-parallel collectives that shows
    jitter: float  # share that a step is longer by, for each doubling of the nodes
    imbalance: float  # how much more the fullest expert rank has than the mean
    expert_exposed: float  # share of tokens' journeys that overlapping leaves
    tensor_factor: float  # how much longer than the links explain tensor-parallel collectives take
    shard_factor: float  # the same of ZeRO-3's gathers and scatters
    flush: float  # microbatches that a pipeline takes more to fill and to drain than it has ranks
    turn_s: float  # what each replica takes to broadcast its part of the updated parameters
    low: float  # measured over predicted seconds: a tenth of all runs is below,
    high: float  # and a tenth above
    cast: float  # share of the traffic of casts to fp8 that is not fused
    element_bytes: int  # of a number that is not narrow
    host: float  # between the device and its host, in one direction; 0 is unknown
    host_memory: float  # of the host, by device; 0 is unknown
    measured: MeasuredDevice | None = None  # what was measured of the device itself, which holds before all of these
    number: str = "bf16"  # of what is computed, but for narrow products
    busy: Numbers = 1  # ranks that compute at the same time


# Number types narrower than 16 bits, and the efficiency of products in each.
_NARROW = {"fp8": "product8", "mxfp8": "product8mx", "nvfp4": "product4"}


def product_constants(number: str) -> tuple[str, ...]:
    """The constants that say which share of its peak a product reaches: of narrow ones, and of the others beside."""
    return ("product", _NARROW[number]) if number in _NARROW else ("product",)


def peak_flops(run: Run) -> float:
    """The device's peak in the number type of the run's products, in FLOP/s; of 16 bits where that is not known."""
    device = device_of(run.device)
    return device.peak_flops(run.grid.precision) or device.peak_flops("bf16") or device.peak_flops("fp16")


def _known_peak(device: DeviceSpec, number: str) -> float:
    """The device's peak in FLOP/s. KeyError, with what to add, where it is not known."""
    if not (peak := device.peak_flops(number)):
        name = PEAK_NAMES[number]
        known = [other for other in ("bf16", "fp16", "float32") if device.peak_flops(other)]
        instead = f", or set precision.compute to {' or '.join(known)}" if known else ""
        instead = ", or set precision.float8 to none" if number in _NARROW else instead
        raise KeyError(f"{device.name} has no peak rate for {name}; add peak_tflops.{name} to its file{instead}")
    return peak


def _known(device: DeviceSpec, field: str, instead: str = "") -> float:
    """A field of the device that is 0 where it is not known. KeyError, with what to add or to set instead, if so."""
    value: float = getattr(device, field)
    if not value:
        way_out = "; add it to its file" + (f", or set {instead}" if instead else "")
        raise KeyError(f"{device.name} has no known {field}{way_out}")
    return value


def _link_bytes_per_s(run: Run, device: DeviceSpec) -> float:
    """Rate between two devices of a node; without bound where a node has one. KeyError where it is not known."""
    if run.devices_per_node <= 1:
        return run.node_bytes_per_s or device.link_gb_per_s * 1e9 or inf
    return run.node_bytes_per_s or _known(device, "link_gb_per_s", "cluster.intra_node.bandwidth_gb_per_s") * 1e9


def constant(constants: Constants, generation: str, name: str) -> float:
    """A constant of a generation of devices or of software, or the common one.

    KeyError names what is missing and where it belongs.
    """
    of_file = _constants_in(generation) if catalog.is_file(generation) else {}
    for key in (f"{generation}.{name}", f"common.{name}"):
        for given in (constants, of_file):
            if key in given:
                return given[key]
    raise KeyError(f"no calibration {name!r} for {generation!r}; add it to catalog/calibrations/{generation}.toml")


def device_constant(constants: Constants, device: DeviceSpec, name: str) -> float:
    """A constant that holds for a device: its own, that of its generation, or the common one. KeyError as `constant`
    raises it."""
    if device.constants is not None and name in device.constants.model_fields_set:
        return float(getattr(device.constants, name))
    return constant(constants, device.generation, name)


def _attention_constant(software: SoftwareSpec) -> str:
    """The constant that says which share of the peak this software's attention reaches."""
    return f"attention_{software.attention if software.attention not in ('torch', 'softmax') else 'flash2'}"


@lru_cache(maxsize=64)
def _check_shares_of_peak(device_entry: str, software_entry: str) -> None:
    """Raise KeyError where constants that are multiplied make a kernel faster than the peak of its device.

    Products of all number types are checked, also of those that no run uses. The constants are those of the files: an
    analysis may scale its own, so that computing takes no time.
    """
    device, software = device_of(device_entry), software_of(software_entry)

    def of(name: str) -> float:
        return device_constant(shipped(), device, name)

    rate = constant(shipped(), software.calibration, "rate")
    kernel = _attention_constant(software)
    pairs = [{name: of(name), "rate": rate} for name in ("product", *_NARROW.values())]
    pairs.append({kernel: of(kernel), "attention_backward": of("attention_backward")})
    faults = []
    for pair in pairs:
        if (share := prod(pair.values())) > 1:
            stated = " x ".join(f"{name} {value:g}" for name, value in pair.items())
            faults.append(f"{stated} = {share:.4g}")
    if faults:
        raise KeyError(
            f"{' and '.join(faults)} of the peak of {device.name}, by the calibrations {device.generation} and "
            f"{software.calibration}, and no kernel is faster than its device's peak; make one of them smaller, or "
            "state a higher peak_tflops in the device's file"
        )


@lru_cache(maxsize=64)
def _measured_of(name: str) -> MeasuredDevice | None:
    return measured_device(device_of(name))


def rates_of(run: Run, constants: Constants) -> Rates:
    """The rates that hold for a run. KeyError says what is not known."""
    device, software = device_of(run.device), software_of(run.software)

    def of(name: str) -> float:
        return device_constant(constants, device, name)

    def its(name: str) -> float:
        return constant(constants, software.calibration, name)

    precision = run.grid.precision
    wide = "bf16" if precision in _NARROW else precision
    _check_shares_of_peak(run.device, run.software)
    flops = product = _known_peak(device, wide) * of("product") * its("rate")
    if precision in _NARROW:
        product = _known_peak(device, precision) * of(_NARROW[precision]) * its("rate")
    attention = _known_peak(device, wide) * of(_attention_constant(software))
    return Rates(
        flops=flops, flops_product=product, memory=_known(device, "memory_gb_per_s") * 1e9 * of("memory"),
        link=_link_bytes_per_s(run, device) * of("link"),
        network=(run.network_bytes_per_s or of("network_default")) * of("network"),
        domain=max(1, run.devices_per_node), multiprocessors=int(_known(device, "multiprocessors")),
        link_latency_s=run.node_latency_s or of("link_latency_s"),
        network_latency_s=run.network_latency_s or of("network_latency_s"), gap_s=of("gap_s"),
        attention_forward=attention, attention_backward=attention * of("attention_backward"),
        attention_half=of("attention_half"), inner_half=of("inner_half"), misaligned=of("misaligned"),
        element_bytes=run.grid.element_bytes, host=device.host_gb_per_s * 1e9 * of("host"),
        host_memory=device.host_memory_gb_per_s * 1e9 * of("host"), leak=of("leak"), step_s=of("step_s"),
        tensor_exposed=of("tensor_exposed"), jitter=of("jitter"), imbalance=of("imbalance"), cast=of("cast"),
        low=of("low"), high=of("high"),
        expert_exposed=of("expert_exposed"),
        tensor_factor=its("tensor_factor"), shard_factor=its("shard_factor"),
        flush=its("flush"), turn_s=its("turn_s"), measured=_measured_of(run.device), number=wide,
        busy=run.grid.world,
    )  # fmt: skip
