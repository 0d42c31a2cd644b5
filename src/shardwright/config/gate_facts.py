"""Gates of experts by name: the facts of each are a file in config/gates, and its arithmetic is a file of the same name
in model/gates. Here one asks for the facts."""

from dataclasses import dataclass
from typing import Annotated, Literal

from shardwright.config.registry import NameOf, Registry


@dataclass(frozen=True, kw_only=True)
class GateFacts:
    """The facts of a gate, known without computing anything.

    - `place` is where lists show it; `rule` is the class of its arithmetic, as "module:class".
    - `reads` are fields of model.moe that not every gate understands.
    - `top_k` is how many experts a token gets where the model does not say; `only_top_k`: the gate has no other number.
      `least_top_k` is the least that it makes sense with, and `instead` a gate for fewer.
    - `sees_all`: the choice for one token depends on the others of the microbatch. Experts then choose tokens, as many
      each: they have room for those, and need no loss that evens them out.
    - `draws`: choices are drawn at random while a model is trained.
    - `adds_to_one`: weights of a token's choices are divided by their sum always, never, or as model.moe.normalise
      says.
    - `scores_add_up`: a token's scores are probabilities; else a balance loss divides them by their sum.
    - `counts_pairs`: it goes by how often two experts were chosen by one token.
    """

    name: str
    place: int
    rule: str
    reads: frozenset[str] = frozenset()
    top_k: int = 2
    only_top_k: bool = False
    least_top_k: int = 1
    instead: str = ""
    sees_all: bool = False
    draws: bool = False
    adds_to_one: Literal["always", "never", "as asked"] = "never"
    scores_add_up: bool = True
    counts_pairs: bool = False


GATES: Registry[GateFacts] = Registry("a gate", "shardwright.config.gates", GateFacts)
GateName = Annotated[str, NameOf(GATES)]


def optional_reads() -> tuple[str, ...]:
    """Fields of model.moe that some gates read."""
    return tuple(dict.fromkeys(name for facts in GATES.values() for name in sorted(facts.reads)))
