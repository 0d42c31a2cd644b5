"""True if a plan fits its cluster's device and host: of this runtime by the account, of other software by what is
predicted of its processes, as `plan` judges it too."""

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.config import catalog
from shardwright.config.catalog_entry import read_entry
from shardwright.config.cluster import DeviceSpec
from shardwright.config.host_memory import host_memory_bytes, host_room_bytes
from shardwright.config.job import JobSpec
from shardwright.config.link_words import link_words
from shardwright.config.software import software_of
from shardwright.config.units import memory_text
from shardwright.sharding.memory_account import RankMemory

if TYPE_CHECKING:
    from shardwright.planner.own_plan import Estimate


def device_room_bytes(job: JobSpec) -> int | None:
    """The bytes of the cluster's device that a plan may fill; None if the job does not name the device."""
    if job.cluster.device == "unknown":
        return None
    from shardwright.cost.communicators import job_room_bytes

    return int(job_room_bytes(job))


def device_entry(job: JobSpec) -> DeviceSpec:
    """The device of the cluster, as the catalog has it."""
    return read_entry("devices", job.cluster.device, DeviceSpec)


@dataclass(frozen=True)
class _Need:
    """The needs of a pipeline rank, on the device and on its host; for other software they include the process."""

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Fit:
    """The needs of each pipeline rank beside the room. `software` is other software, or empty."""

    needs: tuple[_Need, ...]
    room_bytes: int
    host_room_bytes: float
    software: str

    @property
    def fits(self) -> bool:
        """True if every rank does."""
        return all(
            need.device_bytes <= self.room_bytes and need.host_bytes <= self.host_room_bytes for need in self.needs
        )


def fit_of(job: JobSpec, memory: list[RankMemory], priced: "Estimate | str") -> Fit | None:
    """How the plan fits; None where the device is not known. What can't be priced is judged by the account."""
    room, host_room = device_room_bytes(job), host_room_bytes(job.cluster)
    if room is None:
        return None
    software = software_of(job.cluster.software)
    if software.is_own or isinstance(priced, str):
        return Fit(
            tuple(_Need(rank_memory.total_bytes, rank_memory.host_bytes) for rank_memory in memory), room, host_room, ""
        )
    from shardwright.cost.calibration import shipped
    from shardwright.cost.job_memories import job_memories

    needs = tuple(
        _Need(int(rank_memory.process), int(rank_memory.host)) for rank_memory in job_memories(job, shipped())
    )
    return Fit(needs, int(device_entry(job).offered_bytes), host_room, software.name)


def verdict_text(job: JobSpec, fit: Fit | None) -> str:
    """True if it fits, for reading."""
    if fit is None:
        known = ", ".join(catalog.names("devices"))
        return f"Whether it fits is not said: cluster.device is unknown. The catalog has {known}."
    rank, needed = max(enumerate(need.device_bytes for need in fit.needs), key=lambda pair: pair[1])
    device, whole = device_entry(job), memory_text(int(device_entry(job).memory_bytes))
    if fit.software:
        shown = f"which shows {memory_text(fit.room_bytes)} of its {whole}"
        one = f"one {device.name}, {shown}, under the cluster's software ({fit.software})"
        where = f"the process of pp rank {rank} needs {memory_text(needed)}"
        after = " The table is what this runtime would hold."
    else:
        kept = memory_text(int(device.memory_bytes) - fit.room_bytes)
        offered = (
            f"which offers {memory_text(fit.room_bytes)} (the process and its libraries take {kept} of its {whole})"
        )
        one, after = f"one {device.name}, {offered}", ""
        where = f"pp rank {rank} needs {memory_text(needed)}"
    left = fit.room_bytes - needed
    if left < 0:
        verdict = f"It does not fit {one}: {where}, which is {memory_text(-left)} too much."
    else:
        hosted = f" {_host_text(job, fit)}" if any(need.host_bytes for need in fit.needs) else ""
        verdict = f"It fits {one}: {where}, which leaves {memory_text(left)}.{hosted}"
    return textwrap.fill(verdict + after, 110)


def _host_text(job: JobSpec, fit: Fit) -> str:
    """True if what is offloaded fits in the host's memory."""
    rank, most = max(enumerate(need.host_bytes for need in fit.needs), key=lambda pair: pair[1])
    where = f"pp rank {rank} offloads {memory_text(most)} a device"
    room, per_node = host_memory_bytes(job.cluster), max(1, job.cluster.devices_per_node)
    if room is None:
        return f"{where}; whether its host has that is not said: set cluster.host_memory_gib."
    word = link_words(job.cluster).domain
    node = f"its {word}'s {memory_text(int(room * per_node))} for {per_node} devices are {memory_text(int(room))} each"
    left = room - most
    if left < 0:
        return (
            f"It does not fit its host: {where}, and {node}, {memory_text(int(-left))} too little; offload less, shard "
            f"over more replicas, or set cluster.host_memory_gib if a {word} has more."
        )
    return f"{where}, and {node}, which leaves {memory_text(int(left))}."
