"""Methods of context parallelism by name: the facts of each are a file in config/context_methods, and here one asks for
them."""

from dataclasses import dataclass
from typing import Annotated, Literal

from shardwright.config.registry import NameOf, Registry


@dataclass(frozen=True, kw_only=True)
class ContextFacts:
    """A method by which ranks that share sequences attend to what others have.

    - `place` is where lists show it; `rule` is the function that attends across ranks, as "module:function"
      (parallel/context/ring_attention.py).
    - `chunks` of contiguous positions fall to a rank: 2 even out the work of causal attention.
    - `exchange` is what ranks send: "ring", keys and values that go round; "all_gather", all of them at once, kept for
      the backward's; "all_to_all", tokens for heads and back: then a rank has a share of the heads for all tokens, and
      needs as many of them as others.
    """

    name: str
    place: int
    rule: str
    chunks: int = 2
    exchange: Literal["ring", "all_gather", "all_to_all"]

    @property
    def trades_heads(self) -> bool:
        """True where attention sees the whole sequence of some heads."""
        return self.exchange == "all_to_all"


CONTEXT_METHODS: Registry[ContextFacts] = Registry("a cp_method", "shardwright.config.context_methods", ContextFacts)
ContextMethod = Annotated[str, NameOf(CONTEXT_METHODS)]


def sharing_tokens() -> str:
    """Names of the methods under which a rank has all heads, as a sentence offers them."""
    return " or ".join(f'"{facts.name}"' for facts in CONTEXT_METHODS.values() if not facts.trades_heads)
