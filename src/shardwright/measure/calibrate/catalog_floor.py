"""The catalog as the floor of a calibration: it may find higher peaks than the catalog's, but never lower ones.

A peak is the maker's number, and the reached rate is a share of it. A disturbed run, or too small sizes, lower only the
share.
"""

from collections.abc import Mapping
from typing import Any

from shardwright.config import catalog

_BANDWIDTHS = {"memory_gb_per_s": "memory", "host_gb_per_s": "host"}  # with the constants that are shares of them


def known_fields(cuda_name: str) -> dict[str, Any]:
    """The entry of the catalog with CUDA's name of a device; empty if there is none."""
    entries = [catalog.read("devices", entry) for entry in catalog.names("devices")]
    fields = next((fields for fields in entries if cuda_name in fields.get("cuda_names", ())), {})
    return {key: value for key, value in fields.items() if key != "name"}


def raised_to(
    catalog_fields: Mapping[str, Any], measured: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, float], str]:
    """Peaks and bandwidths, the higher of the measured and the catalog's; the shares of them that were reached; and the
    measured ones that were lower, in words."""
    fields, shares, lower = dict(measured), dict[str, float](), list[str]()
    stated, reached = catalog_fields.get("peak_tflops", {}), measured["peak_tflops"]
    fields["peak_tflops"] = {
        number: max(stated.get(number, 0.0), reached.get(number, 0.0)) for number in stated | reached
    }
    of_peaks = {number: value / fields["peak_tflops"][number] for number, value in reached.items()}
    shares["product"] = of_peaks.get("bfloat16", max(of_peaks.values()))
    lower += [
        f"{number} products {value:.4g} of {stated[number]:.4g} TFLOP/s"
        for number, value in reached.items()
        if value < stated.get(number, 0.0)
    ]
    for name, constant in _BANDWIDTHS.items():
        if name in measured:
            fields[name] = max(catalog_fields.get(name, 0.0), measured[name])
            shares[constant] = measured[name] / fields[name]
            if measured[name] < fields[name]:
                lower.append(f"{constant} {measured[name]:.4g} of {fields[name]:.4g} GB/s")
    return fields, shares, "; ".join(lower)
