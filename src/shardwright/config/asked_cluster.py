"""A cluster that options of a command ask for: a number of devices of a kind, in their usual nodes with usual links.

It replaces the cluster of a job, or makes one for a model of the catalog.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from shardwright.config import catalog, largest
from shardwright.config.cluster_facts import usual_node
from shardwright.config.device_name import catalog_device
from shardwright.config.phrase import any_of, say

_NODE = "cluster.devices_per_node"
_MOST_DIGITS = 8  # of a number of devices; the checks of fields refuse larger ones


@dataclass(frozen=True)
class AskedCluster:
    """The cluster that a user asks for; 0 and an empty name are unset. A device may have a name as in tables of runs,
    such as H100, and `memory_gib` in place of its entry's memory."""

    devices: int = 0
    device: str = ""
    devices_per_node: int = 0
    memory_gib: float = 0.0

    def with_node_of(self, overrides: Iterable[str]) -> "AskedCluster":
        """The cluster with the devices of a node that an override of the job's field gives, if it has none and nothing
        is known of the usual node of its device."""
        if not self.device or self.devices_per_node:
            return self
        try:
            if usual_node(catalog_device(self.device)):
                return self
        except (KeyError, ValueError):  # told where the cluster is made
            return self
        values = [text.partition("=")[2].strip() for text in overrides if text.partition("=")[0].strip() == _NODE]
        size = int(values[-1]) if values and values[-1].isdecimal() and len(values[-1]) <= _MOST_DIGITS else 0
        return replace(self, devices_per_node=size)

    def over(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Replace fields of a cluster, resolved from the catalog, by those asked for. ValueError with the fault.

        With another device, links, topology and all other fields of the old nodes are dropped.
        """
        if self == NOTHING_ASKED:
            return fields
        if fields.get("parts"):
            raise ValueError(
                say(
                    "cluster.parts has devices of several kinds, and --devices and --device make a cluster of one; "
                    "leave them out, or name another job"
                )
            )
        device = catalog_device(self.device or str(fields.get("device", "unknown")))
        if self.memory_gib:
            device = _with_memory(device, self.memory_gib)
        kept = {key: value for key, value in fields.items() if key == "software"} if self.device else dict(fields)
        old_node, old_nodes = _positive(fields, "devices_per_node"), _positive(fields, "nodes") or 1
        count = self.devices or old_node * old_nodes
        own_node = old_node if not self.device else 0
        size = self.devices_per_node or own_node or _usual_node(device) or (1 if count == 1 else 0)
        if not count:  # the degrees of a plan determine it later
            return kept | {"device": device} | ({"devices_per_node": size} if self.devices_per_node else {})
        if not size:
            subject = (
                say("the cluster's nodes") if device == "unknown" else say("the usual node of {device}", device=device)
            )
            option = say("--device, such as h100-sxm, or ") if device == "unknown" else ""
            raise ValueError(
                say(
                    "nothing is known of {subject}; add {option}--devices-per-node, such as {example}",
                    subject=subject,
                    option=option,
                    example=min(count, 8),
                )
            )
        size = min(size, count)
        if count % size:
            raise ValueError(
                say(
                    "{count:,} devices are not whole nodes of {size} ({count} / {size} = {quotient:.2f}); use "
                    "{choices}, or --devices-per-node with a divisor of {count}",
                    count=count,
                    size=size,
                    quotient=count / size,
                    choices=any_of([str(n * size) for n in (count // size, count // size + 1)]),
                )
            )
        name = {"name": f"{device}-{count}"} if self.device else {}
        return kept | name | {"device": device, "devices_per_node": size, "nodes": count // size}


NOTHING_ASKED = AskedCluster()


def _positive(fields: dict[str, Any], name: str) -> int:
    """A field that is a positive integer; 0 if it is none, because the checks of fields report that."""
    value = fields.get(name, 0)
    return value if isinstance(value, int) and value > 0 else 0


def _with_memory(device: str, memory_gib: float) -> str:
    """The name of a device that differs from its entry in its memory. ValueError with the fault."""
    if device == "unknown" or catalog.is_file(device):
        way_out = (
            say("name one with --device, such as h100-sxm")
            if device == "unknown"
            else say("set memory_gib in {device}", device=device)
        )
        raise ValueError(
            say(
                "--memory-gib replaces the memory of a device of the catalog, and {device} is none; {way_out}",
                device=device,
                way_out=way_out,
            )
        )
    least, most = largest.LEAST_MEMORY_GIB, largest.MEMORY_GIB
    if not least <= memory_gib <= most:
        raise ValueError(
            say(
                "memory_gib is {text}; use a number of GiB, {least:g} to {most:,.0f}",
                text=f"{memory_gib:g}",
                least=least,
                most=most,
            )
        )
    return f"{catalog.split_memory(device)[0]}@{f'{memory_gib:.3f}'.rstrip('0').rstrip('.')}gib"


def _usual_node(device: str) -> int:
    try:
        return usual_node(device)
    except (KeyError, ValueError) as error:
        raise ValueError(say("--device {reason}", reason=error.args[0])) from None
