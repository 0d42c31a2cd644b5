"""All-gather: keys and values of all ranks are gathered. Dubey et al. 2024 (arXiv 2407.21783, section 3.3.2)."""

from shardwright.config.context_facts import ContextFacts

FACTS = ContextFacts(
    name="all-gather",
    place=20,
    rule="shardwright.parallel.context.ring_attention:gathered_attention",
    exchange="all_gather",
)
