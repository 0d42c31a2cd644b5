"""The sentence for a job for which no plan fits: the excess, and the number of devices that could hold it."""

import math

from shardwright.config.cluster_facts import host_room_bytes
from shardwright.config.job import JobSpec
from shardwright.config.units import GIB, counted
from shardwright.cost.calibration import shipped
from shardwright.planner.search.bounds import least_state_bytes
from shardwright.planner.search.plan_price import room_bytes

_WAYS_OUT = (
    "Use more devices (--devices, or cluster.nodes), a device with more memory, a shorter model.sequence, or keep less."
)


def no_plan_text(job: JobSpec) -> str:
    """The reason why no plan fits: the state exceeds all devices together, or it fits and other memory does not."""
    num_devices, host = job.cluster.num_devices, host_room_bytes(job.cluster)
    state, room = least_state_bytes(job, shipped()), room_bytes(job)
    offered = f"{room / GIB:,.1f} GiB"
    if 0 < host < math.inf:
        offered += f", and {host / GIB:,.1f} GiB of its host's memory"
    over_all = f", shared out over all {num_devices:,}," if num_devices > 1 else ""
    sentence = (
        f"No plan fits. Parameters, gradients and optimizer state{over_all} are about {state / GIB:,.1f} GiB of each "
        f"device, which offers {offered}"
    )
    if state <= room + host:
        return (
            f"{sentence}. Each plan that may be chosen needs more: activations and buffers lie beside that, and "
            f"not all of it can be shared out or lie on the host. {_WAYS_OUT}"
        )
    needed = math.ceil(num_devices * state / (room + host)) if room + host > 0 else 0
    devices_text = f": {counted(needed, 'device')} or more could hold them" if needed else ""
    return f"{sentence}{devices_text}. {_WAYS_OUT}"
