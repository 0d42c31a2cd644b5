"""The decoder, or the stage of it that a pipeline rank holds.

A stage takes token ids if it is the first and hidden states if not; it gives the loss if it is the last and hidden
states if not. One rank holds the one stage that is first and last.

Shape suffixes: S sequence, B batch, H hidden, V vocabulary rows of this rank; s tokens of this rank between layers:
S / cp, or that / tp under sequence parallel.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from shardwright.config.model import ModelSpec
from shardwright.config.plan import PlanSpec, split_evenly
from shardwright.config.recompute_policy import KEEP_ALL, LAYER, Policy
from shardwright.model.attention import Attention
from shardwright.model.dropout import Dropout
from shardwright.model.embedding import Embedding, LearnedPositions
from shardwright.model.forward_pass import ForwardPass
from shardwright.model.latent_attention import LatentAttention
from shardwright.model.loss import Targets, microbatch_loss
from shardwright.model.mlp import MLP
from shardwright.model.moe_block import MixtureOfExperts
from shardwright.model.norm import Norm
from shardwright.model.positions import pick, positions_tensor
from shardwright.model.rotary import rotary_angles
from shardwright.model.router_state import RouterState
from shardwright.parallel.context.document_mask import counts
from shardwright.parallel.pipeline.microbatch import Microbatch
from shardwright.parallel.recompute.offload import Convoy, HostPool
from shardwright.parallel.recompute.region import Chain, forget, run_again
from shardwright.parallel.tensor.deferred_gradients import DeferredGradients
from shardwright.parallel.tensor.initial_values import materialise
from shardwright.parallel.tensor.linear import ColumnLinear, LayerSharding
from shardwright.parallel.tensor.parameter import PlacedParameter, name_parameters, placed_parameters
from shardwright.sharding.sequence import held_ranges


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
    return StageSpan(stage, start, start + counts[stage], stage == 0, is_last=stage == len(counts) - 1)


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    `policy` says what it computes again in the backward instead of keeping it (config/recompute_policy.py).
    """

    def __init__(self, spec: ModelSpec, layer: int, cut: LayerSharding, policy: Policy = KEEP_ALL) -> None:
        super().__init__()
        self.policy = policy
        self.attention_norm = Norm(spec, cut)
        self.attention = LatentAttention(spec, cut) if spec.is_latent else Attention(spec, cut)
        self.attention_dropout = Dropout(spec, f"layers.{layer}.attention", cut)
        self.mlp_norm = Norm(spec, cut)
        self.mlp = None if spec.moe.has_experts(layer) else MLP(spec, cut)
        self.moe = MixtureOfExperts(spec, layer, cut) if spec.moe.has_experts(layer) else None
        self.mlp_dropout = Dropout(spec, f"layers.{layer}.mlp", cut)

    def forward(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """[s, B, H] to [s, B, H]."""
        if LAYER in self.policy:
            return self._forward_forgotten(x_sBH, run)
        x_sBH = x_sBH + self._attention(x_sBH, run, self.policy)
        return x_sBH + self._mlp(x_sBH, run, self.policy)

    def _attention(self, x_sBH: Tensor, run: ForwardPass, policy: Policy) -> Tensor:
        """attention(norm(x)), whose operators are called one by one: some may be computed again."""
        attention = self.attention
        qkv = Chain(x_sBH, policy).then("norm", self.attention_norm).product("qkv", attention.project)
        attended = qkv.then("attention", partial(attention.attend, run=run))
        return self.attention_dropout(attended.into(attention.out), run)

    def _mlp(self, x_sBH: Tensor, run: ForwardPass, policy: Policy) -> Tensor:
        """mlp(norm(x)), or moe(norm(x))."""
        if self.moe is not None:
            return self.mlp_dropout(self.moe(self.mlp_norm(x_sBH), run, policy), run)
        assert self.mlp is not None
        return self.mlp_dropout(self.mlp.after(Chain(x_sBH, policy).then("norm", self.mlp_norm)), run)

    def _forward_forgotten(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """The block where only its input is kept. All of it is computed again but the down product, which
        takes part; a block with experts ends with a sum, and is computed again to its end."""

        def halfway(x_sBH: Tensor) -> Tensor:
            return x_sBH + self._attention(x_sBH, run, KEEP_ALL)

        def whole(x_sBH: Tensor) -> Tensor:
            x_sBH = halfway(x_sBH)
            return x_sBH + self._mlp(x_sBH, run, KEEP_ALL)

        def before_down(x_sBH: Tensor) -> tuple[Tensor, Tensor]:
            x_sBH = halfway(x_sBH)
            assert self.mlp is not None
            return x_sBH, self.mlp.activate(self.mlp.up(self.mlp_norm(x_sBH)))

        if self.mlp is None:
            return run_again(whole, x_sBH, run.convoy)
        (x_sBH,), inner_SBF = forget(before_down, x_sBH, convoy=run.convoy)
        return x_sBH + self.mlp_dropout(self.mlp.down(inner_SBF), run)


# Computes a region of a stage, given its name; ZeRO has the region's parameters there meanwhile.
Passage = Callable[[str, Callable[[Tensor], Tensor], Tensor], Tensor]


class DecoderStage(nn.Module):
    """One stage. Layers keep their number in the whole model, so that a parameter's name is the same in any plan."""

    def __init__(
        self, spec: ModelSpec, span: StageSpan, cut: LayerSharding, policies: Mapping[int, Policy] | None = None,
        host: HostPool | None = None, loss_positions: int = 0,
    ) -> None:  # fmt: skip
        """`policies` say what layers recompute, by their number in the whole model; others keep all. Where there is a
        `host`, inputs of layers that keep nothing else wait there for the backward. The loss takes `loss_positions`
        positions of this rank at once, or if that is 0 all."""
        super().__init__()
        self.spec, self.span, self.cut, self.host = spec, span, cut, host
        self.loss_positions = loss_positions or spec.sequence
        self.through: Passage = lambda region, function, x: function(x)
        self.angles: tuple[Tensor, Tensor] | None = None
        self.held = cut.held(spec.sequence)
        learned = spec.positions == "learned"
        self.embedding = Embedding(spec, cut) if span.is_first else None
        self.positions = LearnedPositions(spec, cut) if span.is_first and learned else None
        self.embedding_dropout = Dropout(spec, "embedding", cut)
        policies, numbers = policies or {}, range(span.first_layer, span.end_layer)
        self.layers = nn.ModuleDict({str(i): Block(spec, i, cut, policies.get(i, KEEP_ALL)) for i in numbers})
        self.norm = Norm(spec, cut) if span.is_last else None
        self.head = ColumnLinear(spec.hidden, (spec.vocab,), 0, cut, std=spec.init_std) if span.is_last else None
        for use in (self.embedding, self.head) if spec.tied_embeddings else ():
            if use is not None:
                # The same tensor by name: it starts from the same values wherever the last stage is.
                use.weight.place = replace(use.weight.place, name="embedding.weight", is_tied=True)

    @property
    def deferred(self) -> DeferredGradients:
        """Weight gradients of this stage that wait for their W."""
        return self.cut.deferred

    def prepare(self, device: torch.device, dtype: torch.dtype) -> "DecoderStage":
        """Give the parameters their names, device and number type, but no memory. Returns itself."""
        name_parameters(self, device, dtype)
        for parameter in placed_parameters(self).values():
            parameter.deferred = self.cut.deferred if parameter.place.is_put_off else None
        self._place_buffers(device)
        return self

    def routers(self) -> dict[int, RouterState]:
        """What the routers of this stage remember, by layer."""
        return {
            int(name): layer.moe.router.state
            for name, layer in self.layers.items()
            if isinstance(layer, Block) and layer.moe is not None
        }

    def _place_buffers(self, device: torch.device) -> None:
        for state in self.routers().values():
            state.to(device)
        if self.spec.positions == "rotary":
            turned = (range(self.spec.sequence),) if self.cut.trades_heads else self.held
            positions_S = positions_tensor(turned, device)
            self.angles = rotary_angles(positions_S, self.spec.rotary_width, self.spec.rotary_base, self.spec.yarn)

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
        self._place_buffers(device)
        return self

    def empty_hidden(self, batch: int) -> Tensor:
        """Memory for what passes between stages, [s, B, H]."""
        tokens = sum(map(len, self.cut.held_between(self.spec.sequence)))
        like = next(self.parameters())
        return torch.empty(tokens, batch, self.spec.hidden, device=like.device, dtype=like.dtype)

    def forward_pass(self, microbatch: Microbatch | None = None, documents_BS: Tensor | None = None) -> ForwardPass:
        """What the layers share in one pass; without a microbatch nothing is dropped out."""
        convoy = None if self.host is None or microbatch is None else Convoy(self.host)
        documents = None if documents_BS is None else self._by_rank(documents_BS)
        return ForwardPass(self.angles, microbatch, convoy, documents)

    def _by_rank(self, documents_BS: Tensor) -> Tensor:
        """The documents of the tokens of each rank whose keys attention meets by themselves, [P, B, s]."""
        if self.cut.cp.size == 1 or self.cut.trades_heads:
            return documents_BS[None]
        size, sequence = self.cut.cp.size, self.spec.sequence
        held = (held_ranges(sequence, size, index, self.cut.cp_method) for index in range(size))
        return torch.stack([pick(documents_BS, ranges) for ranges in held])

    def forward(
        self,
        x: Tensor,
        targets_BS: Tensor | None = None,
        microbatch: Microbatch | None = None,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """From tokens [B, S] (first stage) or hidden states [s, B, H], to hidden states or the loss of each token.

        The last stage gives the mean loss of this rank's tokens, which is there once the backward has run, if
        `targets_BS` are given, else the hidden states before the head. `microbatch` says which samples these are, where
        they are trained on.
        `documents_BT`, where documents are separate, are the documents' numbers of all T = S + 1 tokens: none sees
        another, and the loss is 0 where a target begins one.
        """
        run = self.forward_pass(microbatch, None if documents_BT is None else documents_BT[:, :-1])
        if self.embedding is not None:
            x = self.through("embedding", partial(self._embed, run), x)
        for index, (name, layer) in enumerate(self.layers.items()):
            # The pipeline holds a stage's input for its gradient: sending that away would free nothing.
            is_held = index == 0 and not self.span.is_first
            x = self.through(name, partial(layer, run=replace(run, convoy=None) if is_held else run), x)
        if self.norm is not None:
            x = self.through("head", partial(self._finish, targets_BS, documents_BT), x)
        return x

    def _embed(self, run: ForwardPass, tokens_BS: Tensor) -> Tensor:
        assert self.embedding is not None
        x_sBH = self.embedding(pick(tokens_BS, self.held).t())
        if self.positions is not None:
            x_sBH = self.positions(x_sBH, positions_tensor(self.held, x_sBH.device))
        return self.embedding_dropout(x_sBH, run)

    def _finish(self, targets_BS: Tensor | None, documents_BT: Tensor | None, x_sBH: Tensor) -> Tensor:
        assert self.norm is not None
        x_sBH = self.norm(x_sBH)
        if targets_BS is None:
            return x_sBH
        counts_BS = None if documents_BT is None else counts(documents_BT)
        return self.microbatch_loss(x_sBH, targets_BS, counts_BS)

    def microbatch_loss(self, x_sBH: Tensor, targets_BS: Tensor, counts_BS: Tensor | None = None) -> Tensor:
        """The mean cross entropy of this rank's tokens from the hidden states before the head; targets that do not
        count have 0."""
        assert self.head is not None, "only the last stage has a head"
        first_row, _ = split_evenly(self.spec.vocab, self.cut.tp.size, self.cut.tp.index)
        rows_T = pick(targets_BS, self.held).t().flatten() - first_row
        skipped_T = None if counts_BS is None else ~pick(counts_BS, self.held).t().flatten()
        return microbatch_loss(x_sBH, self.head.weight, Targets(rows_T, skipped_T, self.loss_positions), self.cut)

    def logits(self, x_sBH: Tensor) -> Tensor:
        """This rank's rows of the logits, [S, B, V]."""
        assert self.head is not None, "only the last stage has a head"
        return self.head(x_sBH)
