"""The decoder, or the stage of it that a pipeline rank holds.

A stage takes token ids if it is the first and hidden states if not; it gives the loss if it is the last and hidden
states if not. One rank holds the one stage that is first and last.

Shape suffixes: S sequence, B batch, H hidden, V vocabulary rows of this rank; s is S / tp under sequence parallel.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from shardwright.model.attention import Attention
from shardwright.model.embedding import Embedding, LearnedPositions
from shardwright.model.loss import vocabulary_cross_entropy
from shardwright.model.mlp import MLP
from shardwright.model.norm import Norm
from shardwright.parallel.deferred import DeferredGradients
from shardwright.parallel.parameter import PlacedParameter, materialise, name_parameters, placed_parameters
from shardwright.parallel.tensor import ColumnLinear, Cut
from shardwright.spec.model import ModelSpec
from shardwright.spec.plan import PlanSpec, split_evenly


@dataclass(frozen=True)
class StageSpan:
    """What a stage holds: layers [first, end), and whether it is the first or the last of the pipeline."""

    index: int
    first_layer: int
    end_layer: int
    is_first: bool
    is_last: bool


def stage_span(plan: PlanSpec, layers: int, stage: int) -> StageSpan:
    """The span of one stage of a plan."""
    counts = plan.stage_layers(layers)
    start = sum(counts[:stage])
    return StageSpan(stage, start, start + counts[stage], stage == 0, stage == len(counts) - 1)


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: ModelSpec, cut: Cut) -> None:
        super().__init__()
        self.attention_norm = Norm(spec, cut)
        self.attention = Attention(spec, cut)
        self.mlp_norm = Norm(spec, cut)
        self.mlp = MLP(spec, cut)

    def forward(self, x_sBH: Tensor, positions_S: Tensor) -> Tensor:
        """[s, B, H] to [s, B, H]."""
        x_sBH = x_sBH + self.attention(self.attention_norm(x_sBH), positions_S)
        return x_sBH + self.mlp(self.mlp_norm(x_sBH))


# Computes a region of a stage, given its name; ZeRO has the region's parameters there meanwhile.
Passage = Callable[[str, Callable[[Tensor], Tensor], Tensor], Tensor]


def _straight(region: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


class DecoderStage(nn.Module):
    """One stage. Layers keep their number in the whole model, so that a parameter's name is the same in any plan."""

    def __init__(self, spec: ModelSpec, span: StageSpan, cut: Cut) -> None:
        super().__init__()
        self.spec, self.span, self.cut = spec, span, cut
        self.through: Passage = _straight
        learned = spec.positions == "learned"
        self.embedding = Embedding(spec, cut) if span.is_first else None
        self.positions = LearnedPositions(spec, cut) if span.is_first and learned else None
        self.layers = nn.ModuleDict({str(i): Block(spec, cut) for i in range(span.first_layer, span.end_layer)})
        self.norm = Norm(spec, cut) if span.is_last else None
        self.head = ColumnLinear(spec.hidden, (spec.vocab,), 0, cut, spec.init_std) if span.is_last else None
        if self.head is not None and spec.tied_embeddings:
            # The same tensor by name: it starts from the same values wherever the last stage is.
            self.head.weight.place = replace(self.head.weight.place, name="embedding.weight")

    @property
    def deferred(self) -> DeferredGradients:
        """Weight gradients of this stage that wait for their W."""
        return self.cut.deferred

    def prepare(self, device: torch.device, dtype: torch.dtype) -> "DecoderStage":
        """Give the parameters their names, device and number type, but no memory. Returns itself."""
        name_parameters(self, device, dtype)
        return self

    def regions(self) -> dict[str, list[PlacedParameter]]:
        """What is computed one after the other, by the name that `through` is told, with its parameters."""
        parts: dict[str, list[nn.Module | None]] = {"embedding": [self.embedding, self.positions]}
        parts |= {name: [layer] for name, layer in self.layers.items()}
        parts["head"] = [self.norm, self.head]
        return {
            name: [p for module in modules if module is not None for p in placed_parameters(module).values()]
            for name, modules in parts.items()
            if any(module is not None for module in modules)
        }

    def initialise(self, seed: int, device: torch.device) -> "DecoderStage":
        """Fill the parameters. Returns itself."""
        materialise(self, seed, device)
        return self

    def empty_hidden(self, batch: int) -> Tensor:
        """Memory for what passes between stages, [s, B, H]."""
        tokens = self.spec.sequence // (self.cut.tp.size if self.cut.shards_sequence else 1)
        like = next(self.parameters())
        return torch.empty(tokens, batch, self.spec.hidden, device=like.device, dtype=like.dtype)

    def forward(self, x: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        """From tokens [B, S] (first stage) or hidden states [s, B, H], to hidden states or the loss of each token.

        The last stage gives [S x B] losses if `targets_BS` are given, else the hidden states before the head.
        """
        positions_S = torch.arange(self.spec.sequence, device=x.device)
        if self.embedding is not None:
            x = self.through("embedding", partial(self._embed, positions_S), x)
        for name, layer in self.layers.items():
            x = self.through(name, partial(layer, positions_S=positions_S), x)
        if self.norm is not None:
            x = self.through("head", partial(self._finish, targets_BS), x)
        return x

    def _embed(self, positions_S: Tensor, tokens_BS: Tensor) -> Tensor:
        assert self.embedding is not None
        x_sBH = self.embedding(tokens_BS.t())
        return x_sBH if self.positions is None else self.positions(x_sBH, positions_S)

    def _finish(self, targets_BS: Tensor | None, x_sBH: Tensor) -> Tensor:
        assert self.norm is not None
        x_sBH = self.norm(x_sBH)
        return x_sBH if targets_BS is None else self.token_losses(x_sBH, targets_BS)

    def token_losses(self, x_sBH: Tensor, targets_BS: Tensor) -> Tensor:
        """Cross entropy of each token, [S x B]."""
        logits_SBV = self.logits(x_sBH)
        first_row, _ = split_evenly(self.spec.vocab, self.cut.tp.size, self.cut.tp.index)
        return vocabulary_cross_entropy(logits_SBV.flatten(0, 1), targets_BS.t().flatten(), first_row, self.cut.tp)

    def logits(self, x_sBH: Tensor) -> Tensor:
        """This rank's rows of the logits, [S, B, V]."""
        assert self.head is not None, "only the last stage has a head"
        return self.head(x_sBH)
