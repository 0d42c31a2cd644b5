"""Claims about devices: links whose both directions are added up, and number types that a device can't compute in."""

from shardwright.config.cluster_facts import device_entry, node_gb_per_s
from shardwright.config.job import JobSpec
from shardwright.config.phrase import Phrase, say
from shardwright.explain.contradictions.told_claim import ToldClaim

_BOTH = 1.5  # a bandwidth so many times that of one direction is that of both, or of another device


def both_directions(job: JobSpec) -> Phrase | None:
    """A stated bandwidth that adds both directions up, or is another device's."""
    stated = job.cluster.intra_node.bandwidth_gb_per_s
    if job.cluster.device == "unknown" or not stated:
        return None
    entry = device_entry(job.cluster.device)
    if not 0 < _BOTH * entry.link_gb_per_s <= stated:
        return None
    return say(
        "cluster.intra_node.bandwidth_gb_per_s says {stated:g}; {device} has {own:g} GB/s in each direction, "
        "{both:g} in both together",
        stated=stated,
        device=job.cluster.device,
        own=entry.link_gb_per_s,
        both=2 * entry.link_gb_per_s,
    )


def another_nvlink(job: JobSpec) -> Phrase | None:
    """NVLink of another device than that with 900 GB/s in both directions."""
    if job.cluster.device == "unknown":
        return None
    entry, own = device_entry(job.cluster.device), node_gb_per_s(job.cluster)
    if entry.link_name != "NVLink" or not own or job.plan.world == 1 or both_directions(job):
        return None
    return say(
        "NVLink of this {device} carries {own:g} GB/s in each direction, which data sheets add up to {both:g}",
        device=job.cluster.device,
        own=own,
        both=2 * own,
    )


def float8_units(job: JobSpec) -> Phrase | None:
    """fp8 on a device that has no units for it."""
    if job.precision.float8 == "none" or job.cluster.device == "unknown":
        return None
    peaks = device_entry(job.cluster.device).peak_tflops
    if "float8" in peaks:
        return None
    return say("{device} has no units for fp8: its peaks are of {types}", device=job.cluster.device, types=tuple(peaks))


CLAIMS = (
    ToldClaim("both-directions", say("the bandwidth of a data sheet is that of one direction"), both_directions),
    ToldClaim("another-nvlink", say("NVLink has 900 GB/s"), another_nvlink),
    ToldClaim("float8-units", say("fp8 makes every device twice as fast"), float8_units),
)
