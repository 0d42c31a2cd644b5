"""The parameters of a stage of the model, without tensors: names, shapes and places, as the runtime has them.

Full shapes of matrices are those of config/model_shape.py. model/ builds the same list with torch, and a test holds the
two equal: name, full shape, box, init, and the axes over which a tensor is cut or its gradient summed.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from shardwright.config.adapter import AdapterSpec
from shardwright.config.kept_results import kept_by_identity
from shardwright.config.matrix import Matrix
from shardwright.config.model import ModelSpec
from shardwright.config.model_shape import ModelShape, shape_of
from shardwright.config.plan import PlanSpec, split_evenly
from shardwright.sharding.adapter_shapes import down_shape, down_std, up_shape
from shardwright.sharding.parameter_shard import ParameterShard

_MATRICES = (
    *("attention.qkv.weight", "attention.out.weight", "mlp.up.weight", "mlp.down.weight"),
    *("moe.shared.up.weight", "moe.shared.down.weight", "moe.experts.up", "moe.experts.down"),
)
Regions = dict[str, list[ParameterShard]]  # the parameters of each region, both in the order of the computation


def stage_parameters(model: ModelSpec, plan: PlanSpec, stage: int, tp_index: int = 0, ep_index: int = 0) -> Regions:
    """The parameters of one stage on one tensor-parallel rank, by region: "embedding", "0", "1", ..., "head". A norm of
    the embeddings is a region of its own, because its backward needs its weight.

    The modules that predict further tokens stand before the head, under the numbers of their blocks. A table that the
    last stage uses too is listed at both of its uses. A rank has the experts of its place on the ep axis.
    """
    counts = plan.stage_layers(model.layers)
    first_layer = sum(counts[:stage])
    shards = _Cut(model, shape_of(model), plan, tp_index, ep_index)
    regions: Regions = {}
    if stage == 0:
        regions["embedding"] = shards.embedding()
        if norm := shards.embedding_norm():
            regions["embedding_norm"] = norm
    for layer in range(first_layer, first_layer + counts[stage]):
        regions[str(layer)] = shards.layer(layer)
    if stage == len(counts) - 1:
        for number in range(model.layers, model.num_blocks):
            regions[str(number)] = shards.further(number)
        regions["head"] = shards.head()
    if model.is_adapted:
        regions = {
            name: [beside_adapters(place, model.adapter) for place in places] for name, places in regions.items()
        }
    return regions


def alike_stages(model: ModelSpec, plan: PlanSpec) -> list[int]:
    """For each stage the first one that has the same parameters but for their names: the first and the last stage are
    like no other, those between them like others with layers of the same kinds."""
    counts, is_dense = plan.stage_layers(model.layers), shape_of(model).is_dense
    ends, first_layers = (0, len(counts) - 1), accumulate(counts, initial=0)
    first_stages: dict[Hashable, int] = {}
    return [
        first_stages.setdefault(stage if stage in ends else tuple(map(is_dense, range(first, first + count))), stage)
        for stage, (first, count) in enumerate(zip(first_layers, counts, strict=False))
    ]


def is_of_adapter(name: str) -> bool:
    """True if a parameter of this name is of an adapter."""
    return ".adapter." in name


def beside_adapters(place: ParameterShard, adapter: AdapterSpec) -> ParameterShard:
    """The place of a parameter of a model with adapters: all others are frozen, and the matrices of layers among them
    may be stored in NF4."""
    if is_of_adapter(place.name):
        return place
    is_stored = place.name.startswith("layers.") and place.name.endswith(_MATRICES)
    return replace(place, is_frozen=True, row_format=adapter.row_format if is_stored else "")


def last_uses(model: ModelSpec) -> list[str]:
    """The regions of the last stage that use the table of embeddings. The parameters of the first region list it."""
    further = [str(number) for number in range(model.layers, model.num_blocks)]
    return ["head", *further] if model.tied_embeddings else further


@partial(kept_by_identity, most=2)  # a prediction asks for them several times, and large models have many
def model_parameters(model: ModelSpec) -> tuple[ParameterShard, ...]:
    """All parameters of the model, each once: a tied table is one parameter."""
    regions = stage_parameters(model, PlanSpec(), 0)
    return tuple({place.name: place for places in regions.values() for place in places}.values())


@partial(kept_by_identity, most=512)  # as many as the catalog may have
def num_parameters(model: ModelSpec) -> int:
    """Parameters of the whole model, a tied table counted once."""
    return sum(place.num_elements for place in model_parameters(model))


@partial(kept_by_identity, most=512)
def num_trained_parameters(model: ModelSpec) -> int:
    """Number of parameters that training changes: all, or those of adapters alone."""
    return sum(place.num_elements for place in model_parameters(model) if not place.is_frozen)


def num_active_parameters(model: ModelSpec) -> int:
    """Number of parameters that compute one token: of the experts, only the chosen ones; all the others in full."""
    total = num_parameters(model)
    idle = model.moe.experts - model.moe.num_chosen
    experts = [place for place in model_parameters(model) if place.is_expert]
    return total - sum(place.num_elements // model.moe.experts * idle for place in experts)


def block_name(model: ModelSpec, number: int) -> str:
    """The name of a block in the names of parameters and random numbers: the layers first, and then the modules that
    predict further tokens."""
    return f"layers.{number}" if number < model.layers else f"mtp.{number - model.layers}.block"


def residual_std(std: float, layers: int) -> float:
    """Initial deviation of the outputs that are added to the residual stream (Radford et al. 2019, section 2.3)."""
    return std / math.sqrt(2 * layers)


@dataclass(frozen=True)
class _Cut:
    """The model as one tensor-parallel rank sees it."""

    model: ModelSpec
    shape: ModelShape
    plan: PlanSpec
    index: int
    ep_index: int

    def embedding(self) -> list[ParameterShard]:
        model = self.model
        parameters = [self._vocabulary("embedding.weight")]
        if model.positions == "learned":
            shape = (model.position_offset + model.sequence, model.hidden)
            parameters.append(self._whole("positions.weight", shape, "normal", model.init_std))
        return parameters

    def embedding_norm(self) -> list[ParameterShard]:
        """The norm of the input of the first layer."""
        return self._norm("embedding_norm") if self.model.embedding_norm else []

    def further(self, number: int) -> list[ParameterShard]:
        """A module that predicts a further token, without its norm before the head. The first one lists the table."""
        model, name = self.model, f"mtp.{number - self.model.layers}"
        lists_table = number == model.layers and not model.tied_embeddings
        matrix = self.shape.further_matrix
        return [
            *([self._vocabulary("embedding.weight")] if lists_table else []),
            *self._norm(f"{name}.hidden_norm"),
            *self._norm(f"{name}.embedding_norm"),
            self._weight(f"{name}.{matrix.name}.weight", matrix),
            *self.layer(number),
        ]

    def layer(self, number: int) -> list[ParameterShard]:
        model, name = self.model, block_name(self.model, number)
        attention = (self._latent_attention if model.is_latent else self._attention)(f"{name}.attention")
        is_dense, mlp = self.shape.is_dense(number), self.shape.mlp_matrices
        inner = self._pair(f"{name}.mlp", mlp, model.has_mlp_bias) if is_dense else self._experts(f"{name}.moe")
        norms = {which: self._norm(f"{name}.{which}") for which in self.shape.block_norms}
        attention_norms, mlp_norms = (
            [norms.get(f"{half}_{which}", []) for which in ("norm", "out_norm")] for half in ("attention", "mlp")
        )
        return [*attention_norms[0], *attention, *attention_norms[1], *mlp_norms[0], *inner, *mlp_norms[1]]

    def _experts(self, name: str) -> list[ParameterShard]:
        """Router, experts and shared experts of a layer."""
        router, *gate = self.shape.gate_matrices
        # A layer's own parameters are listed before those of its parts.
        parameters = [self._weight(f"{name}.shared_gate", matrix) for matrix in gate]
        parameters.append(self._weight(f"{name}.router.weight", router))
        if self.model.moe.router_bias:
            parameters.append(self._whole(f"{name}.router.bias", router.outputs, "zeros"))
        for matrix in self.shape.routed_matrices:
            parameters += [self._bias_of_experts(f"{name}.experts", matrix)] if self.model.bias else []
            parameters.append(self._of_experts(f"{name}.experts", matrix))
        for matrix in self.shape.routed_matrices:
            parameters += self._expert_adapters(f"{name}.experts.adapter.{matrix.name}", matrix)
        if self.shape.mixture.shared_ffn:
            parameters += self._pair(f"{name}.shared", self.shape.shared_matrices, self.model.bias)
        return parameters

    def _of_experts(self, name: str, matrix: Matrix) -> ParameterShard:
        """The matrices of experts, cut over ep by expert, and each over the ranks that share an expert."""
        dim, std = 1 + (matrix.sharded_dim or 0), self._std(matrix)
        return self._experts_parts(f"{name}.{matrix.name}", matrix.full_shape, dim, "normal", std)

    def _bias_of_experts(self, name: str, matrix: Matrix) -> ParameterShard:
        """The biases of experts' matrices. If ranks share the inputs of a matrix, each rank has all of its bias."""
        dim = 0 if matrix.is_row_parallel else 1 + (matrix.sharded_dim or 0)
        return self._experts_parts(f"{name}.{matrix.name}_bias", matrix.full_shape[:-1], dim, "zeros")

    def _experts_parts(
        self, name: str, shape: tuple[int, ...], dim: int, init: str, std: float = 0.0
    ) -> ParameterShard:
        """A rank's part of a tensor that stacks the experts' weights: cut over ep, and in `dim`, if that is not 0, over
        the ranks that share an expert."""
        plan, box = self.plan, [(0, size) for size in shape]
        expert_tp = plan.expert_tp_size if dim else 1
        box[dim] = split_evenly(shape[dim], expert_tp, self.index % expert_tp)
        box[0] = split_evenly(shape[0], plan.ep, self.ep_index)
        axes = tuple(axis for axis, size in (("ep", plan.ep), ("tp", expert_tp)) if size > 1)
        return ParameterShard(
            shape, tuple(box), init, std, name, sharded_over=axes, is_expert=True, num_parts=plan.ep * expert_tp
        )

    def _attention(self, name: str) -> list[ParameterShard]:
        model, (qkv, _) = self.model, self.shape.attention_matrices
        places = self._pair(name, self.shape.attention_matrices, model.has_attention_bias)
        if model.qkv_bias:
            places = [self._sharded(f"{name}.qkv_bias", qkv.outputs, 0, init="zeros"), *places]
        if model.sinks:
            # A layer's own parameters are listed before those of its parts.
            shape = (model.num_kv_heads, model.heads // model.num_kv_heads)
            position = int(model.has_attention_bias or model.qkv_bias)
            places.insert(position, self._sharded(f"{name}.sinks", shape, 0, init="zeros"))
        if model.qk_norm == "full":
            groups, queries = model.num_kv_heads, model.heads // model.num_kv_heads
            for which, heads in (("q_norm", queries), ("k_norm", 1)):
                places.append(self._sharded(f"{name}.{which}.weight", (groups, heads, model.head_size), 0, init="ones"))
        # Each rank norms its own heads.
        for which in ("q_norm", "k_norm") if model.norms_heads else ():
            places += self._norm(f"{name}.{which}", model.head_size, is_partial=True)
        return places

    def _latent_attention(self, name: str) -> list[ParameterShard]:
        latent = self.model.latent
        # Without low-rank queries each rank computes the latent from the whole sequence, only for its own heads.
        is_partial = latent.q_rank == 0
        down_matrix, *other_matrices = self.shape.attention_matrices
        return [
            self._weight(f"{name}.down.weight", down_matrix, is_partial),
            *(self._norm(f"{name}.q_norm", latent.q_rank) if latent.q_rank else []),
            *self._norm(f"{name}.kv_norm", latent.kv_rank, is_partial),
            *(self._weight(f"{name}.{matrix.name}.weight", matrix) for matrix in other_matrices),
        ]

    def head(self) -> list[ParameterShard]:
        model = self.model
        name = "embedding.weight" if model.tied_embeddings else "head.weight"
        further = (place for index in range(model.mtp_layers) for place in self._norm(f"mtp.{index}.norm"))
        bias = [self._sharded("head.bias", (model.vocab,), 0, init="zeros")] if model.head_bias else []
        return [*self._norm("norm"), self._vocabulary(name), *bias, *further]

    def _vocabulary(self, name: str) -> ParameterShard:
        model = self.model
        place = self._sharded(name, (model.vocab, model.hidden), 0, model.init_std)
        return replace(place, is_tied=model.shares_table and name == "embedding.weight")

    def _pair(self, name: str, pair: Sequence[Matrix], has_bias: bool) -> list[ParameterShard]:
        """A column-parallel matrix and the row-parallel matrix after it, with their biases if they have some."""
        enter, leave = pair
        weights = [self._weight(f"{name}.{matrix.name}.weight", matrix) for matrix in pair]
        entering, leaving = (self._adapters(f"{name}.{matrix.name}.adapter", matrix) for matrix in pair)
        if not has_bias:
            return [weights[0], *entering, weights[1], *leaving]
        # A layer's own parameters are listed before those of its parts.
        entering_bias = self._sharded(f"{name}.{enter.name}_bias", enter.outputs, enter.sharded_dim or 0, init="zeros")
        leaving_bias = self._whole(f"{name}.{leave.name}.bias", leave.outputs, "zeros")
        return [entering_bias, weights[0], *entering, weights[1], leaving_bias, *leaving]

    def _adapters(self, name: str, matrix: Matrix) -> list[ParameterShard]:
        """The adapters of a matrix: A of all its maps, then a B for each."""
        spec = self.model.adapter
        if not (targets := spec.targets_of(matrix)):
            return []
        shape, std = down_shape(spec, matrix), down_std(matrix)
        ups = [(f"{name}.b_{target}", up_shape(spec, matrix, target)) for target in targets]
        if matrix.is_row_parallel:
            down = self._sharded(f"{name}.a", shape, 2, std)
            return [down, *(self._whole(up, up_outputs, "normal", is_partial=True) for up, up_outputs in ups)]
        down = self._whole(f"{name}.a", shape, "normal", std)
        return [down, *(self._sharded(up, up_outputs, matrix.sharded_dim or 0) for up, up_outputs in ups)]

    def _expert_adapters(self, name: str, matrix: Matrix) -> list[ParameterShard]:
        """The adapters of a matrix of each expert: A of all its maps, then a B for each."""
        spec, is_row = self.model.adapter, matrix.is_row_parallel
        if not (targets := spec.targets_of(matrix)):
            return []
        dims = (3, 0) if is_row else (0, 1 + (matrix.sharded_dim or 0))
        std = down_std(matrix)
        down = self._experts_parts(f"{name}.a", down_shape(spec, matrix), dims[0], "normal", std)
        ups = [
            self._experts_parts(f"{name}.b_{target}", up_shape(spec, matrix, target), dims[1], "normal")
            for target in targets
        ]
        # Ranks that share an expert each compute a part of the gradient of what they have whole.
        summed_over = ("tp",) if self.plan.expert_tp_size > 1 else ()
        if is_row:
            return [down, *(replace(up, summed_over=summed_over) for up in ups)]
        return [replace(down, summed_over=summed_over), *ups]

    def _weight(self, name: str, matrix: Matrix, is_partial: bool = False) -> ParameterShard:
        if matrix.sharded_dim is None:
            return self._whole(name, matrix.full_shape, "normal", self._std(matrix), is_partial)
        return self._sharded(name, matrix.full_shape, matrix.sharded_dim, self._std(matrix))

    def _std(self, matrix: Matrix) -> float:
        std = self.model.init_std
        return residual_std(std, self.model.layers) if matrix.is_row_parallel else std

    @property
    def _norms_have_biases(self) -> bool:
        return self.model.norm == "layernorm" and self.model.norm_bias

    def _norm(self, name: str, width: int = 0, is_partial: bool = False) -> list[ParameterShard]:
        if not self.model.norm_weight:
            return []
        shape = (width or self.model.hidden,)
        inits = {"weight": "ones"} | ({"bias": "zeros"} if self._norms_have_biases else {})
        return [self._whole(f"{name}.{key}", shape, init, is_partial=is_partial) for key, init in inits.items()]

    def _whole(
        self, name: str, shape: tuple[int, ...], init: str, std: float = 0.0, is_partial: bool = False
    ) -> ParameterShard:
        """A parameter that every rank has whole. `is_partial` if each tp rank computes a part of the gradient, with a
        sharded sequence or without."""
        box = tuple((0, size) for size in shape)
        summed_over = ("tp",) if (self.plan.sequence_parallel or is_partial) and self.plan.tp > 1 else ()
        return ParameterShard(shape, box, init, std, name, summed_over=summed_over)

    def _sharded(
        self, name: str, shape: tuple[int, ...], dim: int, std: float = 0.0, init: str = "normal"
    ) -> ParameterShard:
        box = [(0, size) for size in shape]
        box[dim] = split_evenly(shape[dim], self.plan.tp, self.index)
        axes = ("tp",) if self.plan.tp > 1 else ()
        return ParameterShard(shape, tuple(box), init, std, name, sharded_over=axes, num_parts=self.plan.tp)
