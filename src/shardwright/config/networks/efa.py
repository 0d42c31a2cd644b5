"""EFA: the Elastic Fabric Adapter of AWS, over its own protocol SRD."""

from shardwright.config.network_facts import NetworkFacts

FACTS = NetworkFacts(
    name="efa",
    place=40,
    title="EFA",
    share=0.90,
    step_s=53e-6,
    peer_s=2.6e-6,
    source="nccl-tests on 2 to 32 nodes p5.48xlarge (github.com/crazyguitar/aws-gpu-communication-benchmark, October "
    "2025; benchmarks/truth/collectives.csv)",
)
