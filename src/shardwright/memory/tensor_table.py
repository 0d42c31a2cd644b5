"""The layout table: every parameter and activation of an embedding, a layer and a head, and its gradient.

Parameters are those of sharding/stage_parameters.py: the boxes of two neighbours on an axis show the dim that the axis
cuts. An activation is declared once, by its dims. Rules that hold for every model give the axes that cut it:

- batch is cut over dp, the sequence over cp; between the products of a layer the sequence over tp too, if sequence
  parallel is on;
- the result of a column-parallel product is cut over tp along its heads, its inner width or its vocabulary;
- the result of a row-parallel product is a partial sum over tp, until a collective has summed it;
- a gradient is cut like its tensor. If a replicated tensor enters each rank's own part of a product, each rank computes
  a part of the gradient; for a partial sum, each rank has all of it. These are f and g of Shoeybi et al. 2019 (arXiv
  1909.08053, section 3).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.config.job import JobSpec
from shardwright.config.model_shape import ModelShape, shape_of
from shardwright.layers.layer_tensors import (
    ATTENTION,
    BLOCK,
    ENDS,
    EXPERT_MLP,
    LATENT,
    MLP,
    ROUTING,
    SHARED_MLP,
    GatheredTensor,
    LayerTensor,
    MlpTensors,
    PartialSum,
    ShardedTensor,
)
from shardwright.memory.rank_state import Replicas, replicas_of
from shardwright.sharding.mesh import expert_axis_sizes
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.sharding.placements import BUFFER, Placements, TensorLayout, placements
from shardwright.sharding.stage_parameters import is_of_adapter, stage_parameters


@dataclass(frozen=True)
class RegionLayout:
    """A piece of the model that is computed at once: "embedding", "embedding_norm", "layer", "layer with experts",
    "further token" or "head". `stage` is the stage of the first such piece."""

    name: str
    stage: int
    parameters: tuple[TensorLayout, ...]
    activations: tuple[TensorLayout, ...]


def layouts(job: JobSpec) -> list[RegionLayout]:
    """One layout for each kind of piece, in the order of the model. Activations are of one microbatch of all
    replicas."""
    plan, model = job.plan, job.model
    replicas = {is_expert: replicas_of(plan, is_expert) for is_expert in (False, True)}
    regions: dict[str, RegionLayout] = {}
    for stage in range(plan.num_stages):
        boxes = [stage_parameters(model, plan, stage, *indices) for indices in ((0, 0), (min(1, plan.tp - 1), 0))]
        boxes.append(stage_parameters(model, plan, stage, 0, min(1, plan.ep - 1)))
        for region, places in boxes[0].items():
            kind = _kind(job, region)
            if kind in regions:
                continue
            tensors = [
                _parameter(job, place, boxes[1][region][index], boxes[2][region][index], replicas[place.is_expert])
                for index, place in enumerate(places)
            ]
            regions[kind] = RegionLayout(kind, stage, tuple(tensors), tuple(_activations(job, kind)))
    return list(regions.values())


def _kind(job: JobSpec, region: str) -> str:
    if not region.isdigit():
        return region
    if int(region) >= job.model.layers:
        return "further token"
    return "layer with experts" if job.model.has_experts(int(region)) else "layer"


# Parameters.


def _parameter(
    job: JobSpec, place: ParameterShard, tp_next: ParameterShard, ep_next: ParameterShard, replicas: Replicas
) -> TensorLayout:
    """The layout of a parameter. `tp_next` and `ep_next` are the same parameter on the next rank of these axes."""
    plan = job.plan
    tensor = {"ep": plan.ep, "etp": plan.expert_tp_size} if place.is_expert else {"tp": plan.tp}
    dim_of: dict[str, int] = {}
    for axis, neighbour in (("etp" if place.is_expert else "tp", tp_next), ("ep", ep_next)):
        cut_dims = [dim for dim, box in enumerate(place.box) if box != neighbour.box[dim]]
        if cut_dims and tensor.get(axis, 1) > 1:
            (dim_of[axis],) = cut_dims
    sharing = {replicas.shards_axis: replicas.num_ranks}
    if replicas.num_copies > 1:
        sharing[replicas.copies_axis] = replicas.num_copies
    axes = sharing | tensor
    unsharded = placements(axes, dim_of)
    sharded = placements(axes, dim_of | {replicas.shards_axis: BUFFER})
    sums = (*sharing, *place.summed_over)
    states = {"in use": unsharded, "between uses": sharded if replicas.zero == 3 else unsharded}
    if not place.is_frozen:
        states |= {
            "gradient": placements(axes, dim_of, sums),
            "summed gradient": sharded if replicas.zero else unsharded,
            "optimizer": sharded if replicas.zero else unsharded,
        }
    dims = _parameter_dims(place)
    is_within = place.name.startswith(("layers.", "mtp."))
    name = place.name.split(".", 2)[2] if is_within else place.name
    return TensorLayout(name, dims, place.full_shape, states)


def _parameter_dims(place: ParameterShard) -> tuple[str, ...]:
    """The names of a parameter's dims, derived from the last two parts of its name."""
    name = place.name.removesuffix(".weight")
    last_part = name.rsplit(".", 1)[-1]
    dims_of = {
        "embedding": ("vocabulary", "hidden"), "head": ("vocabulary", "hidden"), "positions": ("sequence", "hidden"),
        "qkv": ("key heads", "queries + 2", "head", "hidden"), "qkv_bias": ("key heads", "queries + 2", "head"),
        "out": ("hidden", "heads"), "down": ("hidden", "inner"), "up_bias": ("gate, up", "inner"),
        "router": ("experts", "hidden"), "shared_gate": ("one", "hidden"), "q_up": ("heads", "head", "latent"),
        "kv_up": ("heads", "key and value", "latent"), "project": ("hidden", "embedding and hidden"),
        "sinks": ("key heads", "queries"),
    }  # fmt: skip
    if is_of_adapter(place.name):
        outputs = {4: ("key heads", "members", "head"), 3: ("map", "inner"), 2: ("hidden",)}
        experts = ("experts",) if place.is_expert else ()
        num_dims = len(place.full_shape) - len(experts)
        return (*experts, *(("maps", "rank", "inputs") if last_part == "a" else (*outputs[num_dims], "rank")))
    if place.is_expert:
        dims = ("gate, up", "inner", "hidden") if last_part.startswith("up") else ("hidden", "inner")
        return ("experts", *(dims[:-1] if last_part.endswith("_bias") else dims))
    if name.endswith("attention.down"):
        return "latents", "hidden"
    if last_part == "up":
        return "gate, up", "inner", "hidden"
    if last_part == "bias" or name.endswith("norm"):
        return ("key heads", "queries", "head")[: len(place.full_shape)] if len(place.full_shape) > 1 else ("width",)
    return dims_of[last_part]


# Activations.


def _activations(job: JobSpec, kind: str) -> Iterator[TensorLayout]:
    activations = _Activations(job)
    match kind:
        case "embedding":
            yield from activations.embedding()
        case "embedding_norm":
            yield activations.stream(ENDS.embedded)
        case "head":
            yield from activations.head()
        case _:
            is_further = kind == "further token"
            yield from activations.before_block() if is_further else ()
            yield from activations.latent() if job.model.is_latent else activations.attention()
            has_experts = job.model.has_experts(job.model.layers) if is_further else kind == "layer with experts"
            yield from activations.experts() if has_experts else activations.mlp()


@dataclass(frozen=True)
class _Activations:
    """The activations of one job, by the rules of this file."""

    job: JobSpec

    @property
    def _axes(self) -> dict[str, int]:
        plan = self.job.plan
        return {"dp": plan.dp, "cp": plan.cp, "tp": plan.tp}

    @property
    def _is_sharded(self) -> bool:
        """True if tp cuts the sequence between products."""
        return self.job.plan.sequence_parallel and self.job.plan.tp > 1

    def _tensor(
        self,
        tensor: LayerTensor,
        dims: dict[str, int],
        tp: str = "",
        heads_of_cp: str = "",
        feeds_parts: bool = False,
    ) -> TensorLayout:
        """The layout of an activation. `dims`: full sizes by name. `tp`: the dim that tp cuts; a ShardedTensor is cut
        along the sequence. `heads_of_cp`: the dim that cp cuts instead of the sequence. `feeds_parts`: replicated over
        tp, and each rank uses it for its part of a product, as it does with a GatheredTensor."""
        names = list(dims)
        dim_of = {"dp": names.index("batch"), "cp": names.index(heads_of_cp or "sequence")}
        feeds_parts = feeds_parts or isinstance(tensor, GatheredTensor)
        if tp or (isinstance(tensor, ShardedTensor) and not feeds_parts and self._is_sharded):
            dim_of["tp"] = names.index(tp or "sequence")
        states = {
            "value": placements(self._axes, dim_of, ("tp",) if isinstance(tensor, PartialSum) else ()),
            "gradient": placements(self._axes, dim_of, ("tp",) if feeds_parts else ()),
        }
        return TensorLayout(tensor.label, tuple(names), tuple(dims.values()), states)

    def _sizes(self, **further_dims: int) -> dict[str, int]:
        """Sizes of sequence and batch, and of further dims by their names."""
        plan = self.job.plan
        sizes = {"sequence": self.job.model.sequence, "batch": plan.dp * plan.microbatch_size}
        return sizes | {name.replace("_", " "): size for name, size in further_dims.items()}

    def stream(self, tensor: ShardedTensor) -> TensorLayout:
        """The residual stream, or a tensor with the same layout."""
        return self._tensor(tensor, self._sizes(hidden=self.job.model.hidden))

    @property
    def _shape(self) -> ModelShape:
        return shape_of(self.job.model)

    def _taken(self, norm_out: ShardedTensor, source: ShardedTensor) -> Iterator[TensorLayout]:
        """The tensors of a half of a layer from `source` to the input of its product, with a norm between if there is
        one."""
        if self._shape.norms_before:
            yield from self._entering(norm_out)
        elif self.job.plan.tp > 1:
            yield self._at_product(source, self._sizes(hidden=self.job.model.hidden))

    def _given(self, output: ShardedTensor, norm_out: ShardedTensor) -> Iterator[TensorLayout]:
        """The summed result of a half of a layer and its norm, if there is one."""
        if self._shape.norms_after:
            yield self.stream(output)
            yield self.stream(norm_out)

    def _entering(self, tensor: ShardedTensor, width: int = 0) -> Iterator[TensorLayout]:
        """The input of a column-parallel product: as it is between products, and unsharded for the ranks of tp.

        Between the two is f of Megatron-LM: forward nothing or a gather, backward a sum or a scatter of gradients.
        """
        dims = self._sizes(**({"latents": width} if width else {"hidden": self.job.model.hidden}))
        yield self._tensor(tensor, dims)
        if self.job.plan.tp > 1:
            yield self._at_product(tensor, dims)

    def _at_product(self, tensor: ShardedTensor, dims: dict[str, int]) -> TensorLayout:
        """The input of a column-parallel product, unsharded on each rank of tp."""
        return self._tensor(tensor.gathered, dims)

    def _leaving(self, tensor: PartialSum) -> TensorLayout:
        """The result of a row-parallel product before its sum."""
        return self._tensor(tensor, self._sizes(hidden=self.job.model.hidden))

    def embedding(self) -> Iterator[TensorLayout]:
        yield self._leaving(ENDS.looked_up)
        yield self.stream(BLOCK.input)

    def before_block(self) -> Iterator[TensorLayout]:
        """The tensors before the block of a further token: model/mtp.py."""
        yield self._leaving(ENDS.looked_up)
        yield self.stream(ENDS.embedded)
        joined = self._sizes(embedding_and_hidden=2 * self.job.model.hidden)
        yield self._tensor(ENDS.joined, joined)

    def attention(self) -> Iterator[TensorLayout]:
        """Attention with grouped queries: model/attention.py."""
        model, plan = self.job.model, self.job.plan
        yield self.stream(BLOCK.input)
        yield from self._taken(BLOCK.attention_norm_out, BLOCK.input)
        groups = {"key_heads": model.num_kv_heads, "queries_+_2": model.heads // model.num_kv_heads + 2}
        yield self._tensor(ATTENTION.qkv, self._sizes(**groups, head=model.head_size), tp="key heads")
        if plan.trades_heads:
            heads = self._sizes(heads=model.heads, head=model.head_size)
            yield self._tensor(ATTENTION.traded_query, heads, tp="heads", heads_of_cp="heads")
        yield self._tensor(ATTENTION.attended, self._sizes(heads=model.heads * model.head_size), tp="heads")
        yield self._leaving(ATTENTION.product_out)
        if self._shape.parallel == "none":
            yield from self._given(BLOCK.attention_out, BLOCK.attention_out_norm_out)
            yield self.stream(BLOCK.middle)

    def latent(self) -> Iterator[TensorLayout]:
        """Multi-head latent attention: model/latent_attention.py."""
        model, latent = self.job.model, self.job.model.latent
        width = latent.q_rank + latent.kv_rank + latent.rope_dim
        yield self.stream(BLOCK.input)
        if latent.q_rank:
            yield from [self.stream(BLOCK.attention_norm_out)] if self._shape.norms_before else []
            yield from self._entering(LATENT.latents, width)
        else:
            yield from self._taken(BLOCK.attention_norm_out, BLOCK.input)
            yield self._tensor(LATENT.latents, self._sizes(latents=width), feeds_parts=True)
        yield self._tensor(LATENT.query, self._sizes(heads=model.heads, head=model.query_width), tp="heads")
        width_of_key_and_value = latent.nope_dim + latent.value_dim
        yield self._tensor(
            LATENT.key_and_value, self._sizes(heads=model.heads, head=width_of_key_and_value), tp="heads"
        )
        yield self._tensor(ATTENTION.attended, self._sizes(heads=model.heads * model.value_width), tp="heads")
        yield self._leaving(ATTENTION.product_out)
        yield from self._given(BLOCK.attention_out, BLOCK.attention_out_norm_out)
        yield self.stream(BLOCK.middle)

    def mlp(self) -> Iterator[TensorLayout]:
        """The second half of a dense layer (model/mlp.py)."""
        if self._shape.parallel != "one-norm":
            yield from self._taken(BLOCK.mlp_norm_out, BLOCK.middle)
        yield from self._products(MLP, self.job.model.ffn_size)
        yield from self._given(BLOCK.mlp_out, BLOCK.mlp_out_norm_out)
        yield self.stream(BLOCK.output)

    def _products(self, mlp: MlpTensors, inner: int) -> Iterator[TensorLayout]:
        """An MLP that all tokens meet: up, activation, down."""
        up = self._sizes(**{"gate,_up": self._shape.gates}, inner=inner)
        yield self._tensor(mlp.up, up, tp="inner")
        yield self._tensor(mlp.inner, self._sizes(inner=inner), tp="inner")
        yield self._leaving(mlp.product_out)

    def experts(self) -> Iterator[TensorLayout]:
        """Router, dispatch, experts, combine: model/moe_block.py. Rows in order of expert are cut over ep."""
        model, plan, moe = self.job.model, self.job.plan, self.job.model.moe
        meets_all = plan.expert_tp_size > 1 or moe.shared_size(model.ffn_size) > 0
        if meets_all:
            yield from self._taken(BLOCK.mlp_norm_out, BLOCK.middle)
        elif self._shape.norms_before:
            yield self.stream(BLOCK.mlp_norm_out)
        yield self._tensor(ROUTING.logits, self._sizes(experts=moe.experts))
        rows = self._num_rows()
        inner, etp = moe.ffn_size(model.ffn_size), plan.expert_tp_size
        by_token = {"dp": 0, "cp": 0} | ({"tp": 0} if self._is_sharded and etp == 1 else {})
        sending = (rows, model.hidden)
        # tp ranks that share an expert all send the same rows, and each has a part of their gradient.
        yield self._routed(
            ROUTING.rows_to_send, sending, self._axes, by_token, gradient_sums=("tp",) if etp > 1 else ()
        )
        folded = {axis: size for axis, size in expert_axis_sizes(plan).items() if axis != "pp"}
        by_expert = {axis: 0 for axis in folded if axis != "etp"}
        gates = shape_of(model).gates
        yield self._routed(ROUTING.dispatched, sending, folded, by_expert, gradient_sums=("etp",))
        yield self._routed(EXPERT_MLP.up, (rows, gates, inner), folded, by_expert | {"etp": 2})
        yield self._routed(EXPERT_MLP.inner, (rows, inner), folded, by_expert | {"etp": 1})
        yield self._routed(EXPERT_MLP.product_out, sending, folded, by_expert, sums=("etp",))
        yield self._routed(ROUTING.returned, sending, self._axes, by_token, sums=("tp",) if etp > 1 else ())
        if etp > 1:
            yield self._leaving(ROUTING.weighted_sum)
        if shared := moe.shared_size(model.ffn_size):
            yield from self._products(SHARED_MLP, shared)
            yield self.stream(ROUTING.shared_out)
        yield from self._given(BLOCK.mlp_out, BLOCK.mlp_out_norm_out)
        yield self.stream(BLOCK.output)

    def _num_rows(self) -> int:
        """Rows of a microbatch of all replicas: one for each choice of a token, if none is dropped."""
        job = self.job
        return job.model.sequence * job.plan.dp * job.plan.microbatch_size * job.model.moe.num_chosen

    @staticmethod
    def _routed(
        tensor: LayerTensor,
        shape: tuple[int, ...],
        axes: dict[str, int],
        dim_of: dict[str, int],
        sums: tuple[str, ...] = (),
        gradient_sums: tuple[str, ...] = (),
    ) -> TensorLayout:
        """The layout of dispatched rows. Their number on a rank depends on the gate."""
        dims = {2: ("rows", "hidden"), 3: ("rows", "gate, up", "inner")}[len(shape)]
        if tensor is EXPERT_MLP.inner:
            dims = ("rows", "inner")
        states: dict[str, Placements] = {
            "value": placements(axes, dim_of, sums),
            "gradient": placements(axes, dim_of, gradient_sums),
        }
        return TensorLayout(tensor.label, dims, shape, states, rows_vary=True)

    def head(self) -> Iterator[TensorLayout]:
        """Final norm, logits and loss: model/loss.py."""
        yield self.stream(ENDS.final_input)
        yield from self._entering(ENDS.final_norm_out)
        yield self._tensor(ENDS.logits, self._sizes(vocabulary=self.job.model.vocab), tp="vocabulary")
        yield self._tensor(ENDS.loss, self._sizes())
