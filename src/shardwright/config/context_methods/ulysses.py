"""Ulysses: ranks exchange tokens for heads, and back. Jacobs et al. 2023 (arXiv 2309.14509)."""

from shardwright.config.context_facts import ContextFacts

FACTS = ContextFacts(
    name="ulysses",
    place=30,
    rule="shardwright.parallel.context.ring_attention:ring_attention",
    chunks=1,
    exchange="all_to_all",
)
