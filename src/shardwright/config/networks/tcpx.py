"""GPUDirect-TCPX and TCPXO: the network of A3 machines of Google Cloud."""

from shardwright.config.network_facts import NetworkFacts

FACTS = NetworkFacts(
    name="tcpx",
    place=50,
    title="GPUDirect-TCPX",
    share=0.945,
    step_s=110e-6,
    peer_s=3e-6,
    source="nccl-tests of an all-gather on 2 nodes A3 Mega (benchmarks/truth/collectives.csv); peers: estimated",
)
