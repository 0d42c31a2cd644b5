"""RoCE: RDMA over Converged Ethernet."""

from shardwright.config.network_facts import NetworkFacts

FACTS = NetworkFacts(
    name="roce",
    place=30,
    title="RoCE",
    nccl_net="IB",
    adapter="RoCE adapter",
    share=0.92,
    step_s=20e-6,
    peer_s=1e-6,
    switched_trees=True,
    source="estimated between InfiniBand and EFA; 46 of 50 GB/s a port (github.com/NVIDIA/nccl-tests, issue 267); "
    "trees: NCCL's transport is that of InfiniBand",
)
