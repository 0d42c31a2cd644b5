"""The decoder, or the stage of it that a pipeline rank holds.

A stage takes token ids if it is the first and hidden states if not; it gives the loss if it is the last and hidden
states if not. One rank holds the one stage that is first and last.

Shape suffixes: S sequence, B batch, H hidden, V vocabulary rows of this rank; s tokens of this rank between layers:
S / cp, or that / tp under sequence parallel.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from shardwright.config.model import ModelSpec
from shardwright.config.plan import PlanSpec, split_evenly
from shardwright.config.recompute_policy import KEEP_ALL, Policy
from shardwright.model.block import Block
from shardwright.model.dropout import Dropout
from shardwright.model.embedding import Embedding, LearnedPositions
from shardwright.model.forward_pass import ForwardPass, RealTokens
from shardwright.model.logit_change import LogitChange
from shardwright.model.loss import Targets, joined_losses, microbatch_loss
from shardwright.model.make_block import make_block
from shardwright.model.mtp import FurtherToken, further_ids, skipped_targets
from shardwright.model.norm import Norm
from shardwright.model.position_tables import PositionTables
from shardwright.model.positions import pick, positions_tensor
from shardwright.model.router_state import RouterState
from shardwright.parallel.context.document_mask import (
    chunk_numbers,
    counts,
    document_numbers,
    document_positions,
)
from shardwright.parallel.pipeline.microbatch import Microbatch
from shardwright.parallel.recompute.offload import Convoy, HostPool
from shardwright.parallel.tensor.deferred_gradients import DeferredGradients
from shardwright.parallel.tensor.initial_values import materialise
from shardwright.parallel.tensor.linear import ColumnLinear, LayerSharding
from shardwright.parallel.tensor.parameter import PlacedParameter, name_parameters, placed_parameters
from shardwright.sharding.sequence import held_ranges


@dataclass(frozen=True)
class StageSpan:
    """The part of the model in a stage: layers [first, end), and if it is the first or the last of the pipeline."""

    index: int
    first_layer: int
    end_layer: int
    is_first: bool
    is_last: bool


def stage_span(plan: PlanSpec, layers: int, stage: int) -> StageSpan:
    """The span of one stage of a plan."""
    counts = plan.stage_layers(layers)
    start = sum(counts[:stage])
    return StageSpan(stage, start, start + counts[stage], stage == 0, is_last=stage == len(counts) - 1)


class Passage(Protocol):
    """Computes a region of a stage, given its name; ZeRO has the region's parameters there meanwhile."""

    def __call__(self, region: str, function: Callable[..., Tensor], *x: Tensor) -> Tensor:
        """Return the result of the function."""


def _as_it_is(region: str, function: Callable[..., Tensor], *x: Tensor) -> Tensor:
    return function(*x)


def _unchanged(x: Tensor) -> Tensor:
    return x


class DecoderStage(nn.Module):
    """One stage. Layers keep their number in the whole model, so that a parameter's name is the same in any plan."""

    def __init__(
        self, spec: ModelSpec, span: StageSpan, sharding: LayerSharding, policies: Mapping[int, Policy] | None = None,
        host: HostPool | None = None, loss_positions: int = 0,
    ) -> None:  # fmt: skip
        """`policies` say what layers recompute, by their number in the whole model; others keep all. Where there is a
        `host`, inputs of layers that keep nothing else wait there for the backward. The loss takes `loss_positions`
        positions of this rank at once, or if that is 0 all."""
        super().__init__()
        self.spec, self.span, self.sharding, self.host = spec, span, sharding, host
        self.loss_positions = loss_positions or spec.sequence
        self.through: Passage = _as_it_is
        self.tables = PositionTables()
        self.held = sharding.held(spec.sequence)
        learned = spec.positions == "learned"
        self.embedding = Embedding(spec, sharding) if span.is_first else None
        self.positions = LearnedPositions(spec, sharding) if span.is_first and learned else None
        self.embedding_norm = Norm(spec, sharding) if span.is_first and spec.embedding_norm else None
        self.embedding_dropout = Dropout(spec, "embedding", sharding)
        policies, numbers = policies or {}, range(span.first_layer, span.end_layer)
        self.layers = nn.ModuleDict({str(i): make_block(spec, i, sharding, policies.get(i, KEEP_ALL)) for i in numbers})
        self.norm = Norm(spec, sharding) if span.is_last else None
        self.logit_change = LogitChange(spec.logit_scale, spec.logit_softcap)
        self.head = ColumnLinear(spec.hidden, (spec.vocab,), 0, sharding, std=spec.init_std) if span.is_last else None
        further = range(spec.layers, spec.num_blocks) if span.is_last else ()
        self.further_table = Embedding(spec, sharding) if further and not spec.tied_embeddings else None
        self.mtp = nn.ModuleList(FurtherToken(spec, i, sharding, policies.get(i, KEEP_ALL)) for i in further)
        self.further = [module for module in self.mtp if isinstance(module, FurtherToken)]
        tables = self.embedding, self.further_table, self.head if spec.tied_embeddings else None
        for use in tables if spec.shares_table else ():
            if use is not None:
                # The same tensor by name: it starts from the same values wherever the last stage is.
                use.weight.place = replace(use.weight.place, name="embedding.weight", is_tied=True)

    @property
    def deferred(self) -> DeferredGradients:
        """Weight gradients of this stage that wait for their W."""
        return self.sharding.deferred

    def prepare(self, device: torch.device, dtype: torch.dtype) -> "DecoderStage":
        """Give the parameters their names, device and number type, but no memory. Returns itself."""
        name_parameters(self, device, dtype)
        for parameter in placed_parameters(self).values():
            parameter.deferred = self.sharding.deferred if parameter.place.is_put_off else None
        self._place_buffers(device)
        return self

    def routers(self) -> dict[int, RouterState]:
        """The state of this stage's routers, by layer."""
        return {number: block.moe.router.state for number, block in self.blocks().items() if block.moe is not None}

    def blocks(self) -> dict[int, Block]:
        """All blocks by their number: the layers, and those of multi-token prediction behind the last."""
        blocks = {int(name): layer for name, layer in self.layers.items() if isinstance(layer, Block)}
        return blocks | {self.spec.layers + index: module.block for index, module in enumerate(self.further)}

    def _place_buffers(self, device: torch.device) -> None:
        for state in self.routers().values():
            state.to(device)
        seen = (range(self.spec.sequence),) if self.sharding.trades_heads else self.held
        self.tables = PositionTables.of(self.spec, positions_tensor(seen, device))

    def regions(self) -> dict[str, list[PlacedParameter]]:
        """The regions that are computed one after the other, by the name that `through` gets, with their parameters."""
        parts: dict[str, list[nn.Module | None]] = {"embedding": [self.embedding, self.positions]}
        parts["embedding_norm"] = [self.embedding_norm if self.spec.norm_weight else None]
        parts |= {name: [layer] for name, layer in self.layers.items()}
        for index, module in enumerate(self.further):
            table = self.further_table if index == 0 else None
            parts[str(self.spec.layers + index)] = [table, *module.before_head()]
        parts["head"] = [self.norm, self.head, *(module.norm for module in self.further)]
        return {
            name: [p for module in modules if module is not None for p in placed_parameters(module).values()]
            for name, modules in parts.items()
            if any(module is not None for module in modules)
        }

    def initialise(self, seed: int, device: torch.device) -> "DecoderStage":
        """Fill the parameters. Returns itself."""
        materialise(self, seed, device)
        self._place_buffers(device)
        return self

    def empty_hidden(self, batch: int) -> Tensor:
        """Memory for what passes between stages, [s, B, H]."""
        tokens = sum(map(len, self.sharding.held_between(self.spec.sequence)))
        like = next(self.parameters())
        return torch.empty(tokens, batch, self.spec.hidden, device=like.device, dtype=like.dtype)

    def forward_pass(self, microbatch: Microbatch | None = None, marked_BT: Tensor | None = None) -> ForwardPass:
        """The values that the layers share in one pass; without a microbatch there is no dropout."""
        convoy = None if self.host is None or microbatch is None else Convoy(self.host)
        if marked_BT is None:
            return ForwardPass(self.tables, microbatch, convoy, streams=self.sharding.cp.streams)
        marked_BS = marked_BT[:, :-1]
        tables, window, chunks = self.tables, self.spec.window, None
        documents = self._by_rank(document_numbers(marked_BS))
        positions_BS = document_positions(marked_BS)
        if tables.temperatures is not None:
            seen = (range(self.spec.sequence),) if self.sharding.trades_heads else self.held
            tables = tables.in_documents(self.spec, pick(positions_BS, seen).t())
        if window.size and window.chunked:
            chunks = self._by_rank(chunk_numbers(positions_BS, window.size))
        streams = self.sharding.cp.streams
        real = RealTokens.of(marked_BT, streams=streams) if self.spec.moe.experts > 0 else None
        return ForwardPass(tables, microbatch, convoy, documents, chunks, real, streams)

    def _by_rank(self, documents_BS: Tensor) -> Tensor:
        """The documents of the tokens of each rank whose keys attention meets by themselves, [P, B, s]."""
        if self.sharding.cp.size == 1 or self.sharding.trades_heads:
            return documents_BS[None]
        size, sequence = self.sharding.cp.size, self.spec.sequence
        held = (held_ranges(sequence, size, index, self.sharding.cp_method) for index in range(size))
        return torch.stack([pick(documents_BS, ranges) for ranges in held])

    def forward(
        self,
        x: Tensor,
        targets_BS: Tensor | None = None,
        microbatch: Microbatch | None = None,
        marked_BT: Tensor | None = None,
    ) -> Tensor:
        """From tokens [B, S] (first stage) or hidden states [s, B, H], to hidden states or the loss of each token.

        The last stage gives the mean loss of this rank's tokens, which is there once the backward has run, if
        `targets_BS` are given, else the hidden states before the head. Where it trains and predicts further tokens it
        gives a vector: this loss, and those of one token further after the other. `microbatch` says which samples these
        are, where they are trained on.
        `marked_BT`, where documents are separate, are all T = S + 1 tokens with their marks
        (parallel/context/document_mask.py): no document sees another, and a target that does not count has a loss of 0.
        """
        run = self.forward_pass(microbatch, marked_BT)
        if self.embedding is not None:
            embed = partial(self._embed, marked_BT)
            x = self.embedding_dropout(self._normed_embedding(self.through("embedding", embed, x)), run)
        for index, (name, layer) in enumerate(self.layers.items()):
            # The pipeline holds a stage's input for its gradient: sending that away would free nothing.
            is_held = index == 0 and not self.span.is_first
            x = self.through(name, partial(layer, run=replace(run, convoy=None) if is_held else run), x)
        if self.norm is None:
            return x
        trains = targets_BS is not None and torch.is_grad_enabled()
        hidden = [x]
        for index, module in enumerate(self.further):
            # Where nothing is trained its values pass by, as those of every region.
            function: Callable[[Tensor], Tensor] = _unchanged
            if targets_BS is not None and trains:
                ahead = run.ahead(marked_BT, module.distance)
                function = partial(self._further, module, targets_BS, ahead)
            hidden.append(self.through(str(self.spec.layers + index), function, hidden[-1]))
        finish = partial(self._finish, targets_BS, marked_BT)
        return self.through("head", finish, *(hidden if trains else hidden[:1]))

    @property
    def shared_table(self) -> PlacedParameter:
        """The table of embeddings as the last stage has it."""
        source = self.further_table if self.further_table is not None else self.head
        assert source is not None, "only the last stage shares the first one's table"
        return source.weight

    def _further(self, module: FurtherToken, targets_BS: Tensor, run: ForwardPass, x_sBH: Tensor) -> Tensor:
        return module(x_sBH, targets_BS, self.shared_table, replace(run, convoy=None))

    def _embed(self, marked_BT: Tensor | None, tokens_BS: Tensor) -> Tensor:
        assert self.embedding is not None
        x_sBH: Tensor = self.embedding(pick(tokens_BS, self.held).t())
        if self.positions is None:
            return x_sBH
        if marked_BT is None:
            positions_SB = positions_tensor(self.held, x_sBH.device)[:, None]
        else:
            positions_SB = pick(document_positions(marked_BT[:, :-1]), self.held).t().contiguous()
        with_positions: Tensor = self.positions(x_sBH, positions_SB)
        return with_positions

    def _normed_embedding(self, x_sBH: Tensor) -> Tensor:
        """The input of the first layer, in a region of its own: its backward needs the norm's weight."""
        norm = self.embedding_norm
        if norm is None:
            return x_sBH
        return norm(x_sBH) if norm.weight is None else self.through("embedding_norm", norm, x_sBH)

    def _finish(
        self, targets_BS: Tensor | None, marked_BT: Tensor | None, x_sBH: Tensor, *further_sBH: Tensor
    ) -> Tensor:
        assert self.norm is not None
        x_sBH = self.norm(x_sBH)
        if targets_BS is None:
            return x_sBH
        skipped_BS = None if marked_BT is None else ~counts(marked_BT, 1)
        if not further_sBH:
            return self.microbatch_loss(x_sBH, targets_BS, skipped_BS)
        memory = torch.zeros(1 + len(further_sBH), device=x_sBH.device)
        losses = [self.microbatch_loss(x_sBH, targets_BS, skipped_BS, memory[0])]
        # Backwards go from the last to the first: the main loss completes the head's gradient.
        for module, y_sBH in zip(self.further, further_sBH, strict=True):
            ids_BS = further_ids(targets_BS, module.distance)
            skipped_BS = skipped_targets(targets_BS, marked_BT, module.distance)
            into = memory[module.distance]
            losses.append(self.microbatch_loss(module.norm(y_sBH), ids_BS, skipped_BS, into, completes=False))
        return joined_losses(losses, memory)

    def microbatch_loss(
        self, x_sBH: Tensor, targets_BS: Tensor, skipped_BS: Tensor | None = None, into: Tensor | None = None,
        completes: bool = True,
    ) -> Tensor:  # fmt: skip
        """The mean cross entropy of this rank's tokens from the hidden states before the head; skipped targets have 0.
        `into` and `completes` as in model/loss.py."""
        assert self.head is not None, "only the last stage has a head"
        first_row, _ = split_evenly(self.spec.vocab, self.sharding.tp.size, self.sharding.tp.index)
        rows_T = pick(targets_BS, self.held).t().flatten() - first_row
        skipped_T = None if skipped_BS is None else pick(skipped_BS, self.held).t().flatten()
        targets = Targets(rows_T, skipped_T, self.loss_positions, completes=completes)
        return microbatch_loss(x_sBH, self.head.weight, targets, self.sharding, into, logits=self.logit_change)

    def logits(self, x_sBH: Tensor) -> Tensor:
        """This rank's rows of the logits, [S, B, V]."""
        assert self.head is not None, "only the last stage has a head"
        return self.logit_change.of(self.head(x_sBH))
