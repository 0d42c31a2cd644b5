"""The software of a measured run, by the columns of its row: framework and month, attention, compilation, overlap.

A row whose columns name no software that the catalog describes is taken to have run what was usual. The rule knows the
device, the month if the row has one, the number type, and what only some software can do of the plan:

- on TPUs JAX;
- in fp8 and narrower, on the GPUs whose recipes NVIDIA publishes, Megatron-Bridge, which has them;
- with ZeRO-3 PyTorch's FSDP, since Megatron-LM shards no parameters; in these recipes Megatron-Bridge does, whose own
  FSDP is of 2025 and so of Blackwell's time;
- else Megatron-LM of the month. Sequence parallel and selective recomputation came to it in May 2022 (Korthikanti et
  al. 2022, arXiv 2205.05198) and its distributed optimizer after them, so ZeRO-1 and 2 before that are DeepSpeed's, of
  Megatron-DeepSpeed.

Where no month is known, a number type tells the time on Ampere: fp16 was usual there until BLOOM and PaLM trained in
bf16 in 2022. No rule looks at a run's measurements, and the range of such a prediction is wider.
"""

import re

from shardwright.config.attention_kernels import kernel_names
from shardwright.config.number_types import NUMBER_TYPES, number_called
from shardwright.config.software import OVERLAPS, generation_of, software_of
from shardwright.cost.calibration import device_of
from shardwright.measure.measured_runs.row_facts import Row

# What runs products in fp8 and narrower on a generation of devices: (without ZeRO-3, with it).
_USUAL_NARROW = {"hopper": ("megatron-bridge", "fsdp"), "blackwell": ("megatron-bridge", "megatron-bridge")}
# The usual month of a run on a generation of devices whose row has no date; of all others it is not known, and the
# newest software is assumed.
_USUAL_MONTH = {
    "volta": "2020-01",
    "turing": "2020-01",
    "ampere": "2023-06",
    "ampere-pcie": "2023-06",
    "cdna2": "2023-09",
}
_USUAL_MONTH_OF_FP16 = {"ampere": "2021-10", "ampere-pcie": "2021-10"}  # between A100's first runs and Llama's
_SEQUENCE_PARALLEL_SINCE = "2022-05"  # in Megatron-LM


def software_of_row(row: Row, without: frozenset[str] = frozenset()) -> str:
    """The generation that a row's columns name, else the usual one, with what the row says otherwise of it
    (config/software.py, NAME+CHANGE). Entries in `without` are taken not to be in the catalog."""
    framework, month = _framework(row)
    is_compiled = row.get("compiled") == "1"
    usual, usual_month = _usual(row, month)
    asked = ((framework, month), (usual, usual_month), ("megatron-lm", usual_month))
    described = (generation_of(name, since, is_compiled, without) for name, since in asked)
    name = next(filter(None, described))
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


def _usual(row: Row, month: str) -> tuple[str, str]:
    """The usual framework of a row and its month, by the rule above; `month` is the one that the row states, if any."""
    device = device_of(row["gpu"]).generation
    number = number_called(row.get("precision") or "") or "bf16"
    month = month or _month(row.get("date") or "")
    month = month or (_USUAL_MONTH_OF_FP16.get(device, "") if number == "fp16" else "") or _USUAL_MONTH.get(device, "")
    shards, shards_all = row.get("zero_stage") in ("1", "2"), row.get("zero_stage") == "3"
    if device == "tpu":
        return "jax", month
    if NUMBER_TYPES[number].is_narrow and device in _USUAL_NARROW:
        return _USUAL_NARROW[device][shards_all], month
    if shards_all:
        return "fsdp", month
    if not month or month >= _SEQUENCE_PARALLEL_SINCE:
        return "megatron-lm", month
    if row.get("sp") == "1" or row.get("recompute") == "selective":
        return "megatron-lm", _SEQUENCE_PARALLEL_SINCE
    is_there = month >= software_of("megatron-deepspeed").since
    return "megatron-deepspeed" if shards and is_there else "megatron-lm", month


def knows_software(row: Row, without: frozenset[str] = frozenset()) -> bool:
    """True if the row names a framework that the catalog describes; entries in `without` are taken not to be there."""
    return generation_of(_framework(row)[0], "", without=without) != ""


def _framework(row: Row) -> tuple[str, str]:
    """The framework and the month of the software's column: megatron-lm@2021-04."""
    framework, _, version = (row.get("software") or "").strip().lower().partition("@")
    return framework, _month(version)


def _month(text: str) -> str:
    """The month that a version or a date states, as 2021-04; of a year alone its middle; nothing if there is none."""
    if not (date := re.match(r"(20\d\d)(?:-(0[1-9]|1[0-2]))?(?!\d)", text.strip())):
        return ""
    return f"{date[1]}-{date[2] or '06'}"
