"""The mixture of experts, in place of an MLP (Shazeer et al. 2017, arXiv 1701.06538).

A router gives each token a few experts; the tokens travel to them and back (parallel/expert/dispatch.py). Shared
experts (Dai et al. 2024, arXiv 2401.06066), an ordinary MLP, compute every token besides.

If tp shards the matrices of each expert, each tp rank sends all tokens of its tp line to its part of the experts; under
sequence parallel the tokens are all-gathered first. The parts of the results are summed over tp at the end, as after a
row-parallel product. If experts are whole, a rank sends only its own tokens.

The tensors that its backward keeps are listed in memory/moe_activations.py; their sizes are in memory/kept_tensors.py
(InnerRouting) and layers/layer_tensors.py (RoutingTensors).

Shape suffixes: s positions on this rank, B batch, H hidden, T tokens, K choices of a token, F inner width of an expert
on this rank, N rows of tokens at the experts of this rank, e experts of this rank, U width of the up product: F, or 2 F
for gate and up.
"""

from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from shardwright.config.model import ModelSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.recompute_policy import KEEP_ALL, Policy
from shardwright.model.activation import activate_and_keep, activate_gated
from shardwright.model.float32_linear import exact_product
from shardwright.model.forward_pass import ForwardPass
from shardwright.model.mlp import MLP
from shardwright.model.router import Router
from shardwright.model.weighed_activation import weighed_activation, weighed_rows
from shardwright.parallel.comm.collectives import all_gather
from shardwright.parallel.comm.regions import copy_to, gather_from, reduce_from, scatter_to
from shardwright.parallel.expert.dispatch import Routing, Trip, start_trip, through_experts
from shardwright.parallel.expert.expert_adapter import ExpertAdapter, expert_adapters
from shardwright.parallel.expert.expert_bias import add_expert_bias
from shardwright.parallel.expert.grouped_linear import grouped_linear
from shardwright.parallel.recompute.region import Chain
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.parallel.tensor.parameter import PlacedParameter, expert_bias, expert_matrix, whole
from shardwright.parallel.tensor.product_input import ProductInput, values_and_recipe
from shardwright.sharding.stage_parameters import residual_std


class Experts(nn.Module):
    """The experts of this rank. Gate and up of all experts are one weight of full shape [E, 2, ffn, H], or
    [E, 1, ffn, H] without a gate; down is [E, H, ffn]. Biases are [E, 2 or 1, ffn] and [E, H]."""

    def __init__(self, spec: ModelSpec, sharding: LayerSharding) -> None:
        super().__init__()
        self.sharding, self.gated, self.activation = sharding, spec.gated_mlp, spec.activation
        self.weighs_input = spec.moe.weigh == "input"
        count, width = spec.moe.experts, spec.moe.ffn_size(spec.ffn_size)
        inner = (2 if spec.gated_mlp else 1, width)
        ep, expert_tp = sharding.ep, sharding.expert_tp
        self.up_bias = expert_bias((count, *inner), 2, ep, expert_tp) if spec.bias else None
        self.up = expert_matrix((count, *inner, spec.hidden), 2, ep, expert_tp, std=spec.init_std)
        self.down_bias = expert_bias((count, spec.hidden), 0, ep, expert_tp) if spec.bias else None
        std = residual_std(spec.init_std, spec.layers)
        self.down = expert_matrix((count, spec.hidden, width), 2, ep, expert_tp, std=std)
        matrices = shape_of(spec).routed_matrices
        self.adapter = expert_adapters(spec.adapter, matrices, sharding) if spec.is_adapted else None

    def forward(self, x_NH: Tensor, weight_N1: Tensor, counts_e: Tensor, policy: Policy) -> Tensor:
        """[N, H], sorted by expert, to [N, H], each row times its weight: with expert_tp this rank's part of a sum.

        W_down (weight x act) equals weight x W_down act, so the weight's gradient needs only tensors that are kept
        anyway. If the weight multiplies the input, the product is always recomputed: it would be kept besides x.
        """

        def product(name: str, x: ProductInput) -> Tensor:
            weight, adapter = self.get_parameter(name), self._adapter_of(name)
            assert isinstance(weight, PlacedParameter)
            read = x if adapter is None else values_and_recipe(x)[0]  # the adapter keeps it: the weight is frozen
            y = grouped_linear(read, weight, counts_e, self.sharding.deferred, kind=self.sharding.ep.kind)
            return y if adapter is None else adapter.add_to(y, x, counts_e)

        def up(x: ProductInput) -> Tensor:
            y_NU = product("up", x)
            return y_NU if self.up_bias is None else add_expert_bias(y_NU, self.up_bias, counts_e)

        def down(x: ProductInput) -> Tensor:
            y_NH = product("down", x)
            if self.down_bias is None:
                return y_NH
            weight = None if self.weighs_input else weight_N1
            return add_expert_bias(y_NH, self.down_bias, counts_e, weight, adds=self.sharding.expert_tp.index == 0)

        if self.weighs_input:
            chain = Chain(x_NH, policy | {"weigh"}).then("weigh", weighed_rows, weight_N1)
            return chain.product("up", up).then("activation", self._activate).into(down)
        return Chain(x_NH, policy).product("up", up).then("activation", self._weigh, weight_N1).into(down)

    def _adapter_of(self, matrix: str) -> ExpertAdapter | None:
        """The adapters of a matrix of the experts, if it has some."""
        adapter = self.adapter[matrix] if self.adapter is not None and matrix in self.adapter else None
        assert adapter is None or isinstance(adapter, ExpertAdapter)
        return adapter

    def _weigh(self, up_NU: Tensor, weight_N1: Tensor) -> Tensor:
        return weighed_activation(up_NU, weight_N1, self.activation, self.gated)

    def _activate(self, up_NU: Tensor) -> Tensor:
        return (activate_gated if self.gated else activate_and_keep)(up_NU, self.activation)


class MixtureOfExperts(nn.Module):
    """Router, experts, and shared experts if there are any."""

    def __init__(self, spec: ModelSpec, block: str, sharding: LayerSharding) -> None:
        super().__init__()
        self.sharding, self.num_experts = sharding, spec.moe.experts
        self.router = Router(spec, block, sharding)
        self.experts = Experts(spec, sharding)
        shared = spec.moe.shared_size(spec.ffn_size)
        # The router keeps their input too.
        self.shared = MLP(spec, sharding, shared, owns_input=False) if shared else None
        has_gate = spec.moe.shared_gate
        self.shared_gate = whole((1, spec.hidden), "normal", spec.init_std, sharding.summed_over) if has_gate else None

    def forward(self, x_sBH: Tensor, run: ForwardPass, policy: Policy = KEEP_ALL) -> Tensor:
        """[s, B, H] to [s, B, H]. Only "up" and "activation" of `policy` have an effect, the operators of experts."""
        x_TH, trip = self._enter(x_sBH, self.router(x_sBH, run))
        # Computed while the counts travel to the host.
        shared_sBH = self._shared(x_sBH, policy)
        y_sBH = self._routed(x_TH, trip, policy).view_as(x_sBH)
        return y_sBH if shared_sBH is None else y_sBH + shared_sBH

    def _shared(self, x_sBH: Tensor, policy: Policy) -> Tensor | None:
        """The result of shared experts for every token, [s, B, H]."""
        if self.shared is None:
            return None
        shared_sBH = self.shared.end_chain(Chain(x_sBH, policy))
        if self.shared_gate is not None:
            gate_T1 = exact_product(
                x_sBH.flatten(0, 1), self.shared_gate, self.sharding.deferred, self.sharding.tp.kind
            ).sigmoid()
            shared_sBH = shared_sBH * gate_T1.to(x_sBH.dtype).view(*x_sBH.shape[:2], 1)
        return shared_sBH

    def _enter(self, x_sBH: Tensor, routing: Routing) -> tuple[Tensor, Trip]:
        """The tokens that this rank sends to experts, [T, H], and their started trip."""
        x_TH, expert_tp = x_sBH.flatten(0, 1), self.sharding.expert_tp
        if expert_tp.size > 1:
            gathers = self.sharding.shards_sequence
            enter = gather_from if gathers else copy_to
            x_TH = enter(x_TH, expert_tp)
            experts_TK = all_gather(routing.experts_TK, expert_tp) if gathers else routing.experts_TK
            routing = replace(routing, experts_TK=experts_TK, weights_TK=enter(routing.weights_TK, expert_tp))
        return x_TH, start_trip(routing, self.num_experts, self.sharding.ep)

    def _routed(self, x_TH: Tensor, trip: Trip, policy: Policy) -> Tensor:
        """The result of the routed experts for this rank's own tokens."""
        y_TH = through_experts(
            x_TH, trip, partial(self.experts, policy=policy), in_float8=self.sharding.float8_dispatch
        )
        leave = scatter_to if self.sharding.shards_sequence and self.sharding.expert_tp.size > 1 else reduce_from
        return leave(y_TH, self.sharding.expert_tp)
