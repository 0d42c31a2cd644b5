"""The keys that queries see in one block of attention, and the terms added to scores, as a bias for kernels.

Shape suffixes: S queries, T keys, B batch, N query heads, G key/value heads, D head width. A first dim of 1 stands for
all samples.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.parallel.context.attention_rule import PLAIN, AttentionRule
from shardwright.sharding.score_blocks import KeyReach


@dataclass(frozen=True)
class Sight:
    """The keys that a query sees, and terms of its scores. If `is_causal`, queries and keys are the same tokens, and a
    query sees no keys after it.

    With the document numbers of queries [B, S] and keys [B, T], a query sees only keys of its own document. With a
    `reach`, it sees only keys not after it and not too far before it; positions begin at `first_query` and `first_key`.
    `slopes_N`, times the distance of query and key, are subtracted from the scores of each head: ALiBi, Press et al.
    2022 (arXiv 2108.12409).
    """

    is_causal: bool = False
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    reach: KeyReach | None = None
    first_query: int = 0
    first_key: int = 0
    slopes_N: Tensor | None = None

    def allowed(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
        """True where a query sees a key, [B, S, T]; None if `is_causal` alone defines what it sees."""
        allowed_BST: Tensor | None = None
        if self.query_documents is not None and self.key_documents is not None:
            allowed_BST = self.query_documents[:, :, None] == self.key_documents[:, None, :]
            if self.is_causal:
                allowed_BST.tril_()
        if self.reach is None:
            return allowed_BST
        queries_S1, keys_T = self._positions(num_queries, num_keys, device)
        near_ST = keys_T <= queries_S1
        if self.reach.window and self.reach.is_chunked:
            near_ST &= keys_T >= queries_S1 - queries_S1 % self.reach.window
        elif self.reach.window:
            near_ST &= keys_T > queries_S1 - self.reach.window
        return near_ST[None] if allowed_BST is None else allowed_BST & near_ST

    def _positions(self, num_queries: int, num_keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        queries_S = torch.arange(self.first_query, self.first_query + num_queries, device=device)
        return queries_S[:, None], torch.arange(self.first_key, self.first_key + num_keys, device=device)

    def bias(self, num_queries: int, num_keys: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """The bias of the scores, -inf where a query does not see a key, [B, 1 or N, S, T]; None if `is_causal` alone
        defines what queries see."""
        allowed_BST = self.allowed(num_queries, num_keys, device)
        if allowed_BST is None and self.slopes_N is None:
            return None
        B, N = 1 if allowed_BST is None else len(allowed_BST), 1 if self.slopes_N is None else len(self.slopes_N)
        # The CUDA operator requires rows that begin at multiples of 16 bytes.
        padded = torch.zeros(B, N, num_queries, -(-num_keys // 8) * 8, dtype=dtype, device=device)
        bias = padded[..., :num_keys]
        if self.slopes_N is not None:
            queries_S1, keys_T = self._positions(num_queries, num_keys, device)
            bias.copy_(self.slopes_N[:, None, None] * (keys_T - queries_S1))
        return bias if allowed_BST is None else bias.masked_fill_(~allowed_BST[:, None], -math.inf)


@dataclass(frozen=True)
class AttentionBlock:
    """A block of queries with a block of keys and values: what the queries see, the rule, of which a block computes all
    but the sinks, and the `kind` of device whose kernels compute it."""

    q_BNSD: Tensor
    k_BGTD: Tensor
    v_BGTD: Tensor
    sight: Sight
    rule: AttentionRule = PLAIN
    kind: str = "cpu"

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """The bias of the block's scores."""
        return self.sight.bias(self.q_BNSD.shape[2], self.k_BGTD.shape[2], dtype, self.q_BNSD.device)
