"""The capacity of experts: the largest number of tokens of each, and what happens to choices beyond it.

GShard (Lepikhin et al. 2021, arXiv 2006.16668, algorithm 1) fills experts with all first choices, then with all second
choices, each in the order of the tokens, and drops the choices that come too late. Dropping by probability keeps the
choices with the largest weights instead. Rerouting sends a choice without room to the token's next expert with room.

The functions take the choices of all tokens of a microbatch: ranks that hold parts of them gather them first. Filling
has no choice that holds: it takes no room, and does not count for the capacity.

Shape suffixes: T tokens, K choices of a token, E experts, N = T x K choices in a queue.
"""

import math

import torch
from torch import Tensor

from shardwright.config.moe import Overflow
from shardwright.model.gates.choice import Choice, largest, order_of
from shardwright.parallel.expert.grouped_linear import count_each


def places_in_queue(experts_N: Tensor, num_experts: int) -> Tensor:
    """The number of earlier entries with the same expert, [N]. The entry `num_experts` stands for no expert."""
    order_N = torch.argsort(experts_N, stable=True)
    counts_E = count_each(experts_N, num_experts + 1)
    first_E = counts_E.cumsum(0) - counts_E
    numbers_N = torch.arange(experts_N.numel(), device=experts_N.device)
    return torch.empty_like(experts_N).scatter_(0, order_N, numbers_N - first_E[experts_N[order_N]])


def fit(choice: Choice, weights_TK: Tensor, capacity: int, overflow: Overflow) -> Choice:
    """The choice, limited so that no expert has more than `capacity` tokens."""
    if weights_TK.is_meta:  # a dry run does not know which choices find no room
        return choice
    if overflow == "reroute":
        return _reroute(choice, capacity)
    num_experts = choice.preference_TE.shape[1]
    queued_TK = choice.experts_TK.masked_fill(~choice.holds_TK, num_experts)
    if overflow == "drop-position":
        # First choices queue before second choices.
        places_TK = places_in_queue(queued_TK.t().flatten(), num_experts).unflatten(0, queued_TK.t().shape).t()
    else:
        order_N = order_of(weights_TK.flatten())
        places_N = places_in_queue(queued_TK.flatten()[order_N], num_experts)
        places_TK = torch.empty_like(places_N).scatter_(0, order_N, places_N).view_as(queued_TK)
    return Choice(choice.experts_TK, choice.holds_TK & (places_TK < capacity), choice.preference_TE)


def _reroute(choice: Choice, capacity: int) -> Choice:
    """Find room for choices, in rounds: all choices that still look for room ask their expert, first choices first,
    then in the order of the tokens. In the next round each refused choice asks the best expert that its token has not
    asked yet."""
    T, K = choice.experts_TK.shape
    num_experts = choice.preference_TE.shape[1]
    reserve_TE = choice.preference_TE.scatter(-1, choice.experts_TK, -math.inf)
    ranking_TE = largest(reserve_TE, num_experts)
    num_reserves_T = (reserve_TE > -math.inf).sum(dim=-1)
    next_T = torch.zeros_like(num_reserves_T)
    experts_TK, placed_TK = choice.experts_TK.clone(), torch.zeros_like(choice.holds_TK)
    looking_TK = choice.holds_TK.clone()
    room_E = torch.full((num_experts + 1,), capacity, device=experts_TK.device)
    while looking_TK.any():
        requests_N = experts_TK.masked_fill(~looking_TK, num_experts).t().flatten()
        accepted_N = (places_in_queue(requests_N, num_experts) < room_E[requests_N]) & (requests_N < num_experts)
        accepted_TK = accepted_N.view(K, T).t()
        room_E[:num_experts] -= count_each(requests_N.masked_fill(~accepted_N, num_experts), num_experts)
        placed_TK |= accepted_TK
        looking_TK = looking_TK & ~accepted_TK
        # Several choices of one token take its next reserves in turn.
        turn_TK = next_T[:, None] + looking_TK.cumsum(dim=-1) - 1
        next_T = next_T + looking_TK.sum(dim=-1)
        looking_TK = looking_TK & (turn_TK < num_reserves_T[:, None])
        reserves_TK = ranking_TE.gather(-1, turn_TK.clamp(0, num_experts - 1))
        experts_TK = torch.where(looking_TK, reserves_TK, experts_TK)
    return Choice(experts_TK, placed_TK, choice.preference_TE)
