"""Bytes of parameters, gradients and optimizer state between steps, by the stage of ZeRO (Rajbhandari et al. 2020,
arXiv 1910.02054, figure 1).

The account calls it for each unit of a rank, with whole numbers; a search for all parameters of many plans at once,
with arrays. Nothing here needs numpy.
"""

from dataclasses import dataclass
from typing import Any

from shardwright.config.array_math import where
from shardwright.config.units import FLOAT32_BYTES

Bytes = Any  # a number, or an array with one entry a plan


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of a value as the forward takes it, of an accumulated gradient and of the optimizer's moments, of one
    element. `is_master`: values are what the optimizer updates, and not a copy, if they are in the same memory as the
    moments: they are float32, or there are no master weights. Values that are not `is_updated` are frozen, and have no
    master weights in any memory."""

    value: Bytes
    gradient: Bytes
    moments: Bytes
    is_master: bool
    is_updated: bool = True


@dataclass(frozen=True)
class HeldElements:
    """Numbers of elements: all of a rank, those of its shard, and those of the shard whose moments are on the host."""

    all: Bytes
    shard: Bytes
    hosted: Bytes


@dataclass(frozen=True)
class StateBytes:
    """Bytes by kind. All are on the device but `host`, which has a gradient for each element that it updates (Ren et
    al. 2021, arXiv 2101.06840, section 4.1)."""

    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes
    host: Bytes

    def __add__(self, other: "StateBytes") -> "StateBytes":
        return StateBytes(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            host=self.host + other.host,
        )


def state_bytes(
    num: HeldElements, element: ElementBytes, zero: Bytes, are_values_hosted: Bytes, is_one_memory: bool
) -> StateBytes:
    """The bytes of elements under a stage of ZeRO.

    `are_values_hosted`: values are in host memory, under ZeRO-3. If host and device are one memory, as on a CPU, such
    values count for the host, and yet serve as master weights of the device (parallel/zero/master_weights.py).
    """
    values = element.value * where(zero == 3, num.shard, num.all)
    are_away = are_values_hosted * (not is_one_memory)
    master = FLOAT32_BYTES * element.is_updated
    usual_master = master * (not element.is_master)
    device_master, host_master = where(are_away, master, usual_master), where(are_away, usual_master, master)
    return StateBytes(
        parameters=where(are_values_hosted, 0, values),
        gradients=element.gradient * where(zero >= 2, num.shard, num.all),
        optimizer=(num.shard - num.hosted) * (element.moments + device_master),
        host=num.hosted * (element.moments + FLOAT32_BYTES + host_master) + where(are_values_hosted, values, 0),
    )
