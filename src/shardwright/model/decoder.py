"""The decoder, or the stage of it that a pipeline rank holds.

The first stage takes token ids, every other stage hidden states. The last stage returns the loss, every other stage
hidden states. Without a pipeline one stage is both first and last.

Shape suffixes: S sequence, B batch, H hidden, V vocabulary rows of this rank; s tokens of this rank between layers:
S / cp, or S / (cp x tp) under sequence parallel.
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
from shardwright.model.loss import Head, LogitChange, Targets, joined_losses, microbatch_loss
from shardwright.model.mtp import FurtherToken, further_ids, skipped_targets
from shardwright.model.norm import Norm
from shardwright.model.position_tables import PositionTables, pick, positions_tensor
from shardwright.model.recomputed_block import make_block
from shardwright.model.router_state import RouterState
from shardwright.parallel.context.document_mask import (
    chunk_numbers,
    document_numbers,
    document_positions,
    has_target,
)
from shardwright.parallel.pipeline.pipeline_stage import Microbatch
from shardwright.parallel.recompute.offload import Convoy, HostPool
from shardwright.parallel.tensor.deferred_gradients import DeferredGradients
from shardwright.parallel.tensor.initial_values import materialise
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.parallel.tensor.parameter import PlacedParameter, name_parameters, placed_parameters
from shardwright.sharding.sequence import held_ranges


@dataclass(frozen=True)
class StageSpan:
    """The part of the model in a stage: layers [first_layer, end_layer), and its place in the pipeline."""

    index: int
    first_layer: int
    end_layer: int
    is_first: bool
    is_last: bool


def stage_span(plan: PlanSpec, layers: int, stage: int) -> StageSpan:
    """The span of one stage of a plan."""
    layers_per_stage = plan.stage_layers(layers)
    start = sum(layers_per_stage[:stage])
    end = start + layers_per_stage[stage]
    return StageSpan(stage, start, end, is_first=stage == 0, is_last=stage == len(layers_per_stage) - 1)


class Passage(Protocol):
    """Calls the function of a region, given the region's name. Under ZeRO the region's parameters are gathered while
    the function runs."""

    def __call__(self, region: str, function: Callable[..., Tensor], *x: Tensor) -> Tensor:
        """Return the result of the function."""


def _call_directly(region: str, function: Callable[..., Tensor], *x: Tensor) -> Tensor:
    return function(*x)


def _identity(x: Tensor) -> Tensor:
    return x


class DecoderStage(nn.Module):
    """One pipeline stage. Layers keep their number in the whole model, so a parameter has the same name in every
    plan."""

    def __init__(
        self,
        spec: ModelSpec,
        span: StageSpan,
        sharding: LayerSharding,
        policies: Mapping[int, Policy] | None = None,
        host: HostPool | None = None,
        loss_positions: int = 0,
    ) -> None:
        """`policies` maps the number of a layer in the whole model to what it recomputes; other layers keep all. With a
        `host`, layers that keep only their input offload it there until the backward. The loss is computed in chunks of
        `loss_positions` positions of this rank, or in one chunk if that is 0."""
        super().__init__()
        self.spec, self.span, self.sharding, self.host = spec, span, sharding, host
        self.loss_positions = loss_positions or spec.sequence
        self.through: Passage = _call_directly
        self.tables = PositionTables()
        self.held = sharding.held(spec.sequence)
        learned = spec.positions == "learned"
        self.embedding = Embedding(spec, sharding) if span.is_first else None
        self.positions = LearnedPositions(spec, sharding) if span.is_first and learned else None
        self.embedding_norm = Norm(spec, sharding) if span.is_first and spec.embedding_norm else None
        self.embedding_dropout = Dropout(spec, "embedding", sharding)
        policies, layers = policies or {}, range(span.first_layer, span.end_layer)
        self.layers = nn.ModuleDict({str(i): make_block(spec, i, sharding, policies.get(i, KEEP_ALL)) for i in layers})
        self.norm = Norm(spec, sharding) if span.is_last else None
        self.logit_change = LogitChange(spec.logit_scale, spec.logit_softcap)
        self.head = Head(spec, sharding) if span.is_last else None
        mtp_numbers = range(spec.layers, spec.num_blocks) if span.is_last else ()
        self.further_table = Embedding(spec, sharding) if mtp_numbers and not spec.tied_embeddings else None
        self.mtp = nn.ModuleList(FurtherToken(spec, i, sharding, policies.get(i, KEEP_ALL)) for i in mtp_numbers)
        self.mtp_modules = [module for module in self.mtp if isinstance(module, FurtherToken)]
        tables = self.embedding, self.further_table, self.head if spec.tied_embeddings else None
        for table in tables if spec.shares_table else ():
            if table is not None:
                # One tensor by name: it starts from the same values whichever stage is the last.
                table.weight.place = replace(table.weight.place, name="embedding.weight", is_tied=True)

    @property
    def deferred(self) -> DeferredGradients:
        """Weight gradients of this stage that wait for the W action of the schedule."""
        return self.sharding.deferred

    def prepare(self, device: torch.device, dtype: torch.dtype) -> "DecoderStage":
        """Give the parameters their names, device and dtype, but no memory. Returns the stage."""
        name_parameters(self, device, dtype, self.spec.adapter if self.spec.is_adapted else None)
        for parameter in placed_parameters(self).values():
            parameter.deferred = self.sharding.deferred if parameter.place.is_put_off else None
        self._place_buffers(device)
        return self

    def routers(self) -> dict[int, RouterState]:
        """The state of this stage's routers, by layer."""
        return {number: block.moe.router.state for number, block in self.blocks().items() if block.moe is not None}

    def blocks(self) -> dict[int, Block]:
        """All blocks by number: the layers, then the blocks of multi-token prediction."""
        blocks = {int(name): layer for name, layer in self.layers.items() if isinstance(layer, Block)}
        return blocks | {self.spec.layers + index: module.block for index, module in enumerate(self.mtp_modules)}

    def _place_buffers(self, device: torch.device) -> None:
        for state in self.routers().values():
            state.to(device)
        self.tables = PositionTables.of(self.spec, positions_tensor(self._attention_ranges, device))

    @property
    def _attention_ranges(self) -> tuple[range, ...]:
        """The positions that attention on this rank sees as queries: all, where ranks trade heads for them."""
        return (range(self.spec.sequence),) if self.sharding.trades_heads else self.held

    def regions(self) -> dict[str, list[PlacedParameter]]:
        """The parameters of each region, by the name that `through` gets, in the order in which regions run."""
        parts: dict[str, list[nn.Module | None]] = {"embedding": [self.embedding, self.positions]}
        parts["embedding_norm"] = [self.embedding_norm if self.spec.norm_weight else None]
        parts |= {name: [layer] for name, layer in self.layers.items()}
        for index, module in enumerate(self.mtp_modules):
            table = self.further_table if index == 0 else None
            parts[str(self.spec.layers + index)] = [table, *module.before_head()]
        parts["head"] = [self.norm, self.head, *(module.norm for module in self.mtp_modules)]
        return {
            name: [p for module in modules if module is not None for p in placed_parameters(module).values()]
            for name, modules in parts.items()
            if any(module is not None for module in modules)
        }

    def initialise(self, seed: int, device: torch.device) -> "DecoderStage":
        """Fill the parameters with initial values. Returns the stage."""
        materialise(self, seed, device, self.spec.adapter if self.spec.is_adapted else None)
        self._place_buffers(device)
        return self

    def empty_hidden(self, batch: int) -> Tensor:
        """Memory for the hidden states that a stage receives or sends, [s, B, H]."""
        num_tokens = sum(map(len, self.sharding.held_between(self.spec.sequence)))
        parameter = next(parameter for parameter in self.parameters() if parameter.is_floating_point())
        return torch.empty(num_tokens, batch, self.spec.hidden, device=parameter.device, dtype=parameter.dtype)

    def forward_pass(self, microbatch: Microbatch | None = None, marked_BT: Tensor | None = None) -> ForwardPass:
        """The values that the layers share in one forward pass; without a microbatch there is no dropout."""
        convoy = None if self.host is None or microbatch is None else Convoy(self.host)
        if marked_BT is None:
            return ForwardPass(self.tables, microbatch, convoy, streams=self.sharding.cp.streams)
        marked_BS = marked_BT[:, :-1]
        tables, window, chunks = self.tables, self.spec.window, None
        documents = self._by_rank(document_numbers(marked_BS))
        positions_BS = document_positions(marked_BS)
        if tables.temperatures is not None:
            tables = tables.in_documents(self.spec, pick(positions_BS, self._attention_ranges).t())
        if window.size and window.chunked:
            chunks = self._by_rank(chunk_numbers(positions_BS, window.size))
        streams = self.sharding.cp.streams
        real = RealTokens.of(marked_BT, streams=streams) if self.spec.moe.experts > 0 else None
        return ForwardPass(tables, microbatch, convoy, documents, chunks, real, streams)

    def _by_rank(self, documents_BS: Tensor) -> Tensor:
        """The document of each token, for each rank of cp, [P, B, s]. P is 1 if attention sees the whole sequence."""
        if self.sharding.cp.size == 1 or self.sharding.trades_heads:
            return documents_BS[None]
        size, sequence = self.sharding.cp.size, self.spec.sequence
        ranges_by_rank = (held_ranges(sequence, size, index, self.sharding.cp_method) for index in range(size))
        return torch.stack([pick(documents_BS, ranges) for ranges in ranges_by_rank])

    def forward(
        self,
        x: Tensor,
        targets_BS: Tensor | None = None,
        microbatch: Microbatch | None = None,
        marked_BT: Tensor | None = None,
    ) -> Tensor:
        """From tokens [B, S] (first stage) or hidden states [s, B, H], to hidden states or the loss (last stage).

        With `targets_BS` the last stage returns the mean loss of this rank's tokens, whose value the backward writes;
        without, the hidden states before the head. If it trains multi-token prediction, it returns a vector: this loss,
        then the loss of each further token. `microbatch` says which samples are trained on; None without training.
        `marked_BT` is given if documents are separate: all T = S + 1 tokens with their marks
        (parallel/context/document_mask.py). No document sees another, and a target that does not count has a loss of 0.
        """
        run = self.forward_pass(microbatch, marked_BT)
        if self.embedding is not None:
            embed = partial(self._embed, marked_BT)
            x = self.embedding_dropout(self._normed_embedding(self.through("embedding", embed, x)), run)
        for index, (name, layer) in enumerate(self.layers.items()):
            # The pipeline keeps the input of a stage for its gradient, so offloading that would free nothing.
            is_stage_input = index == 0 and not self.span.is_first
            x = self.through(name, partial(layer, run=replace(run, convoy=None) if is_stage_input else run), x)
        if self.norm is None:
            return x
        trains = targets_BS is not None and torch.is_grad_enabled()
        hidden = [x]
        for index, module in enumerate(self.mtp_modules):
            # Without training the module computes nothing, but its region is entered: ZeRO gathers every region.
            function: Callable[[Tensor], Tensor] = _identity
            if targets_BS is not None and trains:
                mtp_run = run.ahead(marked_BT, module.distance)
                function = partial(self._further, module, targets_BS, mtp_run)
            hidden.append(self.through(str(self.spec.layers + index), function, hidden[-1]))
        finish = partial(self._finish, targets_BS, marked_BT)
        return self.through("head", finish, *(hidden if trains else hidden[:1]))

    @property
    def shared_table(self) -> PlacedParameter:
        """The last stage's copy of the embedding table."""
        module = self.further_table if self.further_table is not None else self.head
        assert module is not None, "only the last stage shares the first one's table"
        return module.weight

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
        embedded_sBH: Tensor = self.positions(x_sBH, positions_SB)
        return embedded_sBH

    def _normed_embedding(self, x_sBH: Tensor) -> Tensor:
        """The input of the first layer. The norm is a region of its own, since its backward needs its weight."""
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
        skipped_BS = None if marked_BT is None else ~has_target(marked_BT, 1)
        if not further_sBH:
            return self.microbatch_loss(x_sBH, targets_BS, skipped_BS)
        memory = torch.zeros(1 + len(further_sBH), device=x_sBH.device)
        losses = [self.microbatch_loss(x_sBH, targets_BS, skipped_BS, memory[0])]
        # Backwards run from the last loss to the first: the main loss completes the head's gradient.
        for module, y_sBH in zip(self.mtp_modules, further_sBH, strict=True):
            ids_BS = further_ids(targets_BS, module.distance)
            skipped_BS = skipped_targets(targets_BS, marked_BT, module.distance)
            loss_memory = memory[module.distance]
            losses.append(self.microbatch_loss(module.norm(y_sBH), ids_BS, skipped_BS, loss_memory, completes=False))
        return joined_losses(losses, memory)

    def microbatch_loss(
        self,
        x_sBH: Tensor,
        targets_BS: Tensor,
        skipped_BS: Tensor | None = None,
        loss_memory: Tensor | None = None,
        completes: bool = True,
    ) -> Tensor:
        """The mean cross entropy of this rank's tokens, from the hidden states before the head. Skipped targets have a
        loss of 0. For `loss_memory` and `completes` see model/loss.py."""
        assert self.head is not None, "only the last stage has a head"
        first_row, _ = split_evenly(self.spec.vocab, self.sharding.tp.size, self.sharding.tp.index)
        rows_T = pick(targets_BS, self.held).t().flatten() - first_row
        skipped_T = None if skipped_BS is None else pick(skipped_BS, self.held).t().flatten()
        targets = Targets(rows_T, skipped_T, self.loss_positions, completes=completes)
        return microbatch_loss(
            x_sBH, self.head.weights, targets, self.sharding, loss_memory, logit_change=self.logit_change
        )

    def logits(self, x_sBH: Tensor) -> Tensor:
        """This rank's rows of the logits, [S, B, V]."""
        assert self.head is not None, "only the last stage has a head"
        return self.logit_change.of(self.head(x_sBH))
