"""A cluster that options of a command ask for: so many devices of a kind, in their usual nodes, with their usual links.

It takes the place of the cluster of a job, or makes one for a model of the catalog.
"""

from dataclasses import dataclass
from typing import Any

from shardwright.config import catalog
from shardwright.config.device_name import device_name
from shardwright.config.usual_links import usual_node


@dataclass(frozen=True)
class AskedCluster:
    """The cluster that a user asks for; 0 and an empty name are unset. A device may be named as tables of runs do:
    H100."""

    devices: int = 0
    device: str = ""
    devices_per_node: int = 0

    def over(self, given: dict[str, Any]) -> dict[str, Any]:
        """The fields of a cluster, resolved, with what is asked for in their place. ValueError has what is wrong.

        With another device, links, topology and all else that is said of the old nodes are forgotten.
        """
        if self == NOTHING_ASKED:
            return given
        if given.get("parts"):
            raise ValueError(
                "cluster.parts has devices of several kinds, and --devices and --device make a cluster of one; leave "
                "them out, or name another job"
            )
        device = _catalog_name(self.device) or str(given.get("device", "unknown"))
        kept = {key: value for key, value in given.items() if key == "software"} if self.device else dict(given)
        before = (_whole(given, "devices_per_node"), _whole(given, "nodes") or 1)
        count = self.devices or before[0] * before[1]
        own_node = before[0] if not self.device else 0
        each = self.devices_per_node or own_node or _usual_node(device) or (1 if count == 1 else 0)
        if not count:  # the degrees of a plan will say
            return kept | {"device": device} | ({"devices_per_node": each} if self.devices_per_node else {})
        if not each:
            whose = "the cluster's nodes" if device == "unknown" else f"the usual node of {device}"
            named = "--device, such as h100-sxm, or " if device == "unknown" else ""
            raise ValueError(f"nothing is known of {whose}; add {named}--devices-per-node, such as {min(count, 8)}")
        each = min(each, count)
        if count % each:
            raise ValueError(
                f"{count:,} devices are not whole nodes of {each} ({count} / {each} = {count / each:.2f}); use "
                f"{' or '.join(str(n * each) for n in (count // each, count // each + 1))}, or --devices-per-node with "
                f"a divisor of {count}"
            )
        name = {"name": f"{device}-{count}"} if self.device else {}
        return kept | name | {"device": device, "devices_per_node": each, "nodes": count // each}


NOTHING_ASKED = AskedCluster()


def _whole(fields: dict[str, Any], name: str) -> int:
    """A number that a field is; 0 if it is none, which the checks of fields will say."""
    value = fields.get(name, 0)
    return value if isinstance(value, int) and value > 0 else 0


def _catalog_name(device: str) -> str:
    """The entry that is meant, where there is one; else the name, of which a check will say what is wrong."""
    if not device or catalog.is_file(device):
        return device
    try:
        return device_name(device)
    except KeyError:
        return device


def _usual_node(device: str) -> int:
    try:
        return usual_node(device)
    except (KeyError, ValueError) as error:
        raise ValueError(f"--device {error.args[0]}") from None
