"""The facts of a row of measured runs, column by column: which values a column may have, and what they mean.

A prediction takes facts from these columns alone. benchmarks/truth/fill_columns.py fills them from the texts of tables
that have none.
"""

import re
from collections.abc import Mapping
from typing import get_args

from shardwright.config.adapter import EXPERT_TARGETS, TARGETS, AdapterSpec
from shardwright.config.attention_kernels import kernel_names
from shardwright.config.catalog import did_you_mean
from shardwright.config.context_facts import CONTEXT_METHODS
from shardwright.config.moe import ROUTINGS
from shardwright.config.network_facts import NETWORKS
from shardwright.config.number_types import NUMBER_TYPES, number_called, wide_numbers
from shardwright.config.optimizer_facts import OPTIMIZERS
from shardwright.config.phrase import say
from shardwright.config.recompute_policy import OPERATORS
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software_changes import HOST_CHANGES, OVERLAP_WORDS
from shardwright.config.token_dispatchers import dispatcher_names
from shardwright.config.usual_runs import Graphs
from shardwright.layers.query import LAYER_POLICIES
from shardwright.measure.measured_runs.flops_convention import FLOPS_COUNTED

Row = Mapping[str, str]

# Integers: the smallest that a column may hold. The job's own limits say how large one may be (row_checks.py).
WHOLE = {
    **dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "topk", "expert_ffn"), 1),
    **dict.fromkeys(("gpus", "gpus_per_node", "tp", "pp", "vp", "cp", "ep", "dp", "mbs", "gbs"), 1),
    **dict.fromkeys(("head_dim", "q_rank", "kv_rank", "expert_tp", "shard_group"), 1),
    **dict.fromkeys(("experts", "shared_experts", "dense_layers", "zero_stage", "sp", "gated_mlp", "latest"), 0),
    **dict.fromkeys(("layers_run", "rope_dim"), 1),
    **dict.fromkeys(("recompute_layers", "recompute_inferred", "compiled", "window", "window_every"), 0),
    **dict.fromkeys(("bias", "limited", "grouped", "dropout", "fused_loss", "split_inputs"), 0),
    **dict.fromkeys(("no_sync", "autocast", "whole_experts", "float8_gather", "loss_by_parts"), 0),
    **dict.fromkeys(("compiled_loss", "fused_gate"), 0),
    "adapter_rank": 1,
}
_MOST = {
    **dict.fromkeys(
        (
            "sp",
            "gated_mlp",
            "latest",
            "recompute_inferred",
            "compiled",
            "bias",
            "limited",
            "grouped",
            "dropout",
            "fused_loss",
            "split_inputs",
            "no_sync",
            "autocast",
            "whole_experts",
            "float8_gather",
            "loss_by_parts",
            "compiled_loss",
            "fused_gate",
        ),
        1,
    ),
    "zero_stage": 3,
    **dict.fromkeys(("topk", "adapter_rank"), 10**6),
}
# Measured and stated amounts, more than 0 if they are filled.
AMOUNTS = (
    "params_b", "intra_bw", "inter_bw", "step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "peak_mem_gb",
)  # fmt: skip
_LARGEST_WHOLE, _LEAST_AMOUNT, _LARGEST_AMOUNT = 10**12, 1e-12, 1e15

# Columns without which a table says in texts alone what ran it and how it was measured: it is in the old format.
FACT_COLUMNS = ("software", "flops_counted", "memory_kind")

# Of what a plan keeps in host memory; a row names all of it, separated by blanks.
OFFLOADS = ("activations", "optimizer", "parameters")

# Of an update in host memory: by all cores that a process has, and copies of pinned memory; separated by blanks.
HOST_WORDS = tuple(change.removeprefix("host-") for change in HOST_CHANGES)

GRAPHS = get_args(Graphs)

# Columns that say what ran a row.
SOFTWARE_COLUMNS = (
    *("software", "date", "compiled", "attention", "overlap"),
    *("dispatcher", "grouped", "graphs", "grads", "moments", "host"),
    *("dropout", "fused_loss", "compiled_loss", "loss_by_parts", "fused_gate", "split_inputs"),
    *("no_sync", "autocast", "whole_experts", "float8_gather"),
)

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
# The column's names of the number type of gradients, and the bytes of each.
GRADS = {name: number.num_bytes for number in wide_numbers() for name in (number.name, *number.other_names)}
# Copies of parameters in 16 bits that are updated: in float32, or none, where parameters themselves are.
MASTERS = ("fp32", "none")
# Memory of what: the tensors of torch's allocator, all that it reserved, the driver's, or the allocator's of the first
# or the last pipeline rank.
MEMORY_KINDS = ("allocator", "reserved", "driver", "first-rank", "last-rank", "unknown")


def whole(row: Row, name: str, default: int = 0) -> int:
    """An integer of a row that was checked."""
    return int(float(row[name])) if row.get(name) else default


def adapter_of(row: Row) -> AdapterSpec:
    """The adapters of a row that was checked: of all maps where it names none; without a rank, none."""
    if not (rank := whole(row, "adapter_rank")):
        return AdapterSpec()
    base = row.get("adapter_base") or ""
    fields = {"rank": rank, "base": "nf4" if base else "compute", "double_quantization": base == "nf4-double"}
    maps = (row.get("adapter_maps") or "").split()
    return AdapterSpec.model_validate(fields | ({"targets": tuple(maps)} if maps else {}))


def schedule_of(name: str) -> str:
    """A schedule by plan.schedule's name; an unknown name is only normalised."""
    key = re.sub(r"[\s_]+", "-", name.strip().lower())
    return _SCHEDULES.get(key, key)


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
    way_out = say(
        "give a whole number from {smallest} to {largest:,}, or leave it empty where it is not known",
        smallest=smallest,
        largest=largest,
    )
    return say("{name} is {text}; {way_out}", name=name, text=_shown(text), way_out=way_out)


def _amount_fault(name: str, text: str) -> str:
    number = _number(text)
    if name == "mfu" and number is not None and number > 1:
        return say(
            "mfu is {text}, and it is a share of the peak: write {quotient:g} for {number:g} %",
            text=_shown(text),
            quotient=number / 100,
            number=number,
        )
    if number is not None and _LEAST_AMOUNT <= number <= _LARGEST_AMOUNT:
        return ""
    span = f"from {_LEAST_AMOUNT:g} to {_LARGEST_AMOUNT:g}"
    return say(
        "{name} is {text}; give a number {span}, or leave it empty where it is not known",
        name=name,
        text=_shown(text),
        span=span,
    )


_ADAPTER_BASES = ("nf4", "nf4-double")  # with scales in float32, or in 8 bits

_WORDS: dict[str, tuple[str, ...]] = {
    "recompute": (*LAYER_POLICIES, *OPERATORS),
    "schedule": tuple(_SCHEDULES),  # and the names of SCHEDULES
    "precision": tuple(name for number in NUMBER_TYPES.values() for name in (*number.other_names, number.name)),
    "tier": ("A", "B", "C"),
    "attention": tuple(kernel_names()),
    "grads": tuple(GRADS),
    "moments": tuple(GRADS),
    "masters": MASTERS,
    "flops_counted": FLOPS_COUNTED,
    "memory_kind": MEMORY_KINDS,
    "network": NETWORKS.names,
    "overlap": OVERLAP_WORDS,
    "dispatcher": tuple(dispatcher_names()),
    "graphs": GRAPHS,
    "oom": ("yes", "no"),
    "host": HOST_WORDS,
    "offload": OFFLOADS,
    "routing": ROUTINGS,
    "cp_method": CONTEXT_METHODS.names,
    "optimizer": OPTIMIZERS.names,
    "adapter_maps": (*TARGETS, *EXPERT_TARGETS),
    "adapter_base": _ADAPTER_BASES,
}


# Columns that identify a row, name its device, are for people, or are what others were taken from.
_OTHER_COLUMNS = (
    *("id", "source", "verified", "model", "gpu", "kind", "notes"),
    *("flops_convention", "plan_group", "step_time_calc", "tps_per_gpu_calc"),
    *("device_gib", "measured_gib"),
)
COLUMNS = frozenset((*WHOLE, *AMOUNTS, *_WORDS, *SOFTWARE_COLUMNS, *_OTHER_COLUMNS))


def _word_fault(name: str, text: str) -> str:
    known_words, words = _WORDS[name], [text]
    if name == "recompute":
        words = text.split("+") if "+" in text else words
        known_words = tuple(OPERATORS) if "+" in text else known_words
    if name == "schedule":
        words = [schedule_of(text)]
        known_words = (*known_words, *SCHEDULES.names)
    if name == "precision":
        words = [number_called(text) or text]
    if name in ("overlap", "offload", "host", "adapter_maps"):
        words = text.split()
    wrong = [word for word in words if word not in known_words]
    return (
        say(
            "{name} is {text}; {hint}",
            name=name,
            text=_shown(text),
            hint=did_you_mean(wrong[0], list(dict.fromkeys(known_words))),
        )
        if wrong
        else ""
    )


def _number(text: str) -> float | None:
    if len(text) > 40 or not re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?\s*", text, re.ASCII):
        return None
    number = float(text)
    return number if abs(number) < 1e300 else None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
