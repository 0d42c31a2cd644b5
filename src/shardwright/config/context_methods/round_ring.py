"""Ring attention: keys and values go round the ranks, step by step. Liu et al. 2023 (arXiv 2310.01889)."""

from shardwright.config.context_facts import ContextFacts

FACTS = ContextFacts(
    name="ring",
    place=10,
    rule="shardwright.parallel.context.ring_attention:ring_attention",
    exchange="ring",
)
