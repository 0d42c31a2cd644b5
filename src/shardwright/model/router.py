"""The router of a layer: scores of the experts for each token, the choice among them, and the losses for balance.

The router computes in float32. If a decision depends on the whole microbatch (capacity, experts that choose), the ranks
that hold parts of its tokens gather the logits first, and each rank decides for all tokens. So every plan decides as
one rank does.

The tensors that its backward keeps are listed in memory/moe_activations.py; their sizes are in memory/kept_tensors.py
(InnerRouting).

Shape suffixes: s positions on this rank, B samples of the microbatch, H hidden, E experts, T = s x B tokens of this
rank, A tokens of the whole microbatch, K choices of a token.
"""

import math

import torch
from torch import Tensor, nn

from shardwright.config.model import ModelSpec
from shardwright.model.balance import Chosen, add_losses, balance_loss, z_loss
from shardwright.model.capacity import fit
from shardwright.model.float32_linear import exact_product
from shardwright.model.forward_pass import ForwardPass, RealTokens
from shardwright.model.gates.choice import Choice, Known, add_to_one, make_gate
from shardwright.model.position_tables import pick, positions_tensor
from shardwright.model.router_state import RouterState
from shardwright.parallel.comm.collectives import Axis, all_gather, all_reduce
from shardwright.parallel.expert.dispatch import Routing
from shardwright.parallel.expert.grouped_linear import count_each
from shardwright.parallel.tensor.counter_rng import stream_key, uniform
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.parallel.tensor.parameter import whole

# The random number of a token depends on its sample and its position, but not on the length of a sequence.
ROWS_OF_A_SAMPLE = 1 << 32


class Router(nn.Module):
    """`state` is the router's memory from step to step. The weight is [E, H], the bias of logits, if any, [E]."""

    def __init__(self, spec: ModelSpec, block: str, sharding: LayerSharding) -> None:
        super().__init__()
        self.spec, self.sharding, self.block, self.sequence = spec.moe, sharding, block, spec.sequence
        self.gate = make_gate(spec.moe)
        self.state = RouterState(spec.moe)
        self.weight = whole((spec.moe.experts, spec.hidden), "normal", spec.init_std, summed_over=sharding.summed_over)
        has_bias = spec.moe.router_bias
        self.bias = whole((spec.moe.experts,), "zeros", summed_over=sharding.summed_over) if has_bias else None

    def forward(self, x_sBH: Tensor, run: ForwardPass) -> Routing:
        """The routing of this rank's tokens, [s x B, K]."""
        B = x_sBH.shape[1]
        logits_TE = exact_product(x_sBH.flatten(0, 1), self.weight, self.sharding.deferred, self.sharding.tp.kind)
        if self.bias is not None:
            logits_TE = logits_TE + self.bias.float()
        scores_TE = self.gate.score(logits_TE)
        ranges = self.sharding.held_between(self.sequence)
        positions_s = positions_tensor(ranges, x_sBH.device)
        real_T = None if run.real is None else pick(run.real.mask_BS, ranges).t().flatten()
        with torch.no_grad():
            known = self._gate_inputs(positions_s, real_T, B, run=run)
            gate_choice, final = self._decide(logits_TE.detach(), scores_TE.detach(), known, positions_s, run=run)
        weights_TK = self.gate.weigh(logits_TE, scores_TE, final.experts_TK)
        # With recompute a pass runs twice, and only the one with a graph is counted.
        if run.microbatch is not None and torch.is_grad_enabled():
            likelihood_TE = scores_TE if self.spec.gate_facts.scores_add_up else add_to_one(scores_TE)
            losses = self._losses(logits_TE, likelihood_TE, gate_choice, real_T, real=run.real, batch=B)
            self.state.observe(gate_choice, final, likelihood_TE.detach(), losses.detach(), real_T)
            if losses.requires_grad:
                # The loss factor belongs to a mean over this rank's part of the sequence; these are parts of the whole.
                weights_TK = add_losses(weights_TK, losses.sum(), run.microbatch.loss_factor * self.sharding.cp.size)
        return Routing(final.experts_TK.masked_fill(~final.holds_TK, -1), weights_TK, varies=self.gate.sees_all)

    def _splits(self) -> list[Axis]:
        """The axes whose ranks hold parts of a microbatch's tokens, innermost first."""
        return ([self.sharding.tp] if self.sharding.shards_sequence else []) + (
            [self.sharding.cp] if self.sharding.cp.size > 1 else []
        )

    def _decide(
        self, logits_TE: Tensor, scores_TE: Tensor, known: Known, positions_s: Tensor, run: ForwardPass
    ) -> tuple[Choice, Choice]:
        """The choices of this rank's tokens: as the gate makes them, and after the capacity of experts is applied."""
        spec, splits, batch = self.spec, self._splits(), logits_TE.shape[0] // len(positions_s)
        if not self.gate.sees_all and spec.capacity(self.sequence * batch) is None:
            choice = self.gate.choose(scores_TE, known)
            return choice, choice
        # Gather the parts of all ranks, and put them in order of position.
        for axis in splits:
            logits_TE, positions_s = all_gather(logits_TE, axis), all_gather(positions_s, axis)
        order_S = torch.argsort(positions_s)
        logits_AE = logits_TE.unflatten(0, (-1, batch))[order_S].flatten(0, 1)
        scores_AE = self.gate.score(logits_AE)
        real_A = None if run.real is None else run.real.mask_BS.t().flatten()
        known = self._gate_inputs(positions_s[order_S], real_A, batch, run=run)
        choice = final = self.gate.choose(scores_AE, known)
        num_tokens = self.sequence * batch if run.real is None else known.num_real
        if not self.gate.sees_all and (capacity := spec.capacity(num_tokens)) is not None:
            final = fit(choice, self.gate.weigh(logits_AE, scores_AE, choice.experts_TK), capacity, spec.overflow)
        numbers_T = self._own_numbers(positions_s, order_S, batch, splits)
        return _choice_of_tokens(choice, numbers_T), _choice_of_tokens(final, numbers_T)

    def _own_numbers(self, positions_S: Tensor, order_S: Tensor, batch: int, splits: list[Axis]) -> Tensor:
        """The numbers of this rank's tokens among all tokens in order of position."""
        index = 0
        for axis in reversed(splits):
            index = index * axis.size + axis.index
        num_parts = math.prod(axis.size for axis in splits)
        inverse_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))
        places_s = inverse_S.chunk(num_parts)[index]
        return (places_s[:, None] * batch + torch.arange(batch, device=places_s.device)).flatten()

    def _gate_inputs(self, positions_s: Tensor, real_T: Tensor | None, batch: int, run: ForwardPass) -> Known:
        draws_T = None
        if self.spec.gate_facts.draws and run.microbatch is not None:
            first = run.microbatch.first_sample
            samples_B = torch.arange(first, first + batch, device=positions_s.device)
            rows_T = (positions_s[:, None] + samples_B * ROWS_OF_A_SAMPLE).flatten()
            key = stream_key(run.microbatch.seed, run.microbatch.step, f"second expert {self.block}")
            draws_T = uniform(rows_T, key)
        # The host waits for the number of real tokens only if the capacity depends on it.
        has_capacity = self.spec.capacity(1) is not None
        num_real = run.real.num_tokens() if run.real is not None and has_capacity else 0
        return Known(self.state.bias_E, self.state.together_EE, draws_T, real_T, num_real=num_real, streams=run.streams)

    def _losses(
        self,
        logits_TE: Tensor,
        likelihood_TE: Tensor,
        choice: Choice,
        real_T: Tensor | None,
        real: RealTokens | None,
        batch: int,
    ) -> Tensor:
        """This rank's parts of the balance loss and the z-loss, [2]."""
        spec = self.spec
        balance = z = logits_TE.new_zeros(())
        if spec.aux_loss != "none":
            chosen = None if spec.aux_scope == "global" else self._chosen(choice, real, batch)
            if real_T is not None:
                likelihood_TE = likelihood_TE.masked_fill(~real_T[:, None], 0.0)
            likelihood_sBE = likelihood_TE.unflatten(0, (-1, batch))
            balance = balance_loss(likelihood_sBE, chosen, self.state.shares_E, self.sequence, spec=spec)
        if spec.z_coefficient:
            z = z_loss(logits_TE, real_T, self.sequence * batch, spec)
        return torch.stack((balance, z))

    def _chosen(self, choice: Choice, real: RealTokens | None, batch: int) -> Chosen:
        """The number of times that each sample chose each expert, on all ranks. GShard's loss counts only first
        choices."""
        num_choices = 1 if self.spec.aux_loss == "gshard" else choice.experts_TK.shape[1]
        experts_TK, holds_TK = choice.experts_TK[:, :num_choices], choice.holds_TK[:, :num_choices]
        samples_T1 = torch.arange(experts_TK.shape[0], device=experts_TK.device)[:, None] % batch
        numbers_TK = samples_T1 * self.spec.experts + experts_TK
        num_counts = batch * self.spec.experts
        counts = count_each(numbers_TK.masked_fill(~holds_TK, num_counts), num_counts)
        for axis in self._splits():
            all_reduce(counts, axis)
        tokens_B = counts.new_full((batch,), self.sequence) if real is None else real.counts_B
        return Chosen(counts.view(batch, self.spec.experts), tokens_B)


def _choice_of_tokens(choice: Choice, tokens_T: Tensor) -> Choice:
    return Choice(choice.experts_TK[tokens_T], choice.holds_TK[tokens_T], choice.preference_TE[tokens_T])
