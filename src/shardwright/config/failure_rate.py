"""How often the devices of a cluster fail: as the cluster states it, else as is usual for them."""

from shardwright.config.cluster import ClusterSpec
from shardwright.config.usual_links import device_entry


def device_hours_between_failures(cluster: ClusterSpec) -> float:
    """Mean hours of one device between failures that interrupt a job, over all devices where they are of several kinds.
    0 is unknown. KeyError or PlanError for a device that is none."""
    if cluster.hours_between_failures:
        return cluster.hours_between_failures
    counts = [(part.device, part.num_devices) for part in cluster.parts] or [(cluster.device, 1)]
    hours = [(_hours_of(device), count) for device, count in counts]
    if not all(each for each, _ in hours):
        return 0.0
    return hours[0][0] if len(hours) == 1 else sum(n for _, n in hours) / sum(n / each for each, n in hours)


def _hours_of(device: str) -> float:
    return 0.0 if device == "unknown" else device_entry(device).hours_between_failures
