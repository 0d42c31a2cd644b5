"""The verdict on whether a plan fits its cluster's device and host; and the sentence for a job for which no plan fits.

Everywhere a plan's memory is that of a rank's process: what the plan holds, and the context, communicators and losses
of the allocator beside it. It is compared with the memory that the device shows, which all its processes can have.
For this runtime the plan's part is the memory account; for other software the whole process is predicted.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.config import catalog
from shardwright.config.catalog_entry import read_entry
from shardwright.config.cluster import DeviceSpec
from shardwright.config.cluster_facts import host_memory_bytes, host_room_bytes
from shardwright.config.job import JobSpec
from shardwright.config.link_words import link_words
from shardwright.config.phrase import fixed, say
from shardwright.config.software import software_of
from shardwright.config.text_columns import filled
from shardwright.config.units import GIB, counted_phrase, memory_text
from shardwright.memory.checkpoint_copies import most_copied_bytes
from shardwright.memory.fit_chance import fit_chance
from shardwright.sharding.memory_account import RankMemory

if TYPE_CHECKING:
    from shardwright.memory.rank_estimate import Memory
    from shardwright.planner.own_plan import PricedStep


def device_room_bytes(job: JobSpec) -> int | None:
    """The bytes of the cluster's device that a plan may fill; None if the job does not name the device."""
    if job.cluster.device == "unknown":
        return None
    from shardwright.cost.communicators import job_room_bytes

    return int(job_room_bytes(job))


def device_entry(job: JobSpec) -> DeviceSpec:
    """The catalog's entry of the cluster's device."""
    return read_entry("devices", job.cluster.device, DeviceSpec)


def offered_bytes(job: JobSpec) -> int:
    """The bytes of memory that the job's device shows: all that processes on it can have."""
    return int(device_entry(job).offered_bytes)


def share_text(process_bytes: float, job: JobSpec, chance: float | None) -> str:
    """The memory of a process beside that which its device shows, and the chance that it fits if there is one: "29.8 of
    79.0 GiB"."""
    process, room = process_bytes / GIB, offered_bytes(job) / GIB
    if chance is None:
        return say("{process:.1f} of {room:.1f} GiB", process=process, room=room)
    return say("{process:.1f} of {room:.1f} GiB (fits: {chance:.0%})", process=process, room=room, chance=chance)


@dataclass(frozen=True)
class _Need:
    """The needs of the process of a pipeline rank, on the device and on its host."""

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Fit:
    """The needs of each pipeline rank's process, of which `beside_bytes` are no part of the plan; the memory that the
    device shows, and the room on its host. `software` is empty for this runtime; for others `beside_bytes` is 0, and
    `predicted` is the memory of each rank's process."""

    needs: tuple[_Need, ...]
    offered_bytes: int
    host_room_bytes: float
    software: str
    beside_bytes: int = 0
    predicted: tuple["Memory", ...] = ()

    @property
    def fits(self) -> bool:
        """True if every rank fits."""
        return all(
            need.device_bytes <= self.offered_bytes and need.host_bytes <= self.host_room_bytes for need in self.needs
        )


def fit_of(job: JobSpec, memory: list[RankMemory], priced: "PricedStep | str") -> Fit | None:
    """The fit of a plan; None if the device is unknown. A plan without a price is judged by the account."""
    room, host_room = device_room_bytes(job), host_room_bytes(job.cluster)
    if room is None:
        return None
    software = software_of(job.cluster.software)
    shown = offered_bytes(job)
    if software.is_own or isinstance(priced, str):
        beside = shown - room
        needs = tuple(_Need(rank_memory.total_bytes + beside, rank_memory.host_bytes) for rank_memory in memory)
        return Fit(needs, shown, host_room, "", beside)
    from shardwright.cost.calibration import shipped
    from shardwright.memory.job_memories import job_memories

    predicted = tuple(job_memories(job, shipped()))
    needs = tuple(_Need(int(rank_memory.process), int(rank_memory.host)) for rank_memory in predicted)
    return Fit(needs, shown, host_room, software.name, predicted=predicted)


def verdict_text(job: JobSpec, fit: Fit | None) -> str:
    """Text that says whether a plan fits, and by how much."""
    return filled(" ".join(verdict_sentences(job, fit)))


def verdict_sentences(job: JobSpec, fit: Fit | None) -> list[str]:
    """Sentences that say whether a plan fits, and by how much."""
    if fit is None:
        known = tuple(catalog.names("devices"))
        return [say("Nothing says if it fits: cluster.device is unknown. The catalog has {known}.", known=known)]
    rank, needed = max(enumerate(need.device_bytes for need in fit.needs), key=lambda pair: pair[1])
    shown, memory = memory_text(fit.offered_bytes), memory_text(int(device_entry(job).memory_bytes))
    device = device_entry(job).name
    if fit.software:
        device_text = say(
            "one {device}, which shows {room} of its {memory}, under the cluster's software ({software})",
            device=device,
            room=shown,
            memory=memory,
            software=fit.software,
        )
        need_text = say("the process of pp rank {rank} needs {needed}", rank=rank, needed=memory_text(needed))
        likely: list[str] = [
            say(
                "As far as predictions of memory were off, the chance that it fits is {chance:.0%}.",
                chance=fit_chance(needed, fit.offered_bytes),
            )
        ]
    else:
        device_text = say("one {device}, which shows {room} of its {memory}", device=device, room=shown, memory=memory)
        need_text = say(
            "the process of pp rank {rank} needs {needed} ({beside} for the process itself)",
            rank=rank,
            needed=memory_text(needed),
            beside=memory_text(fit.beside_bytes),
        )
        likely = []
    left_bytes = fit.offered_bytes - needed
    if left_bytes < 0:
        verdict = say(
            "It does not fit {device}: {need}, which is {excess} too much.",
            device=device_text,
            need=need_text,
            excess=memory_text(-left_bytes),
        )
        return [verdict, *likely]
    verdict = say(
        "It fits {device}: {need}, which leaves {left}.",
        device=device_text,
        need=need_text,
        left=memory_text(left_bytes),
    )
    host_sentences = [_host_text(job, fit)] if any(need.host_bytes for need in fit.needs) else []
    return [verdict, *host_sentences, *likely]


def kinds_sentences(fit: Fit | None) -> list[str]:
    """Sentences on the process of other software's fullest rank by kind, for a reader who sees the account of this
    runtime above them; none for this runtime."""
    if fit is None or not fit.software:
        return []
    fullest = max(fit.predicted, key=lambda memory: float(memory.process))
    return [
        say("By kind, in GiB: {kinds}.", kinds=kinds_words(fullest)),
        say("The table is of Shardwright's own runtime."),
    ]


def kinds_words(memory: "Memory") -> tuple[str, ...]:
    """The GiB of a process on its device by kind, largest first: ("gradients 15.0", "activations 6.0")."""
    kinds = {name: float(value) for name, value in memory.on_device().items() if value}
    return tuple(
        say("{kind} {size:.1f}", kind=fixed(name), size=size / GIB)
        for name, size in sorted(kinds.items(), key=lambda pair: -pair[1])
    )


def _host_text(job: JobSpec, fit: Fit) -> str:
    """A sentence that says whether the offloaded state fits the host's memory."""
    rank, needed = max(enumerate(need.host_bytes for need in fit.needs), key=lambda pair: pair[1])
    need_text = say("pp rank {rank} offloads {needed} a device", rank=rank, needed=memory_text(needed))
    room, per_node = host_memory_bytes(job.cluster), max(1, job.cluster.devices_per_node)
    if room is None:
        return say("{need}; whether its host has that is not said: set cluster.host_memory_gib.", need=need_text)
    domain = link_words(job.cluster).domain
    alone = say("its {domain}'s are {room}", domain=say(domain), room=memory_text(int(room)))
    shared = say(
        "its {domain}'s {whole} for {devices} devices are {room} each",
        domain=say(domain),
        whole=memory_text(int(room * per_node)),
        devices=per_node,
        room=memory_text(int(room)),
    )
    room_text = alone if per_node == 1 else shared
    left_bytes = room - needed
    if left_bytes < 0:
        return say(
            "It does not fit its host: {need}, and {room}, {lack} too little; offload less, shard over more replicas, "
            "or set cluster.host_memory_gib if a {domain} has more.",
            need=need_text,
            room=room_text,
            lack=memory_text(int(-left_bytes)),
            domain=say(domain),
        )
    return say(
        "{need}, and {room}, which leaves {left}.", need=need_text, room=room_text, left=memory_text(int(left_bytes))
    )


def checkpoint_note(job: JobSpec, memory: list[RankMemory]) -> list[str]:
    """A note on the host memory that a checkpoint takes before it is written; none if the job keeps none."""
    copied_bytes = most_copied_bytes(job)
    if not copied_bytes:
        return []
    copied = say(
        "a checkpoint copies at most {copied} a device to host memory before it is written",
        copied=memory_text(copied_bytes),
    )
    room, hosted_bytes = host_memory_bytes(job.cluster), max(rank_memory.host_bytes for rank_memory in memory)
    if room is None or copied_bytes + hosted_bytes <= room:
        return [copied]
    hosted = say(", beside {hosted} that are offloaded", hosted=memory_text(hosted_bytes)) if hosted_bytes else ""
    return [
        say(
            "{copied}{hosted}, and a device's share of its host is {room}: shard over more replicas (plan.zero), or "
            "set cluster.host_memory_gib if a host has more",
            copied=copied,
            hosted=hosted,
            room=memory_text(int(room)),
        )
    ]


_WAYS_OUT = say(
    "Use more devices (--devices, or cluster.nodes), a device with more memory, a shorter model.sequence, or fewer "
    "--keep."
)


def no_plan_text(job: JobSpec) -> str:
    """The reason why no plan fits: the state exceeds all devices together, or it fits and other memory does not. With
    the excess, and the number of devices that could hold it."""
    from shardwright.cost.calibration import shipped
    from shardwright.planner.search.bounds import least_state_bytes
    from shardwright.planner.search.plan_price import room_bytes

    num_devices, host = job.cluster.num_devices, host_room_bytes(job.cluster)
    state, room = least_state_bytes(job, shipped()), room_bytes(job)
    offered = say("{room:,.1f} GiB", room=room / GIB)
    if 0 < host < math.inf:
        offered = say("{room:,.1f} GiB, and {host:,.1f} GiB of its host's memory", room=room / GIB, host=host / GIB)
    shortage = say(
        "No plan fits. Parameters, gradients and optimizer state{over_all} are about {state:,.1f} GiB of each device, "
        "which offers {offered}",
        over_all=say(", shared out over all {devices:,},", devices=num_devices) if num_devices > 1 else "",
        state=state / GIB,
        offered=offered,
    )
    if state <= room + host:
        return say(
            "{shortage}. Each plan that may be chosen needs more: activations and buffers lie beside that, and not all "
            "of it can be shared out or lie on the host. {ways_out}",
            shortage=shortage,
            ways_out=_WAYS_OUT,
        )
    needed = math.ceil(num_devices * state / (room + host)) if room + host > 0 else 0
    if needed:
        could = counted_phrase(needed, "device")
        shortage = say("{shortage}: {devices} or more could hold them", shortage=shortage, devices=could)
    return say("{shortage}. {ways_out}", shortage=shortage, ways_out=_WAYS_OUT)
