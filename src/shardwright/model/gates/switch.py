"""The gate of Switch: the one most probable expert, weighed with its probability. Fedus et al. 2022 (arXiv 2101.03961,
section 2.1).

Shape suffixes: T tokens, K = 1, E experts.
"""

from dataclasses import dataclass

from torch import Tensor

from shardwright.config.moe import MoeSpec
from shardwright.model.gates.choice import Choice, Known, all_hold, largest


@dataclass(frozen=True)
class Switch:
    """The weight is the probability itself, so that the gate learns from how well the expert did."""

    spec: MoeSpec
    sees_all = False

    def score(self, logits_TE: Tensor) -> Tensor:
        """Probabilities."""
        return logits_TE.softmax(dim=-1)

    def choose(self, scores_TE: Tensor, known: Known) -> Choice:
        """The largest."""
        return all_hold(largest(scores_TE, 1), scores_TE)

    def weigh(self, logits_TE: Tensor, scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
        """The probability."""
        return scores_TE.gather(-1, experts_TK) * self.spec.routed_scaling
