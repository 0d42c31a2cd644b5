"""The controls of the page: its fields, their choices and their meanings, from the description of a job."""

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardwright.config import catalog
from shardwright.config.catalog_entry import read_entry
from shardwright.config.cluster import DeviceSpec
from shardwright.config.field_texts import field_choices
from shardwright.config.job import JobSpec
from shardwright.config.phrase import ENGLISH, fixed, in_language, say
from shardwright.config.rank_order import ORDERS
from shardwright.interchange.system import SYSTEMS
from shardwright.report.step_cost import part_words
from shardwright.studio.page_state import page_fields

# In notes for a command line: fields as options, of a value or a placeholder, or as they are; the option for software.
_OPTION = re.compile(
    r"--set (?P<field>[a-z_.]+)=(?:[A-Z]+|(?P<value>[a-z0-9][\w.-]*))"
    r"|(?P<bare>(?<![\w.=-])[a-z]+\.[a-z_.]+[a-z])|--as NAME",
    re.ASCII,
)
_MEANINGS = {  # of controls that set no field
    "device": say("Device of the cluster, in its usual nodes with its usual links."),
    "devices": say("Devices of the cluster."),
    "memory_gib": say("Memory of a device, where it is not that of its entry in the catalog; all else stays."),
}


@dataclass(frozen=True)
class Control:
    """One control of the page: its key in the state, its label, and its choices or its range. A slider's range is
    logarithmic; `unit` stands behind its number, which is an integer if it is `whole`."""

    key: str
    label: str
    kind: Literal["choice", "number", "switch", "slider"] = "number"
    choices: tuple[str, ...] = ()
    least: float = 1
    most: float = 1
    unit: str = ""
    whole: bool = True


def _choice(key: str, label: str, choices: tuple[str, ...] = ()) -> Control:
    return Control(key, label, "choice", choices or field_choices(JobSpec, key))


def on_page(note: str, language: str = ENGLISH) -> str:
    """A note in a language for the page, on which a field is a control or stands under Other fields."""
    labels = {control.key: control.label for controls in control_groups().values() for control in controls}

    def way(match: re.Match[str]) -> str:
        field = match["field"] or match["bare"] or "cluster.software"
        if match["value"]:
            return f"{in_language(labels.get(field, field), language)}: {match['value']}"
        if field in labels:
            return in_language(say("the control {label}", label=labels[field]), language)
        if field in page_fields():
            return in_language(say("{field} under Other fields", field=field), language)
        return match[0] if match["bare"] else in_language(say("{field} in the job's file", field=field), language)

    return in_language(fixed(_OPTION.sub(way, in_language(note, language))), language)


def control_groups() -> dict[str, list[Control]]:
    """The controls by the heading of their group."""
    return {
        say("Model"): [
            Control("model.sequence", say("Sequence"), "slider", least=128, most=2**20, unit=say("tokens")),
            Control("batch.global_batch_size", say("Batch"), least=1, unit=say("sequences")),
        ],
        say("Cluster"): [
            _choice("device", say("Device"), tuple(catalog.names("devices"))),
            Control("memory_gib", say("Its memory"), "slider", (), 8, 512, "GiB", False),
            Control("devices", say("Devices"), "slider", least=1, most=2**15),
            _choice("cluster.software", say("Software"), tuple(catalog.names("software"))),
            Control(
                "cluster.intra_node.bandwidth_gb_per_s", say("Link in a node"), "slider", (), 10, 2000, "GB/s", False
            ),
            Control("cluster.inter_node.bandwidth_gb_per_s", say("Network"), "slider", (), 1, 400, "GB/s", False),
            Control("cluster.usd_per_device_hour", say("Price"), "slider", (), 0.1, 20, say("$/device-hour"), False),
        ],
        say("Degrees"): [
            Control("plan.tp", say("Tensor")),
            Control("plan.pp", say("Pipeline")),
            Control("plan.cp", say("Context")),
            Control("plan.ep", say("Expert")),
            Control("plan.dp", say("Data")),
            Control("plan.microbatch_size", say("Microbatch"), unit=say("sequences")),
            _choice("plan.order", say("Order of axes"), tuple(map(str, ORDERS))),
        ],
        say("Strategy"): [
            _choice("plan.schedule", say("Schedule")),
            Control("plan.virtual_stages", say("Stages a rank")),
            _choice("plan.zero", say("ZeRO")),
            _choice("plan.recompute", say("Recomputation")),
            Control("plan.sequence_parallel", say("Sequence parallel"), "switch"),
            Control(
                "plan.offload_optimizer", say("Offloaded optimizer"), least=0, most=1, unit=say("share"), whole=False
            ),
            _choice("precision.compute", say("Numbers")),
            _choice("precision.float8", say("fp8")),
        ],
    }


def controls_dict() -> dict[str, Any]:
    """Everything that the page shows and that does not depend on a job, as JSON."""
    meanings = page_fields() | _MEANINGS
    devices = {name: read_entry("devices", name, DeviceSpec) for name in catalog.names("devices")}
    usual = {
        name: {
            "cluster.intra_node.bandwidth_gb_per_s": device.link_gb_per_s,
            "cluster.inter_node.bandwidth_gb_per_s": device.network_gb_per_s,
            "cluster.usd_per_device_hour": device.usd_per_hour,
        }
        for name, device in devices.items()
    }
    return {
        "jobs": catalog.names("jobs"),
        "models": catalog.names("models"),
        "groups": {
            heading: [asdict(control) | {"meaning": meanings.get(control.key, "")} for control in group]
            for heading, group in control_groups().items()
        },
        "fields": meanings,
        "usual": usual,  # of a device, where a field is 0
        "systems": {system.name: system.title for system in SYSTEMS.values()},
        "parts": part_words(),
    }
