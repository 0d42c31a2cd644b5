"""The facts of a row of measured runs, column by column: which values a column may have, and what they mean.

A prediction takes facts from these columns alone. benchmarks/truth/fill_columns.py fills them from the texts of tables
that have none.
"""

import re
from collections.abc import Mapping

from shardwright.config.catalog import did_you_mean
from shardwright.config.recompute_policy import OPERATORS
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software import OVERLAPS
from shardwright.measure.measured_runs.flops_convention import FLOPS_COUNTED

Row = Mapping[str, str]

# Integers: the smallest that a column may hold. The job's own limits say how large one may be (row_checks.py).
WHOLE = {
    **dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "topk", "expert_ffn"), 1),
    **dict.fromkeys(("gpus", "gpus_per_node", "tp", "pp", "vp", "cp", "ep", "dp", "mbs", "gbs"), 1),
    **dict.fromkeys(("head_dim", "q_rank", "kv_rank", "expert_tp", "shard_group"), 1),
    **dict.fromkeys(("experts", "shared_experts", "dense_layers", "zero_stage", "sp", "gated_mlp", "latest"), 0),
    **dict.fromkeys(("layers_run", "rope_dim"), 1),
    **dict.fromkeys(("recompute_layers", "recompute_inferred", "compiled"), 0),
}
_MOST = {
    **dict.fromkeys(("sp", "gated_mlp", "latest", "recompute_inferred", "compiled"), 1),
    "zero_stage": 3,
    "topk": 10**6,
}
# Measured and stated amounts, more than 0 if they are filled.
AMOUNTS = (
    "params_b", "intra_bw", "inter_bw", "step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "peak_mem_gb",
)  # fmt: skip
_LARGEST_WHOLE, _LEAST_AMOUNT, _LARGEST_AMOUNT = 10**12, 1e-12, 1e15

# Columns without which a table says in texts alone what ran it and how it was measured: it is in the old format.
FACT_COLUMNS = ("software", "flops_counted", "memory_kind")

# Columns that say what ran a row.
SOFTWARE_COLUMNS = ("software", "date", "compiled", "attention", "overlap", "grads", "moments")

# Tables' names of a schedule, if they differ from plan.schedule's.
_SCHEDULES = {
    "none": "sequential",
    "interleaved": "interleaved-1f1b",
    "1f1b-interleaved": "interleaved-1f1b",
    "zb-1p": "zb-h1",
    "zb-2p": "zb-h2",
    "zb1p": "zb-h1",
    "zb2p": "zb-h2",
    "pipedream-flush": "1f1b",
}
# Tables' names of dtypes; the first key that occurs in the text counts.
PRECISIONS = {
    "nvfp4": "nvfp4",
    "mxfp8": "mxfp8",
    "fp8": "fp8",
    "float8": "fp8",
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
}
RECOMPUTE = ("none", "full", "selective", "stage", "matmul")
# The column's names of attention kernels, and software.attention's name of each.
ATTENTION = {
    "torch": "torch",
    "fused-softmax": "softmax",
    "softmax": "softmax",
    "flash1": "flash1",
    "flash2": "flash2",
    "flash3": "cudnn",
    "cudnn": "cudnn",
    "xla": "cudnn",
}
# Bytes of gradients and of optimizer moments by their number type.
GRADS = {"fp32": 4, "float32": 4, "bf16": 2, "fp16": 2}
# Memory of what: the tensors of torch's allocator, all that it reserved, the driver's, or the allocator's of the first
# or the last pipeline rank.
MEMORY_KINDS = ("allocator", "reserved", "driver", "first-rank", "last-rank", "unknown")


def schedule_of(name: str) -> str:
    """A schedule by plan.schedule's name; an unknown name is only normalised."""
    key = re.sub(r"[\s_]+", "-", name.strip().lower())
    return _SCHEDULES.get(key, key)


def precision_of(text: str) -> str:
    """The dtype of the products by layers/query.py's name, or nothing."""
    return next((name for key, name in PRECISIONS.items() if key in text.lower()), "")


def value_faults(row: Row) -> list[str]:
    """Faults of single columns that describe the plan and the model."""
    faults = [fault for name in WHOLE if row.get(name) and (fault := _whole_fault(name, row[name]))]
    return faults + [fault for name in _WORDS if row.get(name) and (fault := _word_fault(name, row[name]))]


def amount_faults(row: Row) -> dict[str, str]:
    """Faults of measured and stated amounts, by column. Such an amount is no measurement; the row may have others."""
    return {name: fault for name in AMOUNTS if row.get(name) and (fault := _amount_fault(name, row[name]))}


def _whole_fault(name: str, text: str) -> str:
    smallest, largest = WHOLE[name], _MOST.get(name, _LARGEST_WHOLE)
    number = _number(text)
    if number is not None and number == int(number) and smallest <= number <= largest:
        return ""
    way_out = f"give a whole number from {smallest} to {largest:,}, or leave it empty where it is not known"
    return f"{name} is {_shown(text)}; {way_out}"


def _amount_fault(name: str, text: str) -> str:
    number = _number(text)
    if name == "mfu" and number is not None and number > 1:
        return f"mfu is {_shown(text)}, and it is a share of the peak: write {number / 100:g} for {number:g} %"
    if number is not None and _LEAST_AMOUNT <= number <= _LARGEST_AMOUNT:
        return ""
    span = f"from {_LEAST_AMOUNT:g} to {_LARGEST_AMOUNT:g}"
    return f"{name} is {_shown(text)}; give a number {span}, or leave it empty where it is not known"


_WORDS = {
    "recompute": (*RECOMPUTE, *OPERATORS),
    "schedule": (*_SCHEDULES, *SCHEDULES.names),
    "precision": tuple(PRECISIONS),
    "tier": ("A", "B", "C"),
    "attention": tuple(ATTENTION),
    "grads": tuple(GRADS),
    "moments": tuple(GRADS),
    "flops_counted": FLOPS_COUNTED,
    "memory_kind": MEMORY_KINDS,
    "overlap": tuple(OVERLAPS),
    "oom": ("yes", "no"),
}


def _word_fault(name: str, text: str) -> str:
    known_words, words = _WORDS[name], [text]
    if name == "recompute":
        words = text.split("+") if "+" in text else words
        known_words = tuple(OPERATORS) if "+" in text else known_words
    if name == "schedule":
        words = [schedule_of(text)]
    if name == "precision":
        words = [precision_of(text) or text]
        known_words = (*known_words, *PRECISIONS.values())
    if name == "overlap":
        words = text.split()
    wrong = [word for word in words if word not in known_words]
    return f"{name} is {_shown(text)}; {did_you_mean(wrong[0], list(dict.fromkeys(known_words)))}" if wrong else ""


def _number(text: str) -> float | None:
    if len(text) > 40 or not re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?\s*", text, re.ASCII):
        return None
    number = float(text)
    return number if abs(number) < 1e300 else None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
