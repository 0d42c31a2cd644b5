"""The registry of policies of recomputation by name. The facts of each are a file in config/recompute_policies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from shardwright.config.recompute_policy import KEEP_ALL, Policy
from shardwright.config.registry import NameOf, Registry


@dataclass(frozen=True, kw_only=True)
class RecomputeFacts:
    """The facts of a policy that are known without computing anything. `plan` is a PlanSpec.

    - `place` orders lists of policies; `does` is its effect, in words for the help.
    - `layers(plan, num_layers)` gives the operators that each layer of the model recomputes. None if they must be
      chosen for one plan: `chosen_by`, as "module:function", then takes the job and returns plan.recompute_layers.
    - `by_stage`: all of a stage is recomputed before its backward, from its input. Its layers then recompute nothing
      more.
    - `reads` are fields of [plan] that not every policy reads.
    - `faults(plan, num_layers, mtp_layers)` are contradictions in these fields, each with a way out.

    Search:

    - A search tries the policies in the order of `search_place`, each with every setting in `searched`, which are
      fields of [plan] that differ from their defaults; settings that recompute less come first. `not_searched` is the
      reason why there are none.
    - `is_simple`: with default settings it is also tried beside any plan, and as a simpler plan.
    - `is_guessed`: a search prices it first, because its plans keep all activations or few; they limit the others.
    """

    name: str
    place: int
    does: str = ""
    layers: Callable[[Any, int], list[Policy]] | None = None
    chosen_by: str = ""
    by_stage: bool = False
    reads: frozenset[str] = frozenset()
    faults: Callable[[Any, int, int], list[str]] = lambda plan, num_layers, mtp_layers: []
    searched: tuple[Mapping[str, Any], ...] = ()
    search_place: int = 0
    not_searched: str = ""
    is_simple: bool = False
    is_guessed: bool = False


RECOMPUTES: Registry[RecomputeFacts] = Registry(
    "a policy of recomputation", "shardwright.config.recompute_policies", RecomputeFacts
)
RecomputeName = Annotated[str, NameOf(RECOMPUTES)]


def every_so_many(plan: Any, num_layers: int, policy: Policy) -> list[Policy]:
    """A policy for one in plan.recompute_every layers, from the first; the others keep all."""
    return [policy if layer % plan.recompute_every == 0 else KEEP_ALL for layer in range(num_layers)]


def searched_recomputes() -> list[RecomputeFacts]:
    """The policies that a search tries, in its order."""
    return sorted((facts for facts in RECOMPUTES.values() if facts.searched), key=lambda facts: facts.search_place)


def optional_recompute_fields() -> tuple[str, ...]:
    """Fields of [plan] that some policies read."""
    return tuple(dict.fromkeys(name for facts in RECOMPUTES.values() for name in sorted(facts.reads)))
