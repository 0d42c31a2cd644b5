"""Which generation of software a published run used: what its source and notes name, else what was usual.

Usual means: for this kind of device, this kind of plan and that time. What a row says of attention holds beside it.
"""

import re
from collections.abc import Mapping
from functools import lru_cache

from shardwright.cost.calibration import device_of
from shardwright.spec import catalog
from shardwright.spec.software import software_of
from shardwright.workload.shape import Cut

# When kernels reached most code, as YYMM: some months after FlashAttention (2205), and its version 2 (2307).
FLASH_1, FLASH_2 = 2209, 2310
_TODAY = 2601
# The usual time of a run on a generation of devices whose row has no date.
_ERA = {"volta": 2001, "turing": 2001, "ampere": 2306, "ampere-pcie": 2306, "cdna2": 2309, "tpu": 2309}


def software_of_row(row: Mapping[str, str], cut: Cut) -> str:
    """The generation whose patterns match what is said about a run, else the usual one; NAME+ATTENTION where a row
    names a kernel of attention that the generation did not have.
    """
    said = " ".join(row.get(name) or "" for name in ("source", "model", "notes"))
    generation = device_of(row["gpu"]).generation
    named = next((name for _, name, pattern in _patterns() if pattern.search(said)), "")
    month = month_of(said, row.get("source") or "", generation)
    name = named or usual_software(generation, cut, month)
    if name == "megatron-deepspeed" and month >= FLASH_2:  # it followed Megatron-LM
        name = "large-2024"
    if cut.zero == 3 and name in ("megatron-2021", "megatron-2022"):  # which has no ZeRO-3, but DeepSpeed had
        name = "deepspeed-2021"
    kernel = _attention(said)
    has = software_of(name).attention
    if kernel and has in ("torch", "softmax", "flash1") and kernel != has:
        return f"{name.partition('+')[0]}+{kernel}"
    return name


@lru_cache(maxsize=1)
def _patterns() -> list[tuple[int, str, re.Pattern[str]]]:
    """(precedence, software, pattern) of the catalog, the highest precedence first."""
    found = []
    for name in catalog.names("software"):
        spec = software_of(name)
        found += [(spec.precedence, name, re.compile(pattern)) for pattern in spec.matches]
    return sorted(found, key=lambda entry: -entry[0])


def month_of(said: str, source: str, generation: str) -> int:
    """When a run was published, as YYMM: by the number of its preprint, else its source's year, else its devices."""
    if paper := re.search(r"\b(\d{2}(?:0[1-9]|1[0-2]))\.\d{4,5}\b", said):
        return int(paper[1])
    if years := re.findall(r"\b20([12]\d)\b", source):
        return 100 * int(max(years)) + 6
    return _ERA.get(generation, _TODAY)


def usual_software(generation: str, cut: Cut, month: int) -> str:
    """What most code had for such devices and such a plan at a time."""
    if generation == "tpu":
        return "xla" if month >= FLASH_2 else "xla+softmax"
    if month >= FLASH_1 and cut.pp == 1 and (cut.zero == 3 or cut.tp == 1):
        return "fsdp-2023" if month < FLASH_2 else "fsdp-2024"
    if month < 2101:
        return "megatron-2021"
    if month < FLASH_1:
        return "megatron-2022"
    return "flash-2023" if month < FLASH_2 else "large-2024"


def _attention(said: str) -> str:
    """The kernel of attention that a text names, or nothing: the last, for a paper's title may name another one."""
    found = list(
        re.finditer(r"(?i)(\bno |without |not use )?flash[ -]?attention(?:[ -]?v?(?P<version>[123])\b)?", said)
    )
    if not found or found[-1][1]:
        return ""
    return {"2": "flash2", "3": "cudnn"}.get(found[-1]["version"] or "1", "flash1")
