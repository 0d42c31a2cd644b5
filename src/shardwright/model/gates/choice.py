"""The interface of every gate: its inputs and its answer.

Scores, choices and weights are float32, whatever the model computes in: experts lie close together, and a choice that
flips on a rounding is another function.

Shape suffixes: T tokens, K choices of a token, E experts.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwright.config.moe import MoeSpec
from shardwright.parallel.device_streams import DeviceStreams

_LEVELS = 2.0**12


@dataclass(frozen=True)
class Known:
    """The inputs of a gate besides the scores.

    `bias_E` is added to scores for the choice alone. `together_EE` counts how often two experts were chosen by one
    token. `draws_T` are random numbers in [0, 1), one a token; None where nothing is drawn, as in an evaluation.
    `real_T` are the tokens that do not only fill a sample up, `num_real` of them in all; None where all are.
    `streams` are those of the device that the host may wait for.
    """

    bias_E: Tensor
    together_EE: Tensor
    draws_T: Tensor | None
    real_T: Tensor | None = None
    num_real: int = 0
    streams: DeviceStreams | None = None


@dataclass(frozen=True)
class Choice:
    """The experts that the tokens chose: [T, K], int64, the first choice first, and whether each choice holds, bool.

    `preference_TE` is what choices went by, -inf where a token may not go: a token that finds no room looks there for
    its next choice.
    """

    experts_TK: Tensor
    holds_TK: Tensor
    preference_TE: Tensor


@dataclass(frozen=True)
class Gate(ABC):
    """A rule by which tokens and experts find each other. Scores are probabilities, and weights are the scores, where a
    gate does not say otherwise.
    """

    spec: MoeSpec

    @property
    def sees_all(self) -> bool:
        """True where the choice for one token depends on the others of the microbatch."""
        return self.spec.gate_facts.sees_all

    def score(self, logits_TE: Tensor) -> Tensor:
        """Scores of the logits of a product with x, both float32, [T, E]. Differentiable."""
        return logits_TE.softmax(dim=-1)

    def choose(self, scores_TE: Tensor, known: Known) -> Choice:
        """The choice; filling has none that holds. Not differentiable."""
        choice = self.choose_freely(scores_TE, known)
        if known.real_T is None:
            return choice
        return replace(choice, holds_TK=choice.holds_TK & known.real_T[:, None])

    @abstractmethod
    def choose_freely(self, scores_TE: Tensor, known: Known) -> Choice:
        """The choice, where nothing need hold for filling."""

    def weigh(self, logits_TE: Tensor, scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
        """Weights of what these experts give, float32, [T, K]. Differentiable."""
        return scores_TE.gather(-1, experts_TK) * self.spec.routed_scaling


def largest(preference_TE: Tensor, count: int) -> Tensor:
    """The `count` most preferred experts of each token, first the best; among equals the one with the lower number."""
    # A copy of the few, so that what is kept of a choice does not keep the order of all.
    return by_preference(preference_TE)[..., :count].contiguous()


def by_preference(preference_TE: Tensor) -> Tensor:
    """All experts of each token, first the most preferred; among equals the one with the lower number."""
    # topk leaves open which of equals it takes, and may take another one for another number of tokens.
    return torch.sort(preference_TE, dim=-1, descending=True, stable=True).indices


def order_of(values: Tensor) -> Tensor:
    """Indices along the last dim, from the largest value to the least; among equals the earlier first.

    Values are compared in 12 bits. Tokens with the same past, such as all that begin a document, have the same scores,
    but the ranks of one plan compute them in other shapes than those of another, and round them otherwise. Which of
    them an expert has room for should follow from their places and not from the last bit.
    """
    mantissa, exponent = torch.frexp(values)
    rounded = torch.ldexp((mantissa * _LEVELS).round(), exponent)
    return torch.argsort(rounded, dim=-1, descending=True, stable=True)


def all_hold(experts_TK: Tensor, preference_TE: Tensor) -> Choice:
    """A choice of which nothing is taken back."""
    return Choice(experts_TK, torch.ones_like(experts_TK, dtype=torch.bool), preference_TE)


def add_to_one(weights_TK: Tensor) -> Tensor:
    """The weights of each token, divided by their sum."""
    # Sigmoids may all be 0; what is added is that of DeepSeek-V3, and nothing beside any other sum.
    return weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
