"""Facts of a device without which no step has a time, each with what to add to its file where it is unknown."""

from functools import reduce
from math import inf

from shardwright.config.cluster import DeviceSpec
from shardwright.config.number_types import NUMBER_TYPES, wide_numbers
from shardwright.config.phrase import any_of, say
from shardwright.layers.query import Run

_NEEDED = ("memory_gb_per_s", "multiprocessors")  # fields of a device without which no step has a time


def known_peak(device: DeviceSpec, number: str, instead: str = "") -> float:
    """The device's peak in FLOP/s. KeyError, with what to add or to do instead, if it is unknown."""
    if not (peak := device.peak_flops(number)):
        name = NUMBER_TYPES[number].peak
        known = [other.name for other in wide_numbers() if device.peak_flops(other.name)]
        advice = say(", or set precision.compute to {choices}", choices=any_of(known)) if known else ""
        if NUMBER_TYPES[number].is_narrow:
            advice = instead or say(", or set precision.float8 to none")
        raise KeyError(
            say(
                "{device} has no peak rate for {number}; add peak_tflops.{number} to its file{advice}",
                device=device.name,
                number=name,
                advice=advice,
            )
        )
    return peak


def known_fact(device: DeviceSpec, field: str, instead: str = "") -> float:
    """A field of the device. KeyError, with what to add or to set instead, if it is 0, which is unknown."""
    value: float = getattr(device, field)
    if not value:
        others = [name for name in _NEEDED if name != field and not getattr(device, name)]
        way_out = say(", or set {field}", field=instead) if instead else ""
        if others:
            raise KeyError(
                say(
                    "{device} has no known {fields}; add them to its file{way_out}",
                    device=device.name,
                    fields=_neither([field, *others]),
                    way_out=way_out,
                )
            )
        raise KeyError(
            say(
                "{device} has no known {field}; add it to its file{way_out}",
                device=device.name,
                field=field,
                way_out=way_out,
            )
        )
    return value


def _neither(fields: list[str]) -> str:
    """ "a and no b and no c"."""
    return reduce(lambda first, second: say("{first} and no {second}", first=first, second=second), fields)


def link_bytes_per_s(run: Run, device: DeviceSpec) -> float:
    """Bytes/s between two devices of a node; infinite if a node has one device. KeyError if unknown."""
    if run.devices_per_node <= 1:
        return run.node_bytes_per_s or device.link_gb_per_s * 1e9 or inf
    return run.node_bytes_per_s or known_fact(device, "link_gb_per_s", "cluster.intra_node.bandwidth_gb_per_s") * 1e9
