"""The software generation of a published run: the one that its source and notes name, else the usual one.

The usual one is that for this kind of device, this kind of plan and that time. A row's statement of its attention
kernel overrides the generation's.
"""

import re
from functools import lru_cache

from shardwright.config import catalog
from shardwright.config.attention_kernels import ATTENTION_KERNELS, kernel_names
from shardwright.config.software import software_of
from shardwright.cost.calibration import device_of
from shardwright.layers.query import PlanGrid
from shardwright.measure.measured_runs.row_facts import Row

# The months in which kernels reached most code, as YYMM: some after FlashAttention (2205), and its version 2 (2307).
FLASH_1, FLASH_2 = 2209, 2310
_MEGATRON_2022 = 2101
_TODAY = 2601
# The usual time of a run on a generation of devices whose row has no date.
_ERA = {"volta": 2001, "turing": 2001, "ampere": 2306, "ampere-pcie": 2306, "cdna2": 2309, "tpu": 2309}


def software_of_row(row: Row, grid: PlanGrid) -> str:
    """The generation that a row's column names, or whose patterns match the row's texts, else the usual one;
    NAME+ATTENTION if a row names an attention kernel that is not the generation's.
    """
    text = " ".join(row.get(name) or "" for name in ("source", "model", "notes"))
    generation = device_of(row["gpu"]).generation
    column, _, version = (row.get("software") or "").strip().lower().partition("@")
    dated = re.match(r"20(\d\d)-(\d\d)", version)
    month = int(dated[1] + dated[2]) if dated else month_of(text, row.get("source") or "", generation)
    catalog_name = _in_words(column, grid, month)
    catalog_name = catalog_name or next(
        (name for _, name, pattern in _patterns() if pattern.search(column or text)), ""
    )
    name = catalog_name or usual_software(generation, grid, month)
    if name == "megatron-deepspeed" and month >= FLASH_2:  # it followed Megatron-LM
        name = "large-2024"
    if grid.zero == 3 and name in ("megatron-2021", "megatron-2022"):  # these have no ZeRO-3, but DeepSpeed had
        name = "deepspeed-2021"
    default = software_of(name).attention
    keeps_scores = ATTENTION_KERNELS[default].keeps_scores
    if column := row.get("attention") or "":
        kernel = kernel_names()[column]
    elif (kernel := attention_in(text)) == "none":  # the kernel that was usual before FlashAttention
        kernel = default if keeps_scores else "softmax"
    elif kernel and not keeps_scores and default != "flash1":  # later code gives its newer kernels this name too
        kernel = default
    return f"{name.partition('+')[0]}+{kernel}" if kernel and kernel != default else name


def _in_words(word: str, grid: PlanGrid, month: int) -> str:
    """The generation that a column's word means: a name of the catalog, or a framework's generation at that time."""
    if word in catalog.names("software"):
        return word
    if word == "jax":
        return "xla"
    if word == "fsdp":
        return "fsdp-2022" if month < FLASH_1 else "fsdp-2023" if month < FLASH_2 else "fsdp-2024"
    if word == "deepspeed":
        return "deepspeed-2021" if grid.zero == 3 else "megatron-deepspeed"
    if word == "megatron-lm":
        early = "megatron-2021" if month < _MEGATRON_2022 else "megatron-2022"
        return early if month < FLASH_1 else "flash-2023" if month < FLASH_2 else "large-2024"
    return ""


@lru_cache(maxsize=1)
def _patterns() -> list[tuple[int, str, re.Pattern[str]]]:
    """(precedence, software, pattern) of the catalog, the highest precedence first."""
    patterns = []
    for name in catalog.names("software"):
        spec = software_of(name)
        patterns += [(spec.precedence, name, re.compile(pattern)) for pattern in spec.matches]
    return sorted(patterns, key=lambda entry: -entry[0])


def month_of(text: str, source: str, generation: str) -> int:
    """The month of a run's publication, as YYMM: of its preprint's number, else its source's year, else its
    devices'."""
    if paper := re.search(r"\b(\d{2}(?:0[1-9]|1[0-2]))\.\d{4,5}\b", text):
        return int(paper[1])
    if years := re.findall(r"\b20([12]\d)\b", source):
        return 100 * int(max(years)) + 6
    return _ERA.get(generation, _TODAY)


def usual_software(generation: str, grid: PlanGrid, month: int) -> str:
    """The software of most runs with such devices and such a plan at that time."""
    if generation == "tpu":
        return "xla" if month >= FLASH_2 else "xla+softmax"
    if month >= FLASH_1 and grid.pp == 1 and (grid.zero == 3 or grid.tp == 1):
        return "fsdp-2023" if month < FLASH_2 else "fsdp-2024"
    if month < _MEGATRON_2022:
        return "megatron-2021"
    if month < FLASH_1:
        return "megatron-2022"
    return "flash-2023" if month < FLASH_2 else "large-2024"


_FLASH = r"flash[ _-]?att(?:ention|n)(?:[ _-]?v?(?P<version>[123])(?!\d))?"
_NOT = r"(?:no|non|not|never|neither|nor|without|w/o|lack\w*|disabl\w*|instead of|\w+n't)"
# Only these words may stand between the two, so that the denial is not of another thing: "no dropout with
# FlashAttention".
_BETWEEN = r"(?:(?:use|using|used|yet|have|having|has|had|support|the|any|with|even|of)\b[ -]*)*"
_OFF = r"\s*[:=(]?\s*(?:is |was |were |are )?(?:off|disabled|unavailable|false|none|no|0|not(?: yet| \w+ed| in use)?)"
_MENTION = re.compile(rf"(?i)(?P<before>\b{_NOT}[ -]+{_BETWEEN})?{_FLASH}(?P<behind>{_OFF}(?=\s*(?:$|[;,.)])))?")


def attention_in(text: str) -> str:
    """The attention kernel that a text names, "none" if it says that FlashAttention was not used, or nothing.

    The last mention counts, because a paper's title may name another kernel.
    """
    mentions = list(_MENTION.finditer(text))
    if not mentions:
        return ""
    if mentions[-1]["before"] or mentions[-1]["behind"]:
        return "none"
    return kernel_names()[f"flash{mentions[-1]['version'] or 1}"]
