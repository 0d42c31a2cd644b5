"""The parameters of a stage of the model, without making any: names, shapes and places, as the runtime has them.

model/ builds the same list with torch, and a test holds the two equal: name, full shape, box, init, and over which
axes a tensor is cut or its gradient summed.
"""

import math
from dataclasses import dataclass

from shardwright.config.model import ModelSpec
from shardwright.config.plan import PlanSpec, split_evenly
from shardwright.sharding.parameter_shard import Place

Regions = dict[str, list[Place]]  # what is computed one after the other, with its parameters in order


def stage_parameters(model: ModelSpec, plan: PlanSpec, stage: int, tp_index: int = 0, ep_index: int = 0) -> Regions:
    """The parameters of one stage on one tensor-parallel rank, by region: "embedding", "0", "1", ..., "head".

    A tied table is listed at both of its uses. Of experts a rank has those of its place on the ep axis.
    """
    counts = plan.stage_layers(model.layers)
    first = sum(counts[:stage])
    cut = _Cut(model, plan, tp_index, ep_index)
    regions: Regions = {}
    if stage == 0:
        regions["embedding"] = cut.embedding()
    for layer in range(first, first + counts[stage]):
        regions[str(layer)] = cut.layer(layer)
    if stage == len(counts) - 1:
        regions["head"] = cut.head()
    return regions


def model_parameters(model: ModelSpec) -> list[Place]:
    """All parameters of the model, each once: a tied table is one."""
    regions = stage_parameters(model, PlanSpec(), 0)
    return list({place.name: place for places in regions.values() for place in places}.values())


def num_parameters(model: ModelSpec) -> int:
    """Parameters of the whole model, a tied table counted once."""
    return sum(place.num_elements for place in model_parameters(model))


def num_active_parameters(model: ModelSpec) -> int:
    """Parameters that compute one token: of the experts, the chosen ones alone (all others are the same for any)."""
    total = num_parameters(model)
    idle = model.moe.experts - model.moe.num_chosen
    experts = [place for place in model_parameters(model) if place.is_expert]
    return total - sum(place.num_elements // model.moe.experts * idle for place in experts)


def residual_std(std: float, layers: int) -> float:
    """Initial deviation of the outputs that are added to the residual stream (Radford et al. 2019, section 2.3)."""
    return std / math.sqrt(2 * layers)


@dataclass(frozen=True)
class _Cut:
    """The model as one tensor-parallel rank sees it."""

    model: ModelSpec
    plan: PlanSpec
    index: int
    ep_index: int

    def embedding(self) -> list[Place]:
        model = self.model
        found = [self._sharded("embedding.weight", (model.vocab, model.hidden), 0, model.init_std)]
        if model.positions == "learned":
            shape = (model.sequence, model.hidden)
            found.append(self._whole("positions.weight", shape, "normal", model.init_std))
        return found

    def layer(self, number: int) -> list[Place]:
        model, name = self.model, f"layers.{number}"
        attention = (self._latent_attention if model.is_latent else self._attention)(f"{name}.attention")
        inner = self._experts(name) if model.moe.has_experts(number) else self._mlp(f"{name}.mlp", model.ffn_size)
        return [*self._norm(f"{name}.attention_norm"), *attention, *self._norm(f"{name}.mlp_norm"), *inner]

    def _mlp(self, name: str, width: int) -> list[Place]:
        return self._pair(name, "up", "down", (2 if self.model.gated_mlp else 1, width), 1, width)

    def _experts(self, layer: str) -> list[Place]:
        """Router, experts and shared experts of a layer."""
        model, name = self.model, f"{layer}.moe"
        moe, hidden, std = model.moe, model.hidden, model.init_std
        found = [self._whole(f"{name}.shared_gate", (1, hidden), "normal", std)] if moe.shared_gate else []
        width = moe.ffn_size(model.ffn_size)
        rising = (moe.experts, 2 if model.gated_mlp else 1, width, hidden)
        found += [
            self._whole(f"{name}.router.weight", (moe.experts, hidden), "normal", std),
            self._of_experts(f"{name}.experts.up", rising, std),
            self._of_experts(f"{name}.experts.down", (moe.experts, hidden, width), residual_std(std, model.layers)),
        ]
        shared = moe.shared_size(model.ffn_size)
        return found + (self._mlp(f"{name}.shared", shared) if shared else [])

    def _of_experts(self, name: str, shape: tuple[int, ...], std: float) -> Place:
        """Matrices [E, ..., F, H] or [E, H, F]: dim 2 is cut over the ranks that share an expert."""
        plan, box = self.plan, [(0, size) for size in shape]
        expert_tp = plan.expert_tp_size
        box[0] = split_evenly(shape[0], plan.ep, self.ep_index)
        box[2] = split_evenly(shape[2], expert_tp, self.index % expert_tp)
        axes = tuple(axis for axis, size in (("ep", plan.ep), ("tp", expert_tp)) if size > 1)
        parts = plan.ep * expert_tp
        return Place(shape, tuple(box), "normal", std, name, sharded_over=axes, is_expert=True, num_parts=parts)

    def _attention(self, name: str) -> list[Place]:
        model = self.model
        groups = (model.num_kv_heads, model.heads // model.num_kv_heads + 2, model.head_size)
        places = self._pair(name, "qkv", "out", groups, 0, model.heads * model.head_size)
        # Each rank norms its own heads.
        for which in ("q_norm", "k_norm") if model.qk_norm else ():
            places += self._norm(f"{name}.{which}", model.head_size, is_partial=True)
        return places

    def _latent_attention(self, name: str) -> list[Place]:
        model, latent = self.model, self.model.latent
        std = model.init_std
        # Without low-rank queries the latent is made from the whole sequence on each rank, for its own heads alone.
        is_partial = latent.q_rank == 0
        down = (latent.q_rank + latent.kv_rank + latent.rope_dim, model.hidden)
        keys_and_values = (model.heads, latent.nope_dim + latent.value_dim, latent.kv_rank)
        queries = (model.heads, model.query_width, latent.q_rank or model.hidden)
        leaving = (model.hidden, model.heads * latent.value_dim)
        return [
            self._whole(f"{name}.down.weight", down, "normal", std, is_partial),
            *(self._norm(f"{name}.q_norm", latent.q_rank) if latent.q_rank else []),
            *self._norm(f"{name}.kv_norm", latent.kv_rank, is_partial),
            self._sharded(f"{name}.q_up.weight", queries, 0, std),
            self._sharded(f"{name}.kv_up.weight", keys_and_values, 0, std),
            self._sharded(f"{name}.out.weight", leaving, 1, residual_std(std, model.layers)),
        ]

    def head(self) -> list[Place]:
        model = self.model
        name = "embedding.weight" if model.tied_embeddings else "head.weight"
        return [*self._norm("norm"), self._sharded(name, (model.vocab, model.hidden), 0, model.init_std)]

    def _pair(self, name: str, enter: str, leave: str, outputs: tuple[int, ...], dim: int, inner: int) -> list[Place]:
        """A column-parallel matrix and the row-parallel one after it, with their biases."""
        model = self.model
        std = residual_std(model.init_std, model.layers)
        matrices = [
            self._sharded(f"{name}.{enter}.weight", (*outputs, model.hidden), dim, model.init_std),
            self._sharded(f"{name}.{leave}.weight", (model.hidden, inner), 1, std),
        ]
        if not model.bias:
            return matrices
        # A layer's own parameters are listed before those of its parts.
        entering = self._sharded(f"{name}.{enter}_bias", outputs, dim, init="zeros")
        return [entering, *matrices, self._whole(f"{name}.{leave}.bias", (model.hidden,), "zeros")]

    def _norm(self, name: str, width: int = 0, is_partial: bool = False) -> list[Place]:
        shape = (width or self.model.hidden,)
        inits = {"weight": "ones"} | ({"bias": "zeros"} if self.model.norm == "layernorm" else {})
        return [self._whole(f"{name}.{key}", shape, init, is_partial=is_partial) for key, init in inits.items()]

    def _whole(self, name: str, shape: tuple[int, ...], init: str, std: float = 0.0, is_partial: bool = False) -> Place:
        """`is_partial`: each tp rank computes a part of the gradient, whether the sequence is sharded or not."""
        box = tuple((0, size) for size in shape)
        summed_over = ("tp",) if (self.plan.sequence_parallel or is_partial) and self.plan.tp > 1 else ()
        return Place(shape, box, init, std, name, summed_over=summed_over)

    def _sharded(self, name: str, shape: tuple[int, ...], dim: int, std: float = 0.0, init: str = "normal") -> Place:
        box = [(0, size) for size in shape]
        box[dim] = split_evenly(shape[dim], self.plan.tp, self.index)
        axes = ("tp",) if self.plan.tp > 1 else ()
        return Place(shape, tuple(box), init, std, name, sharded_over=axes, num_parts=self.plan.tp)
