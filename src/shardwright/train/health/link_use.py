"""How much of what the cluster's links could carry a step has sent."""

from shardwright.config.cluster import ClusterSpec
from shardwright.config.usual_links import network_gb_per_s, node_gb_per_s


def link_use(
    sent_bytes: tuple[int, int] | None, step_s: float, world: int, cluster: ClusterSpec
) -> tuple[float | None, float | None]:
    """Shares of the bandwidth of all ranks' links inside nodes and between them, over a whole step; None where the
    cluster, or the catalog's entry of its device, does not state the bandwidth, or what was sent is not known.

    `sent_bytes` are those of all ranks in one step, inside nodes and between. The bandwidth is that of one device in
    one direction. In a cluster of several parts links differ, and nothing is said.
    """
    if sent_bytes is None or step_s <= 0 or cluster.parts:
        return None, None
    inside, between = (
        num_bytes / (world * rate * 1e9 * step_s) if rate else None
        for num_bytes, rate in zip(sent_bytes, (node_gb_per_s(cluster), network_gb_per_s(cluster)), strict=True)
    )
    return inside, between
