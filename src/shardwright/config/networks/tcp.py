"""TCP over Ethernet, without RDMA."""

from shardwright.config.network_facts import NetworkFacts

FACTS = NetworkFacts(
    name="tcp",
    place=60,
    title="TCP",
    nccl_net="Socket",
    share=0.80,
    step_s=60e-6,
    peer_s=5e-6,
    source="estimated: each message passes the kernels of both nodes and is copied through host memory",
)
