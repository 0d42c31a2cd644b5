"""Tables of the catalog: its models, devices, clusters, schedules and software."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.config import catalog
from shardwright.config.base import PlanError
from shardwright.config.catalog_entry import read_entry
from shardwright.config.cluster import ClusterSpec, DeviceSpec
from shardwright.config.model import ModelSpec
from shardwright.config.phrase import ENGLISH, any_of, say
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software import software_of
from shardwright.config.units import number_text
from shardwright.cost.money import price_source
from shardwright.report.document import paragraph
from shardwright.report.rendered import LEAST_ROOM, WideRows, rendered
from shardwright.sharding.stage_parameters import num_active_parameters, num_parameters

Row = dict[str, Any]
_BILLION = 1e9


@dataclass(frozen=True)
class CatalogTable:
    """One kind of entries: its rows as data, the columns of its table in words, by field, and a last sentence. The long
    values of `noted` fields stand below the table, each field with words for the entries and for the values. The last
    column, where it `is_cut`, ends with the terminal's line, and is left out where it has less than `least_room`
    columns; else it is broken into lines."""

    rows: Callable[[], list[Row]]
    columns: dict[str, str]
    left: tuple[str, ...]
    use: str
    noted: tuple[tuple[str, str, str], ...] = ()
    is_cut: bool = False
    least_room: int = LEAST_ROOM


def catalog_rows(kind: str, words: Sequence[str] = ()) -> list[Row]:
    """The entries of a kind whose names have some words, in any spelling of capitals and hyphens; for --json. Names of
    the Hub and of frameworks count, too. Null is unknown. Raises PlanError if there is none."""
    rows = CATALOG_TABLES[kind].rows()
    asked = list(filter(None, map(_letters, words)))
    chosen = [row for row in rows if all(any(word in name for name in _names_of(row)) for word in asked)]
    if not chosen:
        faults = [say("no name has {words}; {hint}", words=words, hint=_hint(kind, words[0]))]
        raise PlanError(kind, faults)
    return chosen


def _hint(kind: str, word: str) -> str:
    """A way out for a word that no name of a kind has."""
    near = catalog.nearest(word, [row["name"] for row in CATALOG_TABLES[kind].rows()])
    if near:
        return say("did you mean {meant}?", meant=any_of(near))
    return say("`shardwright {kind}` lists all", kind=kind)


def _names_of(row: Row) -> list[str]:
    """The names of an entry, in one spelling."""
    others = *row.get("hub_names", ()), *row.get("frameworks", ()), row.get("title") or ""
    return [_letters(name) for name in (row["name"], *others)]


def _letters(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


def catalog_text(kind: str, coloured: bool = False, language: str = ENGLISH, entries: Sequence[Row] = ()) -> str:
    """The entries of a kind, all or those given, as a table as wide as the terminal, in a language."""
    table = CATALOG_TABLES[kind]
    entries = list(entries) or table.rows()
    rows = [[_cell(row[name], name) for name in table.columns] for row in entries]
    left = tuple(place for place, name in enumerate(table.columns) if name in table.left)
    shown = WideRows(tuple(table.columns.values()), rows, left, is_cut=table.is_cut, least_room=table.least_room)
    noted = [WideRows(heading, _by_value(entries, field), (0,)) for field, *heading in table.noted]
    return rendered([shown, *noted, paragraph(table.use)], coloured, language)


def _by_value(entries: list[Row], field: str) -> list[list[str]]:
    """The names of the entries that have each value of a field, and the value as a sentence."""
    values = dict.fromkeys(row[field] for row in entries if row[field])
    return [
        [", ".join(row["name"] for row in entries if row[field] == value), say("{value}.", value=value)]
        for value in values
    ]


def _cell(value: Any, name: str) -> str:
    if value is None:
        return ""
    if name.startswith("usd"):
        return f"{value:,.2f}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, str):
        return value  # which may be a phrase
    return number_text(value) if isinstance(value, float) else f"{value:,}"


def _models() -> list[Row]:
    hub_names = catalog.hub_names()
    rows = []
    for name in catalog.names("models"):
        model = read_entry("models", name, ModelSpec)
        experts = model.moe.experts
        rows.append(
            {
                "name": name,
                "parameters_b": round(num_parameters(model) / _BILLION, 4),
                "active_parameters_b": round(num_active_parameters(model) / _BILLION, 4) if experts else None,
                "layers": model.layers,
                "hidden": model.hidden,
                "heads": model.heads,
                "kv_heads": model.num_kv_heads,
                "experts": experts or None,
                "vocab": model.vocab,
                "sequence": model.sequence,
                "hub_names": hub_names.get(name, []),
            }
        )
    return sorted(rows, key=lambda row: float(row["parameters_b"]))


def _devices() -> list[Row]:
    rows = []
    for name in catalog.names("devices"):
        device = read_entry("devices", name, DeviceSpec)
        rows.append(
            {
                "name": name,
                "memory_gib": device.memory_gib,
                "bf16_tflops": device.peak_tflops.get("bfloat16"),
                "fp8_tflops": device.peak_tflops.get("float8"),
                "fp4_tflops": device.peak_tflops.get("float4"),
                "memory_gb_per_s": device.memory_gb_per_s or None,
                "link_gb_per_s": device.link_gb_per_s or None,
                "link_domain": device.link_domain or None,
                "network_gb_per_s": device.network_gb_per_s or None,
                "usd_per_hour": device.usd_per_hour or None,
                "price_source": price_source(device) or None,
            }
        )
    return rows


def _clusters() -> list[Row]:
    rows = []
    for name in catalog.names("clusters"):
        cluster = read_entry("clusters", name, ClusterSpec)
        rows.append(
            {
                "name": name,
                "device": cluster.device,
                "devices": cluster.num_devices or None,
                "devices_per_node": cluster.devices_per_node or None,
                "intra_node_gb_per_s": cluster.intra_node.bandwidth_gb_per_s or None,
                "inter_node_gb_per_s": cluster.inter_node.bandwidth_gb_per_s or None,
                "usd_per_device_hour": cluster.usd_per_device_hour or None,
                "software": cluster.software,
            }
        )
    return rows


def _schedules() -> list[Row]:
    return [
        {
            "name": facts.name,
            "stages_per_rank": facts.stages_per_rank or "plan.virtual_stages",
            "copies": facts.num_copies,
            "splits_weights": facts.splits_weights,
            "is_searched": not facts.not_searched,
            "bubble": facts.bubble or None,
            "when": facts.when or None,
        }
        for facts in sorted(SCHEDULES.values(), key=lambda facts: facts.place)
    ]


def _software() -> list[Row]:
    rows = []
    for name in catalog.names("software"):
        software = software_of(name)
        rows.append(
            {
                "name": name,
                "title": software.title or None,
                "frameworks": list(software.frameworks),
                "since": software.since or None,
                "attention": software.attention,
                "zero_stages": list(software.zero_stages) if software.zero_stages is not None else None,
                "schedules": list(software.schedules) if software.schedules is not None else None,
                "source": software.source,
            }
        )
    return rows


CATALOG_TABLES: dict[str, CatalogTable] = {
    "models": CatalogTable(
        _models,
        {
            "name": say("name"),
            "parameters_b": say("billion"),
            "active_parameters_b": say("a token"),
            "layers": say("layers"),
            "hidden": say("hidden"),
            "heads": say("heads"),
            "kv_heads": "kv",
            "vocab": say("vocab"),
            "sequence": say("sequence"),
            "hub_names": say("on the Hub"),
        },
        ("name",),
        say(
            "shardwright plan NAME --devices 64 --device h100-sxm plans one; so it does with a name of the Hub (--json "
            "and a wide terminal have them), or a folder with a config.json."
        ),
        is_cut=True,
        least_room=30,
    ),
    "devices": CatalogTable(
        _devices,
        {
            "name": say("name"),
            "memory_gib": "GiB",
            "bf16_tflops": "bf16",
            "fp8_tflops": "fp8",
            "fp4_tflops": "fp4",
            "memory_gb_per_s": "GB/s",
            "link_gb_per_s": say("link"),
            "link_domain": say("joins"),
            "network_gb_per_s": say("port"),
            "usd_per_hour": "$/h",
        },
        ("name",),
        say(
            "TFLOP/s without sparsity; memory, link and port of the network in GB/s a device and direction; a link "
            "joins that many devices."
        ),
        (("price_source", say("device"), say("price")),),
    ),
    "clusters": CatalogTable(
        _clusters,
        {
            "name": say("name"),
            "device": say("device"),
            "devices": say("devices"),
            "devices_per_node": say("a node"),
            "intra_node_gb_per_s": say("inside"),
            "inter_node_gb_per_s": say("between"),
            "usd_per_device_hour": "$/h",
            "software": say("software"),
        },
        ("name", "device"),
        say("Links inside a node and between nodes in GB/s a device; empty: what is usual for the device holds."),
    ),
    "schedules": CatalogTable(
        _schedules,
        {
            "name": say("name"),
            "stages_per_rank": say("stages a rank"),
            "copies": say("copies"),
            "bubble": say("bubble"),
            "when": say("if"),
        },
        ("name", "bubble"),
        say(
            "A bubble is of m microbatches on p ranks, simulated where it is empty. `shardwright schedule NAME` "
            "draws one."
        ),
    ),
    "software": CatalogTable(
        _software,
        {
            "name": say("name"),
            "title": say("in words"),
            "since": say("since"),
            "attention": say("attention"),
            "zero_stages": "ZeRO",
            "schedules": say("schedules"),
        },
        ("name", "title", "since", "attention", "zero_stages", "schedules"),
        say("--as NAME predicts with one; empty: its entry does not say."),
    ),
}
