"""The software of a measured run, by the columns of its row: framework and month, attention, compilation, overlap,
dispatcher of tokens, experts computed in turn, CUDA graphs, work on the host.

A row whose columns name no software that the catalog describes is taken to have run what was usual (`usual` of a
description): of what had begun by its month and could run its plan, what is meant for its device or number type, else
the newest; where nothing could, the next that did. The description of software says which plans it can run; the plan of
a row rules software out and never chooses it. A month that the row lacks is the usual one of its device, or before its
number type went out of use, and not before its model. No rule looks at a run's measurements, and the range of such a
prediction is wider.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from shardwright.config import catalog
from shardwright.config.attention_kernels import kernel_names
from shardwright.config.number_types import NUMBER_TYPES, NumberType, number_called
from shardwright.config.software import SoftwareSpec, software_of
from shardwright.config.software_changes import HOST_CHANGES, OVERLAPS
from shardwright.config.software_generations import generation_of, months, nearest_generation
from shardwright.config.software_support import had_by
from shardwright.config.token_dispatchers import dispatcher_names
from shardwright.config.usual_runs import UsualSettingsSpec, UsualSpec
from shardwright.cost.calibration import device_of
from shardwright.measure.measured_runs.row_facts import Row, whole


def software_of_row(row: Row, without: frozenset[str] = frozenset()) -> str:
    """The generation that a row's columns name, else the usual one, with what the row says otherwise of it
    (config/software_changes.py, NAME+CHANGE). Entries in `without` are taken not to be in the catalog."""
    name = _described(row, without)
    software = software_of(name)
    changes = []
    if (kernel := kernel_names().get(row.get("attention") or "")) and kernel != software.attention:
        changes.append(kernel)
    usual = _usual_settings(software, row)
    for word in (row.get("overlap") or "").split() or (usual.overlap if usual else ()):
        axis, is_hidden = word.removeprefix("no-"), not word.startswith("no-")
        if any(getattr(software, field) != is_hidden for field in OVERLAPS[axis]):
            changes.append(f"overlap-{axis}" if is_hidden else f"no-overlap-{axis}")
    if dispatcher := dispatcher_names().get(row.get("dispatcher") or ""):
        changes.append(dispatcher)
    changes += [change for column, (value, change) in FLAG_CHANGES.items() if row.get(column) == value]
    if (graphs := row.get("graphs") or (usual.graphs if usual else "")) in ("parts", "step"):
        changes.append(f"graphs-{graphs}")
    changes += [change for word in (row.get("host") or "").split() if (change := f"host-{word}") in HOST_CHANGES]
    return "+".join([name, *changes])


def _usual_settings(software: SoftwareSpec, row: Row) -> UsualSettingsSpec | None:
    """The settings that are usual where a row does not say them."""
    for usual in software.usual_settings:
        if usual.hold(device_of(row["gpu"]).generation, _number_of(row).is_narrow):
            return usual
    return None


def _number_of(row: Row) -> NumberType:
    """The number type of a row's products."""
    return NUMBER_TYPES[number_called(row.get("precision") or "") or "bf16"]


def _described(row: Row, without: frozenset[str]) -> str:
    """The generation of the framework that a row names, else the usual one; also where that framework's descriptions
    begin much later, and software of the time could run the plan."""
    framework, month = _framework(row)
    name = generation_of(framework, month, row.get("compiled") == "1", without)
    usual = _Usual.of(row, month, without)
    if not name:
        return usual.in_time or usual.at_all
    is_later = month and months(software_of(name).since or month) - months(month) > _SOON
    return (usual.in_time if is_later else "") or name


@dataclass(frozen=True)
class _Usual:
    """The usual software of a row by the rule above, "" if there is none: what had begun `in_time` and can run its
    plan, and `at_all`, where nothing can."""

    in_time: str
    at_all: str

    @classmethod
    def of(cls, row: Row, month: str, without: frozenset[str]) -> "_Usual":
        """The usual software; `month` is the one that the row states, if any."""
        device = device_of(row["gpu"])
        number = _number_of(row)
        if not (month := month or _month(row.get("date") or "")):
            went_out = number.usual_until if device.peak_flops("bf16") else ""
            month = min(filter(None, (device.in_use, went_out))) if device.in_use else ""
            month = month and max([month, *(since for since, is_so in _MODELS if is_so(row))])
        specs = [software_of(name) for name in catalog.names("software")]
        meant = [spec for spec in specs if _is_meant(spec.usual, device.generation, number.is_narrow)]
        able = [spec for spec in meant if _can_run(spec, row)]
        soon = [spec for spec in able if month and months(spec.since) - months(month) <= _SOON]
        in_time = _newest(able, month, without) or nearest_generation(soon, month, without)
        return cls(in_time, _newest(meant, month, without) or nearest_generation(meant, month, without))


# Columns of 0 or 1, with the value at which the software's own description is changed, and the change.
FLAG_CHANGES = {
    "grouped": ("0", "experts-in-turn"),
    "dropout": ("1", "dropout"),
    "fused_loss": ("0", "plain-loss"),
    "compiled_loss": ("1", "compiled-loss"),
    "fused_gate": ("0", "plain-gate"),
    "loss_by_parts": ("1", "loss-by-parts"),
    "split_inputs": ("1", "split-inputs"),
    "no_sync": ("1", "whole-gradients"),
    "autocast": ("1", "autocast"),
    "whole_experts": ("1", "whole-experts"),
    "float8_gather": ("1", "float8-gather"),
}
# No run is older than its model: months in which parts of models came in use.
_MODELS: tuple[tuple[str, Callable[[Row], bool]], ...] = (
    ("2022-09", lambda row: whole(row, "seq") > 2048),  # codes with FlashAttention (arXiv 2205.14135)
    ("2023-02", lambda row: row.get("gated_mlp") == "1"),  # LLaMA (arXiv 2302.13971)
    ("2023-07", lambda row: 1 < whole(row, "kv_heads") < whole(row, "heads")),  # Llama 2 (2307.09288)
)
_SOON = 12  # months in which software may have been in use before its description says so


def _newest(specs: list[SoftwareSpec], month: str, without: frozenset[str]) -> str:
    """The name of the newest software that had begun by a month, what is meant for fewer runs first; "" if none had."""
    for is_narrow, has_devices in ((True, True), (False, True), (False, False)):
        group = [s for s in specs if s.usual and (s.usual.narrow, len(s.usual.devices) > 0) == (is_narrow, has_devices)]
        if any(not month or spec.since <= month for spec in group):
            return nearest_generation(group, month, without)
    return ""


def _is_meant(usual: UsualSpec | None, device: str, is_narrow: bool) -> bool:
    """True if software is assumed of runs on a generation of devices, with products in narrow numbers or not."""
    if usual is None or (usual.narrow and not is_narrow):
        return False
    return not usual.devices or device in usual.devices


_SHARDS = ("nothing", "state", "state", "parameters")  # by ZeRO stage


def _can_run(software: SoftwareSpec, row: Row) -> bool:
    """True if software is assumed to have run such a plan, and its description leaves out nothing that the plan has."""
    zero = int(float(row.get("zero_stage") or 0))
    if software.usual is None or _SHARDS[zero] not in software.usual.shards:
        return False
    supported, pipelines = had_by(software), (row.get("pp") or "1") != "1"
    plan = {"sequence_parallel": row.get("sp") == "1", "recompute": row.get("recompute") or "none"}
    if pipelines or supported.get("zero") == (0,):  # others shard more where there is no pipeline
        plan["zero"] = zero
    return all(value in supported.get(field, (value,)) for field, value in plan.items())


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
