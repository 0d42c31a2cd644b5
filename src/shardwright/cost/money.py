"""Money, energy and device-hours of a step and of a run.

Energy is the maximum power of the devices (TDP) x the share of it that training takes x the site's power usage
effectiveness x time, as in Patterson et al. 2021 (arXiv 2104.10350, section 2.5). Unknown values are None, never 0, and
`money_gaps` lists the fields to set.
"""

import re
from dataclasses import dataclass
from typing import Any

from shardwright.config.cluster import ClusterSpec, DeviceSpec
from shardwright.config.phrase import fixed, say
from shardwright.cost.calibration import device_of
from shardwright.layers.arrays import Numbers

_HOUR_S = 3600.0


@dataclass(frozen=True)
class Money:
    """US dollars, kilowatt-hours and hours of one device. Numbers, or arrays with one entry a plan; None is unknown."""

    usd: Numbers | None
    kwh: Numbers | None
    device_hours: Numbers

    def times(self, count: Numbers) -> "Money":
        """The money, energy and hours times `count`."""
        return Money(
            None if self.usd is None else self.usd * count,
            None if self.kwh is None else self.kwh * count,
            self.device_hours * count,
        )


def step_money(cluster: ClusterSpec, step_s: Numbers, num_devices: Numbers) -> Money:
    """The cost of a step of `step_s` seconds on `num_devices`. KeyError if the cluster's device is not in the
    catalog."""
    hours = step_s / _HOUR_S * num_devices
    price, power_w = usd_per_device_hour(cluster), _site_power_w(cluster)
    return Money(None if price is None else price * hours, None if power_w is None else power_w / 1000 * hours, hours)


def usd_per_device_hour(cluster: ClusterSpec) -> float | None:
    """The cluster's own price, else that of its device in the catalog; None if neither is known."""
    device = _device(cluster)
    return cluster.usd_per_device_hour or (device.usd_per_hour if device else 0.0) or None


def price_words(cluster: ClusterSpec) -> str:
    """The price of a device and hour with its origin and date, in words; empty if unknown."""
    price = device_hour_price(cluster)
    return say("at ${price:,.2f} a device and hour ({origin})", **price) if price else ""


def device_hour_price(cluster: ClusterSpec) -> dict[str, Any]:
    """The `price` of a device and hour in US dollars, and its `origin` with its date; empty if unknown."""
    price, device = usd_per_device_hour(cluster), _device(cluster)
    if price is None:
        return {}
    if cluster.usd_per_device_hour or device is None:
        return {"price": price, "origin": say("as stated")}
    unstated = say("the file of {device} does not say from when", device=device.name)
    return {"price": price, "origin": price_source(device) or unstated}


def price_source(device: DeviceSpec) -> str:
    """The origin of the price of a device and hour, with its date, without the price of an instance; empty if its file
    does not say. Prices of the catalog are phrases."""
    source = re.split(r"[,:] \$", device.sources.get("usd_per_hour", ""))[0]
    return fixed(source) if source else ""


def _site_power_w(cluster: ClusterSpec) -> float | None:
    """Watts that the site takes for one device; None if unknown."""
    device = _device(cluster)
    return device.power_w * cluster.power_share * cluster.pue if device and device.power_w else None


def money_gaps(cluster: ClusterSpec) -> list[str]:
    """The unknown numbers, each with the field to set."""
    gaps: list[str] = []
    if usd_per_device_hour(cluster) is None:
        gaps.append(
            say(
                "money is not said: no price of {device} is known; set cluster.usd_per_device_hour to what you pay for "
                "a device and hour",
                device=_subject(cluster),
            )
        )
    if _site_power_w(cluster) is None:
        gaps.append(
            say(
                "energy is not said: the power of {device} is not known; set power_w in its file",
                device=_subject(cluster),
            )
        )
    return gaps


def _device(cluster: ClusterSpec) -> DeviceSpec | None:
    return None if cluster.device == "unknown" else device_of(cluster.device)


def _subject(cluster: ClusterSpec) -> str:
    device = _device(cluster)
    return device.name if device else say("cluster.device, which is unknown,")
