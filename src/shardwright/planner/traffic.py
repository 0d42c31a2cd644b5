"""What each axis of a plan moves in a step: bytes that a device sends, and over which links."""

from dataclasses import dataclass

from shardwright.cost.calibration import device_of, software_of
from shardwright.cost.topology import group_of
from shardwright.workload.layers import chains
from shardwright.workload.operators import HALF
from shardwright.workload.shape import Run


@dataclass(frozen=True)
class Traffic:
    """Bytes that a device sends in a step along an axis, in groups over `num_domains` domains of fast links, and the
    bandwidth that is stated of the slowest link in between, in bytes/s."""

    sent_bytes: float
    num_domains: int
    bytes_per_s: float


def traffic(run: Run) -> dict[str, Traffic]:
    """By axis (tp, cp, ep, dp), of one plan, of the mean pipeline rank.

    (n - 1) / n of a tensor leaves a rank in an all-gather, a reduce-scatter or an all-to-all, twice that in an
    all-reduce (Thakur et al. 2005, section 3).
    """
    cut, shape, software = run.cut, run.shape, software_of(run.software)
    pieces = chains(shape, cut, software)
    sizes = {"tp": int(cut.tp), "cp": int(cut.cp), "ep": int(cut.ep), "dp": int(cut.replicas)}
    strides = {"tp": 1, "cp": int(cut.tp), "ep": int(cut.expert_tp), "dp": int(cut.tp)}
    sent = dict.fromkeys(sizes, 0.0)
    dense = sum(shape.is_dense(layer) for layer in range(shape.layers))
    for kind, count in (("dense", dense), ("experts", shape.layers - dense), ("embedding", 1), ("head", 1)):
        for operator in pieces.get(kind, ()):
            for exchange in (*operator.forward, *operator.backward):
                n = sizes[exchange.axis]
                rounds = 2 if exchange.kind == "all_reduce" else 1
                sent[exchange.axis] += count * rounds * float(exchange.size) * (n - 1) / n
    for axis in ("tp", "cp", "ep"):
        sent[axis] *= int(cut.num_microbatches) / int(cut.pp)
    elements = shape.parameters / (cut.tp * cut.pp)
    gathers = HALF * (2 * cut.num_microbatches if cut.zero == 3 else 1 if cut.zero else 0)
    reduces = software.reduce_bytes * (2 if cut.zero == 0 else cut.num_microbatches if cut.zero == 3 else 1)
    sent["dp"] = float(elements * (gathers + reduces) * (sizes["dp"] - 1) / sizes["dp"])
    fast = run.node_bytes_per_s or device_of(run.device).link_gb_per_s * 1e9
    found = {}
    for axis, size in sizes.items():
        group = group_of(size, strides[axis], max(1, run.devices_per_node), run.topology)
        domains = int(group.domains)
        found[axis] = Traffic(sent[axis], domains, run.network_bytes_per_s if domains > 1 else fast)
    return found
