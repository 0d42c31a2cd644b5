"""The registry of methods of context parallelism by name. The facts of each are a file in config/context_methods."""

from dataclasses import dataclass
from typing import Annotated, Literal

from shardwright.config.phrase import any_of
from shardwright.config.registry import NameOf, Registry


@dataclass(frozen=True, kw_only=True)
class ContextFacts:
    """The facts of a method by which ranks that share a sequence attend to one another's tokens.

    - `place` orders lists of methods; `rule` is the function that attends across ranks, as "module:function"
      (parallel/context/ring_attention.py).
    - `chunks` is the number of contiguous chunks of positions per rank: 2 balance the work of causal attention.
    - `exchange` is the kind of communication. "ring": keys and values go round the ranks. "all_gather": all keys and
      values are gathered at once, and kept for the backward. "all_to_all": tokens are exchanged for heads and back; a
      rank then has an equal share of the heads, for all tokens.
    """

    name: str
    place: int
    rule: str
    chunks: int = 2
    exchange: Literal["ring", "all_gather", "all_to_all"]

    @property
    def trades_heads(self) -> bool:
        """True if a rank attends with some heads over the full sequence."""
        return self.exchange == "all_to_all"


CONTEXT_METHODS: Registry[ContextFacts] = Registry("a cp_method", "shardwright.config.context_methods", ContextFacts)
ContextMethod = Annotated[str, NameOf(CONTEXT_METHODS)]


def sharing_tokens() -> str:
    """Names of the methods under which a rank has all heads, as text for a sentence."""
    return any_of([f'"{facts.name}"' for facts in CONTEXT_METHODS.values() if not facts.trades_heads])
