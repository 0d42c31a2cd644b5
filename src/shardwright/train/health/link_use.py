"""The share of the bandwidth of the cluster's links that a step uses."""

from shardwright.config.cluster import ClusterSpec
from shardwright.config.cluster_facts import network_gb_per_s, node_gb_per_s


def link_use(
    sent_bytes: tuple[int, int] | None, step_s: float, world: int, cluster: ClusterSpec
) -> tuple[float | None, float | None]:
    """The shares of the bandwidth of all ranks' links that a step uses, inside nodes and between them. A share is None
    if neither the cluster nor the catalog's entry of its device states the bandwidth, or if the bytes are unknown.

    `sent_bytes` are the bytes that all ranks send in one step, inside nodes and between them. The bandwidth is that of
    one device in one direction. In a cluster of several parts links differ, and both shares are None.
    """
    if sent_bytes is None or step_s <= 0 or cluster.parts:
        return None, None
    inside, between = (
        num_bytes / (world * rate * 1e9 * step_s) if rate else None
        for num_bytes, rate in zip(sent_bytes, (node_gb_per_s(cluster), network_gb_per_s(cluster)), strict=True)
    )
    return inside, between
