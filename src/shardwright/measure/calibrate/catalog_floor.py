"""Beside what the catalog says of a device: a calibration may find more than its peaks, and never less of them.

A peak is what the device states, and what was reached of it is a share. A run that was disturbed, or sizes that were
too small, say something of the share alone.
"""

from collections.abc import Mapping
from typing import Any

from shardwright.config import catalog

_BANDWIDTHS = {"memory_gb_per_s": "memory", "host_gb_per_s": "host"}  # and the constants that are shares of them


def known_fields(cuda_name: str) -> dict[str, Any]:
    """The entry of the catalog that has the name that CUDA gives a device; nothing if none has."""
    known = [catalog.read("devices", entry) for entry in catalog.names("devices")]
    fields = next((fields for fields in known if cuda_name in fields.get("cuda_names", ())), {})
    return {key: value for key, value in fields.items() if key != "name"}


def raised_to(known: Mapping[str, Any], measured: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float], str]:
    """Peaks and bandwidths, of what was measured and what is known the higher; which share of them was reached; and
    which measured ones were lower, in words."""
    fields, shares, lower = dict(measured), dict[str, float](), list[str]()
    stated, reached = known.get("peak_tflops", {}), measured["peak_tflops"]
    fields["peak_tflops"] = {
        number: max(stated.get(number, 0.0), reached.get(number, 0.0)) for number in stated | reached
    }
    of_peaks = {number: value / fields["peak_tflops"][number] for number, value in reached.items()}
    shares["product"] = of_peaks.get("bfloat16", max(of_peaks.values()))
    lower += [
        f"{number} products {value:.4g} of {stated[number]:.4g} TFLOP/s"
        for number, value in reached.items() if value < stated.get(number, 0.0)
    ]  # fmt: skip
    for name, constant in _BANDWIDTHS.items():
        if name in measured:
            fields[name] = max(known.get(name, 0.0), measured[name])
            shares[constant] = measured[name] / fields[name]
            if measured[name] < fields[name]:
                lower.append(f"{constant} {measured[name]:.4g} of {fields[name]:.4g} GB/s")
    return fields, shares, "; ".join(lower)
