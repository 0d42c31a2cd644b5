"""The interface of every gate: its inputs and its choice.

Scores and weights are float32, whatever the model's dtype: scores of experts lie close together, and a choice that
flips on a rounding error is another function.

Shape suffixes: T tokens, K choices of a token, E experts.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pkgutil import resolve_name

import torch
from torch import Tensor

from shardwright.config.moe import MoeSpec
from shardwright.parallel.device_streams import DeviceStreams

_LEVELS = 2.0**12  # of the mantissas that `order_of` compares


@dataclass(frozen=True)
class Known:
    """The inputs of a gate besides the scores.

    `bias_E` is added to scores for the choice, but not for the weights. `together_EE` counts how often one token chose
    two experts. `draws_T` are random numbers in [0, 1), one for each token; None without draws, as in an evaluation.
    `real_T` masks the tokens that do not only fill a sample up, None if all are real; `num_real` is their number on all
    ranks. `streams` are the streams of the device, for which the host may wait.
    """

    bias_E: Tensor
    together_EE: Tensor
    draws_T: Tensor | None
    real_T: Tensor | None = None
    num_real: int = 0
    streams: DeviceStreams | None = None


@dataclass(frozen=True)
class Choice:
    """The experts that the tokens chose, [T, K], int64, first choices first, and a mask of the choices that hold, [T,
    K].

    `preference_TE` ranks the experts of each token, -inf for forbidden experts: a token without room takes its next
    choice from it.
    """

    experts_TK: Tensor
    holds_TK: Tensor
    preference_TE: Tensor


@dataclass(frozen=True)
class Gate(ABC):
    """A rule that assigns experts to tokens. By default scores are probabilities, and weights are the scores."""

    spec: MoeSpec

    @property
    def sees_all(self) -> bool:
        """True if the choice for one token depends on the other tokens of the microbatch."""
        return self.spec.gate_facts.sees_all

    def score(self, logits_TE: Tensor) -> Tensor:
        """The scores of the router's logits, both float32, [T, E]. Differentiable."""
        return logits_TE.softmax(dim=-1)

    def choose(self, scores_TE: Tensor, known: Known) -> Choice:
        """The choice, in which no choice of filling holds. Not differentiable."""
        choice = self.choose_freely(scores_TE, known)
        if known.real_T is None:
            return choice
        return replace(choice, holds_TK=choice.holds_TK & known.real_T[:, None])

    @abstractmethod
    def choose_freely(self, scores_TE: Tensor, known: Known) -> Choice:
        """The choice, in which choices of filling may hold."""

    def weigh(self, logits_TE: Tensor, scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
        """The weights of these experts' results, float32, [T, K]. Differentiable."""
        return scores_TE.gather(-1, experts_TK) * self.spec.routed_scaling


def largest(preference_TE: Tensor, count: int) -> Tensor:
    """The `count` most preferred experts of each token, best first; among equals the lower number first."""
    # A copy, so that a kept choice does not keep the order of all experts alive.
    return by_preference(preference_TE)[..., :count].contiguous()


def by_preference(preference_TE: Tensor) -> Tensor:
    """All experts of each token, most preferred first; among equals the lower number first."""
    # topk does not define the order of equals, and it may differ with the number of tokens.
    return torch.sort(preference_TE, dim=-1, descending=True, stable=True).indices


def order_of(values: Tensor) -> Tensor:
    """Indices along the last dim, from the largest value to the smallest; among equals the earlier index first.

    Values are compared in 12 bits. Tokens with the same past, such as the first tokens of documents, have the same
    scores, but two plans compute them in different shapes and round them differently. Their positions, and
    not the last bit of a score, must decide for which of these tokens an expert has room.
    """
    mantissa, exponent = torch.frexp(values)
    rounded = torch.ldexp((mantissa * _LEVELS).round(), exponent)
    return torch.argsort(rounded, dim=-1, descending=True, stable=True)


def all_hold(experts_TK: Tensor, preference_TE: Tensor) -> Choice:
    """A choice in which every choice holds."""
    return Choice(experts_TK, torch.ones_like(experts_TK, dtype=torch.bool), preference_TE)


def add_to_one(weights_TK: Tensor) -> Tensor:
    """The weights of each token, divided by their sum."""
    # Sigmoids may all be 0. DeepSeek-V3 adds the same number, which is negligible beside any other sum.
    return weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)


def make_gate(spec: MoeSpec) -> Gate:
    """The gate that `spec.gate` names. The gate's facts name the class."""
    rule = resolve_name(spec.gate_facts.rule)
    assert issubclass(rule, Gate), spec.gate_facts
    gate: Gate = rule(spec)
    return gate
