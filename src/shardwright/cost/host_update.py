"""The time of an update in host memory, and of the copies to the host and back."""

import numpy as np

from shardwright.config.software import SoftwareSpec
from shardwright.cost.calibration import Rates
from shardwright.layers.arrays import Numbers
from shardwright.layers.query import PlanGrid

# Bytes that a thread of the host reads and writes for each byte of a copy whose memory is not pinned: the driver copies
# it to or from pinned memory of its own (CUDA C++ best practices guide, section 10.1).
_STAGED = 2


def hosted_update_s(
    software: SoftwareSpec, grid: PlanGrid, host: Rates, *, elements: Numbers, moved_bytes: Numbers
) -> Numbers:
    """Seconds of the update of `elements` in host memory, and of what is copied for it once a step. On a device it
    would move `moved_bytes`; with another optimizer than AdamW it moves as much less in host memory.

    Without software that does one after the other, copies of one unit run while another is updated (Ren et al. 2021,
    arXiv 2101.06840, section 4.2).
    """
    facts = software.host
    stated = np.where(np.asarray(grid.zero) == 3, facts.update[1], facts.update[0])
    share = moved_bytes / software.updated_bytes if software.updated_bytes else elements
    hosted_bytes = np.where(stated > 0, stated * share, moved_bytes)
    bytes_per_s = host.host_memory_bytes_per_s
    if facts.one_thread:
        bytes_per_s = min(bytes_per_s, host.host_thread_bytes_per_s)
    updated_s = hosted_bytes / bytes_per_s
    if not facts.in_turn:
        copied_bytes = elements * max(software.gradient_bytes, grid.element_bytes)
        return np.maximum(updated_s, copied_bytes / host_link(software, host))
    return updated_s + facts.copied[0] * elements / host_link(software, host)


def accumulated_s(software: SoftwareSpec, grid: PlanGrid, host: Rates, elements: Numbers) -> Numbers:
    """Seconds in which gradients that add up in host memory come to the device and go back, in each microbatch."""
    num_copied = np.where(grid.num_microbatches > 1, grid.num_microbatches, 0)
    return num_copied * software.host.copied[1] * elements / host_link(software, host)


def host_link(software: SoftwareSpec, host: Rates) -> float:
    """Bytes/s of a copy between a device and its host."""
    bytes_per_s = host.host_bytes_per_s
    return bytes_per_s if software.host.pinned else min(bytes_per_s, host.host_thread_bytes_per_s / _STAGED)
