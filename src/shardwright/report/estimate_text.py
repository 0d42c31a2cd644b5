"""What the command `estimate` prints: the memory account of a job, by pipeline rank, and whether it fits.

And, where the cluster's device is known, time, MFU, money, energy and time lost to failures (report/step_cost.py).
"""

import textwrap
from typing import TYPE_CHECKING, Any

from shardwright.account.job_memory import job_memory
from shardwright.config import catalog
from shardwright.config.catalog_entry import read_entry
from shardwright.config.cluster import DeviceSpec
from shardwright.config.host_memory import host_memory_bytes, host_room_bytes
from shardwright.config.job import JobSpec
from shardwright.config.model import ModelSpec
from shardwright.config.units import counted, memory_text
from shardwright.report.nearest_text import nearest_plans, nearest_text
from shardwright.report.prediction_notes import job_notes
from shardwright.report.text_columns import aligned
from shardwright.schedule.job_program import job_program
from shardwright.sharding.memory_account import RankMemory
from shardwright.sharding.stage_parameters import num_active_parameters, num_parameters, stage_parameters

if TYPE_CHECKING:
    from shardwright.planner.own_plan import Estimate

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "working", "total")


def _priced(job: JobSpec) -> "Estimate | str":
    """What the plan takes; or why that is not known, and what to set."""
    if job.cluster.device == "unknown":
        return "Time, money and energy are not said: set cluster.device, and the bandwidths of the cluster's links."
    from shardwright.planner.own_plan import estimate  # it takes numpy, and the account of memory does not

    try:
        return estimate(job)
    except (KeyError, ValueError) as error:
        return f"Time, money and energy are not said: {error.args[0]}."


def device_room_bytes(job: JobSpec) -> int | None:
    """What a plan may fill of the memory of the cluster's device; None where the job does not say which it is."""
    if job.cluster.device == "unknown":
        return None
    return int(_device(job).room_bytes)


def _device(job: JobSpec) -> DeviceSpec:
    return read_entry("devices", job.cluster.device, DeviceSpec)


def estimate_dict(job: JobSpec) -> dict[str, Any]:
    """For `--json`. Bytes, seconds, US dollars; null is unknown."""
    memory, priced = job_memory(job), _priced(job)
    limit, fits = device_room_bytes(job), _fits(job, memory)
    return {
        "job": job.name,
        "parameters": num_parameters(job.model),
        "active_parameters": num_active_parameters(job.model),
        "memory": [rank.as_dict() for rank in memory],
        "device_memory_bytes": None if limit is None else int(_device(job).memory_bytes),
        "device_room_bytes": limit,
        "host_memory_bytes": host_memory_bytes(job.cluster),
        "fits": fits,
        "nearest": [] if isinstance(priced, str) else nearest_plans(job, bool(fits), priced),
        "notes": job_notes(job),
        **_takes_dict(job, priced),
    }


def _fits(job: JobSpec, memory: list[RankMemory]) -> bool | None:
    """Whether every rank does; None where the device is not known."""
    limit, room = device_room_bytes(job), host_room_bytes(job.cluster)
    return None if limit is None else all(of.total_bytes <= limit and of.host_bytes <= room for of in memory)


def _nearest(job: JobSpec, memory: list[RankMemory], priced: "Estimate | str") -> list[str]:
    """Plans that fit, where this one does not."""
    limit = device_room_bytes(job)
    if isinstance(priced, str) or limit is None or (_fits(job, memory) and priced.memory.process <= limit):
        return []
    return [nearest_text(nearest_plans(job, fits=False, priced=priced))]


def _takes_dict(job: JobSpec, priced: "Estimate | str") -> dict[str, Any]:
    if isinstance(priced, str):
        return {"not_priced": priced}
    from shardwright.report.step_cost import price_dict

    return price_dict(job, priced)


def _takes_text(job: JobSpec, priced: "Estimate | str") -> str:
    if isinstance(priced, str):
        return textwrap.fill(priced, 110)
    from shardwright.report.step_cost import price_text

    return price_text(job, priced)


def estimate_text(job: JobSpec) -> str:
    """An estimate for reading."""
    plan, memory, priced = job.plan, job_memory(job), _priced(job)
    placement = job_program(job).placement
    kinds = [*KINDS, "host"] if any(of_rank.host_bytes for of_rank in memory) else KINDS
    rows = [["pp rank", "layers", *kinds, "state a parameter"]]
    for rank, of_rank in enumerate(memory):
        held = [stage_parameters(job.model, plan, stage) for stage in placement.stages_of(rank)]
        layers = sum(region.isdigit() for regions in held for region in regions)
        places = (place for regions in held for places in regions.values() for place in places)
        elements = sum({place.name: place.num_elements for place in places}.values())
        values = of_rank.as_dict()
        bytes_by_kind = [memory_text(values[f"{kind}_bytes"]) for kind in kinds]
        rows.append([str(rank), str(layers), *bytes_by_kind, f"{of_rank.state_bytes / elements:.2f} B"])
    heading = (
        f"{job.name}: {parameters_text(job.model)} on {counted(plan.world, 'rank')}, "
        f"{plan.degrees}, {f'ep {plan.ep}, ' if plan.ep > 1 else ''}ZeRO {plan.zero}, {plan.schedule}, "
        f"{counted(job.num_microbatches, 'microbatch')} of {plan.microbatch_size}, computed in {job.precision.compute}"
    )
    note = (
        "Of the tensor-parallel rank that holds most. Parameters, gradients and optimizer state are exact; activations "
        "are what is kept for the backward, buffers are at their peak, and working memory is what operators need while "
        "they run. The last column is parameters, gradients and optimizer state by the "
        "parameters of the rank's stages."
    )
    takes = _takes_text(job, priced)
    notes = [textwrap.fill(f"Note: {note}.", 110) for note in job_notes(job)]
    verdict = [_verdict(job, memory), *_nearest(job, memory, priced)]
    return "\n\n".join([heading, textwrap.fill(note, 110), aligned(rows), *verdict, takes, *notes])


def parameters_text(model: ModelSpec) -> str:
    """ "8,000 parameters", and of a model with experts how many of them compute a token."""
    active = f" ({num_active_parameters(model):,} compute a token)" if model.moe.experts else ""
    return f"{num_parameters(model):,} parameters{active}"


def _verdict(job: JobSpec, memory: list[RankMemory]) -> str:
    limit = device_room_bytes(job)
    if limit is None:
        known = ", ".join(catalog.names("devices"))
        return f"Whether it fits is not said: cluster.device is unknown. The catalog has {known}."
    largest = max(memory, key=lambda rank: rank.total_bytes)
    spec = _device(job)
    kept = f"{memory_text(int(spec.memory_bytes) - limit)} of its {memory_text(int(spec.memory_bytes))}"
    device = f"one {spec.name}, which offers {memory_text(limit)} (the process and its libraries take {kept})"
    where = f"pp rank {memory.index(largest)} needs {memory_text(largest.total_bytes)}"
    left = limit - largest.total_bytes
    if left < 0:
        return textwrap.fill(f"It does not fit {device}: {where}, which is {memory_text(-left)} too much.", 110)
    hosted = f" {_host_verdict(job, memory)}" if any(rank.host_bytes for rank in memory) else ""
    return textwrap.fill(f"It fits {device}: {where}, which leaves {memory_text(left)}.{hosted}", 110)


def _host_verdict(job: JobSpec, memory: list[RankMemory]) -> str:
    """Whether what is offloaded fits in the host's memory."""
    most = max(memory, key=lambda rank: rank.host_bytes)
    where = f"pp rank {memory.index(most)} offloads {memory_text(most.host_bytes)} a device"
    room, per_node = host_memory_bytes(job.cluster), max(1, job.cluster.devices_per_node)
    if room is None:
        return f"{where}; whether its host has that is not said: set cluster.host_memory_gib."
    node = f"its node's {memory_text(int(room * per_node))} for {per_node} devices are {memory_text(int(room))} each"
    left = room - most.host_bytes
    if left < 0:
        return (
            f"It does not fit its host: {where}, and {node}, {memory_text(int(-left))} too little; offload less, shard "
            "over more replicas, or set cluster.host_memory_gib if a node has more."
        )
    return f"{where}, and {node}, which leaves {memory_text(int(left))}."
