"""The controls of the page: its fields, their choices and their meanings, from the description of a job."""

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardwright.config import catalog
from shardwright.config.catalog_entry import read_entry
from shardwright.config.cluster import DeviceSpec
from shardwright.config.field_texts import field_choices
from shardwright.config.job import JobSpec
from shardwright.config.phrase import Phrase, say, with_changed_texts
from shardwright.config.rank_order import ORDERS
from shardwright.interchange.system import SYSTEMS
from shardwright.report.step_cost import part_words
from shardwright.studio.page_state import page_fields

_OPTION = re.compile(r"--set (?P<field>[a-z_.]+)=[A-Z]+")  # in notes for a command line
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


def on_page(note: str) -> str:
    """A note for the page, on which a field is a control, or a line of a job's file where it has none."""

    def changed(text: str) -> str:
        option = _OPTION.fullmatch(text)
        return _OPTION.sub(lambda match: _way_to(match["field"]), text) if option is None else _way_to(option["field"])

    return with_changed_texts(note, changed)


def _way_to(field: str) -> Phrase:
    labels = {control.key: control.label for controls in control_groups().values() for control in controls}
    if field in labels:
        return say("the control {label}", label=labels[field])
    return say("{field} in the job's file", field=field)


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
