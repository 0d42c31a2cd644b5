"""TCP over Ethernet, without RDMA."""

from shardwright.config.network_facts import NetworkFacts

FACTS = NetworkFacts(
    name="tcp",
    place=60,
    title="TCP",
    nccl_net="Socket",
    share=0.80,
    port_gb_per_s=5.1,
    step_s=60e-6,
    peer_s=5e-6,
    source="a port of 100 Gbit/s: 41 Gbit/s between p3dn.24xlarge, where iperf has 92 (github.com/NVIDIA/nccl, issue "
    "209), 6 GB/s (issue 398) and 4 to 6 GB/s (issue 450): a channel has one socket and one thread that copies, 16 to "
    "18 Gbit/s (src/transport/net_socket.cc; issue 450); of 25 and 32 Gbit/s 0.54 to 0.96 are reached (nccl-tests, "
    "issue 83; issue 209); steps and peers: estimated, since each message passes kernels and memory of both hosts",
)
