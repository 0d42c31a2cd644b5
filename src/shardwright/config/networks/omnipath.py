"""Omni-Path, with its own protocol PSM2."""

from shardwright.config.network_facts import NetworkFacts

FACTS = NetworkFacts(
    name="omnipath",
    place=35,
    title="Omni-Path",
    share=0.80,
    step_s=25e-6,
    peer_s=2e-6,
    source="estimated: NCCL reaches it through libfabric, and copies through host memory",
)
