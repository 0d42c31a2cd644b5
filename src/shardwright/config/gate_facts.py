"""The registry of experts' gates by name. The facts of each gate are a file in config/gates, and its arithmetic is a
file of the same name in model/gates."""

from dataclasses import dataclass
from typing import Annotated, Literal

from shardwright.config.registry import NameOf, Registry


@dataclass(frozen=True, kw_only=True)
class GateFacts:
    """The facts of a gate that are known without computing anything.

    - `place` orders lists of gates; `rule` is the class of its arithmetic, as "module:class".
    - `reads` are fields of model.moe that not every gate understands.
    - `top_k` is the number of experts per token if the model gives none; `only_top_k`: the gate allows no other number.
      `least_top_k` is the least number that makes sense, and `instead` a gate for fewer.
    - `sees_all`: the choice for one token depends on the other tokens of the microbatch. Experts then choose tokens,
      equally many each: they have room for those, and need no balance loss.
    - `draws`: choices are drawn at random during training.
    - `adds_to_one`: the weights of a token's choices add up to one always, never, or as model.moe.normalise says. If
      they do, the account keeps them before and after the division.
    - `scores_add_up`: a token's scores are probabilities; if not, a balance loss divides them by their sum.
    - `counts_pairs`: the gate uses how often one token chose two given experts.
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
