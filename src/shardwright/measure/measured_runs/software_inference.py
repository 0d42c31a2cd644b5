"""The generation of software that a published run used: the one that its source and notes name, else the usual one.

Usual means: for this kind of device, this kind of plan and that time. What a row says of attention holds beside it.
"""

import re
from functools import lru_cache

from shardwright.config import catalog
from shardwright.config.software import software_of
from shardwright.cost.calibration import device_of
from shardwright.measure.measured_runs.row_facts import ATTENTION, Row
from shardwright.workload.query import PlanGrid

# When kernels reached most code, as YYMM: some months after FlashAttention (2205), and its version 2 (2307).
FLASH_1, FLASH_2 = 2209, 2310
_MEGATRON_2022 = 2101
_TODAY = 2601
# The usual time of a run on a generation of devices whose row has no date.
_ERA = {"volta": 2001, "turing": 2001, "ampere": 2306, "ampere-pcie": 2306, "cdna2": 2309, "tpu": 2309}


def software_of_row(row: Row, cut: PlanGrid) -> str:
    """The generation that a row's column names, or whose patterns match what is said about a run, else the usual one;
    NAME+ATTENTION where a row names a kernel of attention that the generation did not have, or had not to.
    """
    said = " ".join(row.get(name) or "" for name in ("source", "model", "notes"))
    generation = device_of(row["gpu"]).generation
    column, _, version = (row.get("software") or "").strip().lower().partition("@")
    dated = re.match(r"20(\d\d)-(\d\d)", version)
    month = int(dated[1] + dated[2]) if dated else month_of(said, row.get("source") or "", generation)
    named = _in_words(column, cut, month)
    named = named or next((name for _, name, pattern in _patterns() if pattern.search(column or said)), "")
    name = named or usual_software(generation, cut, month)
    if name == "megatron-deepspeed" and month >= FLASH_2:  # it followed Megatron-LM
        name = "large-2024"
    if cut.zero == 3 and name in ("megatron-2021", "megatron-2022"):  # which has no ZeRO-3, but DeepSpeed had
        name = "deepspeed-2021"
    has = software_of(name).attention
    if column := row.get("attention") or "":
        kernel = ATTENTION[column]
    elif (kernel := attention_in(said)) == "none":  # then what was usual before it
        kernel = has if has in ("torch", "softmax") else "softmax"
    elif kernel and has not in ("torch", "softmax", "flash1"):  # later code calls its newer kernels so too
        kernel = has
    return f"{name.partition('+')[0]}+{kernel}" if kernel and kernel != has else name


def _in_words(said: str, cut: PlanGrid, month: int) -> str:
    """The generation that a column's word means: a name of the catalog, or that of a framework at a time."""
    if said in catalog.names("software"):
        return said
    if said == "jax":
        return "xla"
    if said == "fsdp":
        return "fsdp-2022" if month < FLASH_1 else "fsdp-2023" if month < FLASH_2 else "fsdp-2024"
    if said == "deepspeed":
        return "deepspeed-2021" if cut.zero == 3 else "megatron-deepspeed"
    if said == "megatron-lm":
        early = "megatron-2021" if month < _MEGATRON_2022 else "megatron-2022"
        return early if month < FLASH_1 else "flash-2023" if month < FLASH_2 else "large-2024"
    return ""


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


def usual_software(generation: str, cut: PlanGrid, month: int) -> str:
    """The software that most runs used with such devices and such a plan at a time."""
    if generation == "tpu":
        return "xla" if month >= FLASH_2 else "xla+softmax"
    if month >= FLASH_1 and cut.pp == 1 and (cut.zero == 3 or cut.tp == 1):
        return "fsdp-2023" if month < FLASH_2 else "fsdp-2024"
    if month < _MEGATRON_2022:
        return "megatron-2021"
    if month < FLASH_1:
        return "megatron-2022"
    return "flash-2023" if month < FLASH_2 else "large-2024"


_FLASH = r"flash[ _-]?att(?:ention|n)(?:[ _-]?v?(?P<version>[123])(?!\d))?"
_NOT = r"(?:no|non|not|never|neither|nor|without|w/o|lack\w*|disabl\w*|instead of|\w+n't)"
# Between the two stands nothing that could be what is denied instead: "no dropout with FlashAttention".
_BETWEEN = r"(?:(?:use|using|used|yet|have|having|has|had|support|the|any|with|even|of)\b[ -]*)*"
_OFF = r"\s*[:=(]?\s*(?:is |was |were |are )?(?:off|disabled|unavailable|false|none|no|0|not(?: yet| \w+ed| in use)?)"
_MENTION = re.compile(rf"(?i)(?P<before>\b{_NOT}[ -]+{_BETWEEN})?{_FLASH}(?P<behind>{_OFF}(?=\s*(?:$|[;,.)])))?")


def attention_in(said: str) -> str:
    """The kernel of attention that a text names, "none" where it says that FlashAttention was not used, or nothing.

    The last that is named, for a paper's title may name another one.
    """
    mentions = list(_MENTION.finditer(said))
    if not mentions:
        return ""
    if mentions[-1]["before"] or mentions[-1]["behind"]:
        return "none"
    return {"2": "flash2", "3": "cudnn"}.get(mentions[-1]["version"] or "1", "flash1")
