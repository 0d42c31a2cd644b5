"""The rate at which the devices of a cluster fail: as the cluster states, or else the usual rate of its devices."""

from shardwright.config.cluster import ClusterSpec
from shardwright.config.usual_links import device_entry


def device_hours_between_failures(cluster: ClusterSpec) -> float:
    """Mean hours of one device between failures that interrupt a job, over all devices if there are several kinds. 0 if
    unknown. KeyError or PlanError for an unknown or faulty device."""
    if cluster.hours_between_failures:
        return cluster.hours_between_failures
    counts = [(part.device, part.num_devices) for part in cluster.parts] or [(cluster.device, 1)]
    hours = [(_hours_of(device), count) for device, count in counts]
    if not all(device_hours for device_hours, _ in hours):
        return 0.0
    if len(hours) == 1:
        return hours[0][0]
    return sum(count for _, count in hours) / sum(count / device_hours for device_hours, count in hours)


def _hours_of(device: str) -> float:
    return 0.0 if device == "unknown" else device_entry(device).hours_between_failures
