"""The software of a measured run, by the columns of its row: framework and month, attention, compilation, overlap.

A row that does not say its framework ran what was usual: Megatron-LM of its month, on TPUs JAX, on Blackwell
Megatron-Bridge, whose recipes NVIDIA ships for it. The rule looks at the device and the month alone, never at the plan,
and the prediction's range is wider.
"""

import re

from shardwright.config.attention_kernels import kernel_names
from shardwright.config.software import OVERLAPS, generation_of, software_of
from shardwright.cost.calibration import device_of
from shardwright.measure.measured_runs.row_facts import Row

_USUAL = "megatron-lm"
_USUAL_ON = {"tpu": "jax", "blackwell": "megatron-bridge"}  # by generation of devices
# The usual month of a run on a generation of devices whose row has no date; of all others it is not known, and the
# newest software is assumed.
_USUAL_MONTH = {
    "volta": "2020-01",
    "turing": "2020-01",
    "ampere": "2023-06",
    "ampere-pcie": "2023-06",
    "cdna2": "2023-09",
}


def software_of_row(row: Row) -> str:
    """The generation that a row's columns name, else the usual one, with what the row says otherwise of it
    (config/software.py, NAME+CHANGE)."""
    framework, month = _framework(row)
    is_compiled = row.get("compiled") == "1"
    name = generation_of(framework, month, is_compiled)
    if not name:
        device = device_of(row["gpu"]).generation
        month = month or _month(row.get("date") or "") or _USUAL_MONTH.get(device, "")
        name = generation_of(_USUAL_ON.get(device, _USUAL), month, is_compiled)
    software = software_of(name)
    changes = []
    if (kernel := kernel_names().get(row.get("attention") or "")) and kernel != software.attention:
        changes.append(kernel)
    changes += [
        f"overlap-{axis}"
        for axis in (row.get("overlap") or "").split()
        if not all(getattr(software, field) for field in OVERLAPS[axis])
    ]
    return "+".join([name, *changes])


def knows_software(row: Row) -> bool:
    """True if the row names a framework that the catalog describes."""
    return generation_of(_framework(row)[0], "") != ""


def _framework(row: Row) -> tuple[str, str]:
    """The framework and the month of the software's column: megatron-lm@2021-04."""
    framework, _, version = (row.get("software") or "").strip().lower().partition("@")
    return framework, _month(version)


def _month(text: str) -> str:
    """The month that a version or a date states, as 2021-04; of a year alone its middle; nothing if there is none."""
    if not (date := re.match(r"(20\d\d)(?:-(0[1-9]|1[0-2]))?(?!\d)", text.strip())):
        return ""
    return f"{date[1]}-{date[2] or '06'}"
