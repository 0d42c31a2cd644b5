"""InfiniBand, and the network that is assumed if a cluster does not name its own."""

from dataclasses import replace

from shardwright.config.network_facts import NetworkFacts

_INFINIBAND = NetworkFacts(
    name="infiniband",
    place=20,
    title="InfiniBand",
    nccl_net="IB",
    adapter="InfiniBand adapter",
    share=0.94,
    step_s=14e-6,
    peer_s=1e-6,
    switched_trees=True,
    source="46 to 48 of 50 GB/s a port of NDR (github.com/NVIDIA/nccl-tests, issues 267 and 290); a step between nodes "
    "in the simple protocol takes 14 us in NCCL's own model of its algorithms (src/graph/tuning.cc); trees over "
    "switches: 32 to 8,192 H100 (NVIDIA GTC 2024, S62129; benchmarks/truth/collectives.csv); peers: estimated",
)
_UNKNOWN = replace(_INFINIBAND, name="unknown", place=10, title="", nccl_net="", adapter="")

FACTS = (_UNKNOWN, _INFINIBAND)
