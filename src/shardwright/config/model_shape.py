"""The shape of a decoder: its widths, the weight matrices of its layers, its parameters and its FLOPs.

The model of a job has a shape, and so does a row of published measurements, which gives fewer facts. The one table of a
layer's matrices is `ModelShape.matrices`: the runtime's parameters (sharding/stage_parameters.py), the products of the
cost model (layers/operators.py), the counts of parameters and of FLOPs are read from it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardwright.config.adapter import AdapterSpec
from shardwright.config.attention_sections import WindowSpec
from shardwright.config.kept_results import kept_by_identity
from shardwright.config.layer_kind import UNTURNED, WINDOWED, has_experts
from shardwright.config.matrix import Matrix
from shardwright.config.model import ModelSpec, NormPlace, ParallelBlock
from shardwright.config.moe import is_routed
from shardwright.config.section_shapes import ExpertShape, LatentShape

_NO_WINDOW, _NO_ADAPTER = WindowSpec(), AdapterSpec()


@dataclass(frozen=True)
class ModelShape:
    """Shape of a decoder. Layers have kinds (layer_kind.py): "dense" has one MLP for all tokens, "experts" a mixture.
    The last of every `no_rotary_every` layers has no rotary positions; `window` gives the layers with a window.

    `mtp` modules after the last layer predict further tokens: each is a projection of hidden states and embeddings, and
    a block like the last layer. Flags: norms are LayerNorms (`layer_norm`); attention and MLPs have biases (`bias`);
    only queries, keys and values (`qkv_bias`), attention (`attention_bias`) or MLPs (`mlp_bias`) have biases; queries
    and keys are normalised (`head_norms`); queries, keys and values are clipped (`clips`); scores are capped (`caps`);
    no kernel of a full sequence computes this attention (`blockwise`); norms have parameters (`norm_weight`); additions
    to the residual stream are scaled (`scales_stream`); logits are scaled or capped (`changes_logits`). `norm_place`,
    `parallel` and `embedding_norm` are as in ModelSpec. Rows of measurements leave these at their defaults.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocab: int
    sequence: int
    tied: bool = False
    learned_positions: bool = False
    experts: ExpertShape | None = None
    latent: LatentShape | None = None
    layer_norm: bool = False
    bias: bool = False
    qkv_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    mtp: int = 0
    no_rotary_every: int = 0
    window: WindowSpec = _NO_WINDOW
    clips: bool = False
    caps: bool = False
    blockwise: bool = False
    norm_weight: bool = True
    norm_place: NormPlace = "before"
    parallel: ParallelBlock = "none"
    embedding_norm: bool = False
    scales_stream: bool = False
    changes_logits: bool = False
    position_offset: int = 0
    adapter: AdapterSpec = _NO_ADAPTER

    @property
    def is_adapted(self) -> bool:
        """True if adapters are trained, and the model's own weights are frozen."""
        return self.adapter.rank > 0

    @property
    def query_width(self) -> int:
        """Width of a head's query, equal to that of its key."""
        return self.latent.plain + self.latent.rotary if self.latent else self.head_dim

    @property
    def value_width(self) -> int:
        """Width of a head's value."""
        return self.latent.value if self.latent else self.head_dim

    @property
    def mixture(self) -> ExpertShape:
        """The experts of a model that has some."""
        assert self.experts is not None, "this model has no experts"
        return self.experts

    @property
    def low_ranks(self) -> LatentShape:
        """The widths of latent attention, of a model that has it."""
        assert self.latent is not None, "this model has no latent attention"
        return self.latent

    @property
    def norms_before(self) -> bool:
        """True if the inputs of attention and MLP are normalised."""
        return self.norm_place != "after"

    @property
    def norms_after(self) -> bool:
        """True if the outputs of attention and MLP are normalised before they join the residual stream."""
        return self.norm_place != "before"

    @property
    def block_norms(self) -> tuple[str, ...]:
        """The norms of a layer on the residual stream, in their order."""
        if self.parallel == "one-norm":
            return ("attention_norm",)
        before, after = ("norm",) * self.norms_before, ("out_norm",) * self.norms_after
        return tuple(f"{half}_{norm}" for half in ("attention", "mlp") for norm in (*before, *after))

    @property
    def gates(self) -> int:
        """Number of matrices side by side before the activation of an MLP: 2 for gate and up, 1 for up alone."""
        return 2 if self.gated else 1

    # The one table of matrices.

    @cached_property
    def attention_matrices(self) -> tuple[Matrix, ...]:
        """Weights of a layer's attention: (qkv, out), or (down, q_up, kv_up, out) for latent attention.

        The rows of qkv are ordered by key/value head: its queries, then its key, then its value. Without low-rank
        queries, q_up makes queries from the residual stream.
        """
        heads, hidden = self.heads, self.hidden
        out = Matrix("out", (hidden,), heads * self.value_width, sharded_dim=1)
        if self.latent is None:
            queries = heads // self.kv_heads
            outputs, widths = (self.kv_heads, queries + 2, self.head_dim), (queries, 1, 1)
            return Matrix("qkv", outputs, hidden, sharded_dim=0, side_by_side=1, widths=widths), out
        latent = self.latent
        latents, head = (latent.query_rank, latent.key_rank + latent.rotary), (latent.plain, latent.value)
        kv_widths = tuple(filter(None, head))
        return (
            Matrix("down", (sum(latents),), hidden, widths=tuple(filter(None, latents))),
            Matrix("q_up", (heads, self.query_width), latent.query_rank or hidden, sharded_dim=0),
            Matrix("kv_up", (heads, sum(head)), latent.key_rank, sharded_dim=0, side_by_side=1, widths=kv_widths),
            out,
        )

    @cached_property
    def mlp_matrices(self) -> tuple[Matrix, Matrix]:
        """Weights of a dense layer's MLP: (up, down)."""
        return self._mlp(self.ffn)

    @cached_property
    def routed_matrices(self) -> tuple[Matrix, Matrix]:
        """Weights of the experts: (up, down)."""
        return self._mlp(self.mixture.ffn, self.mixture.num)

    @cached_property
    def shared_matrices(self) -> tuple[Matrix, Matrix]:
        """Weights of the shared experts, which all tokens use: (up, down)."""
        return self._mlp(self.mixture.shared_ffn)

    def _mlp(self, ffn: int, experts: int = 0) -> tuple[Matrix, Matrix]:
        up = Matrix("up", (self.gates, ffn), self.hidden, sharded_dim=1, experts=experts, widths=(1,) * self.gates)
        return up, Matrix("down", (self.hidden,), ffn, sharded_dim=1, experts=experts)

    @cached_property
    def gate_matrices(self) -> tuple[Matrix, ...]:
        """Weights whose products are in float32 in a layer with experts: (router,), or (router, shared gate)."""
        router = Matrix("router", (self.mixture.num,), self.hidden)
        return (router, Matrix("shared_gate", (1,), self.hidden)) if self.mixture.shared_gate else (router,)

    @cached_property
    def further_matrix(self) -> Matrix:
        """The weight that joins an embedding and hidden states before a block that predicts a further token."""
        return Matrix("project", (self.hidden,), 2 * self.hidden)

    def matrices(self, kind: str) -> tuple[Matrix, ...]:
        """All weight matrices of a layer of a kind."""
        if self.experts is None or not has_experts(kind):
            return self.attention_matrices + self.mlp_matrices
        shared = self.shared_matrices if self.experts.shared_ffn else ()
        return self.attention_matrices + self.gate_matrices + self.routed_matrices + shared

    @property
    def table_elements(self) -> int:
        """Number of elements of the embedding table, equal to that of the head."""
        return self.vocab * self.hidden

    @property
    def shares_table(self) -> bool:
        """True if the last stage also uses the embedding table, as the head or for further tokens."""
        return self.tied or self.mtp > 0

    @property
    def num_tables(self) -> int:
        """Number of tables of that size: embedding and head, or one if they are tied."""
        return 1 if self.tied else 2

    # Facts that follow from the matrices and the kinds.

    def is_dense(self, layer: int) -> bool:
        """True if a layer has one MLP for all tokens. Blocks that predict further tokens are like the last layer."""
        mixture = self.experts
        return mixture is None or not is_routed(min(layer, self.layers - 1), mixture.dense_layers, mixture.every)

    def kind(self, layer: int) -> str:
        """The kind of a layer."""
        return ("dense" if self.is_dense(layer) else "experts") + self._attention_suffix(layer)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that layers may have."""
        suffixes = dict.fromkeys(map(self._attention_suffix, range(self.layers)))
        mlps = [mlp for mlp in ("dense", "experts") if mlp == "dense" or self.experts]
        return tuple(mlp + suffix for mlp in mlps for suffix in suffixes)

    def _attention_suffix(self, layer: int) -> str:
        layer, every = min(layer, self.layers - 1), self.no_rotary_every
        is_unturned = every > 0 and (layer + 1) % every == 0
        return WINDOWED * self.window.is_in(layer) + UNTURNED * is_unturned

    def of_kind(self, kind: str, layers: int) -> "ModelShape":
        """A model of `layers` layers that all attend like the layers of a kind."""
        window = self.window.model_copy(update={"full_every": 0, "full_first": False, "first_full": 0})
        no_rotary_every = int(UNTURNED in kind)
        window = window if WINDOWED in kind else _NO_WINDOW
        return replace(self, layers=layers, no_rotary_every=no_rotary_every, window=window)

    def is_turned(self, kind: str) -> bool:
        """True if a layer of a kind turns queries and keys by their positions."""
        return not self.learned_positions and UNTURNED not in kind

    def keys_seen(self, kind: str) -> float:
        """Keys of a sequence that a query in a layer of a kind sees, before causality, which halves them."""
        return self.window.keys_seen(self.sequence) if WINDOWED in kind else self.sequence

    def is_blockwise(self, kind: str) -> bool:
        """True if our runtime computes the attention of a layer of a kind block by block, even if one rank has the
        full sequence."""
        return self.blockwise or (WINDOWED in kind and self.window.size < self.sequence)

    @cached_property
    def _keys_by_block(self) -> list[float]:
        return [self.keys_seen(self.kind(block)) for block in range(self.layers + self.mtp)]

    @cached_property
    def num_dense(self) -> int:
        """Layers with one MLP for all tokens."""
        return sum(map(self.is_dense, range(self.layers)))

    def _sum_over(self, layers: Iterable[int], by_kind: dict[str, int]) -> int:
        """The sum over some layers of a number that depends on the kind."""
        return sum(by_kind["dense" if self.is_dense(layer) else "experts"] for layer in layers)

    @cached_property
    def _elements(self) -> dict[str, tuple[int, int]]:
        """Elements of the matrices of a layer, by kind: (used by all tokens, of the routed experts)."""
        elements = {}
        for kind in ("dense", "experts"):
            matrices = self.matrices(kind)
            routed = sum(m.num_elements for m in matrices if m.experts)
            elements[kind] = sum(m.num_elements for m in matrices) - routed, routed
        return elements

    @cached_property
    def _used_elements(self) -> dict[str, int]:
        """Elements of the matrices of a layer with which one token is multiplied, by kind."""
        topk, num = (self.experts.topk, self.experts.num) if self.experts else (0, 1)
        return {kind: common + routed * topk // num for kind, (common, routed) in self._elements.items()}

    def kind_parameters(self, kind: str) -> tuple[int, int]:
        """(elements that all tokens use, elements of the routed experts) of a layer of a kind: its matrices and its
        norms of the residual stream. Biases and norms inside attention are not counted, because published rows do not
        give them."""
        common, routed = self._elements["experts" if has_experts(kind) else "dense"]
        return common + len(self.block_norms) * self.norm_elements, routed

    def adapter_elements(self, kind: str, tp: Any = 1, expert_tp: Any = 1) -> tuple[Any, Any]:
        """Elements of the adapters of a layer of a kind on each of `tp` ranks, and those of one routed expert on each
        of the `expert_tp` ranks that share it."""
        of_expert = sum(self.adapter.elements(m, expert_tp) for m in self.matrices(kind) if m.experts)
        return sum(self.adapter.elements(m, tp) for m in self.matrices(kind) if not m.experts), of_expert

    @cached_property
    def trained_by_adapters(self) -> int:
        """Elements of the adapters of all layers with which one token is multiplied; 0 without adapters."""
        kinds = map(self.kind, range(self.layers)) if self.is_adapted else ()
        pairs, chosen = map(self.adapter_elements, kinds), self.experts.topk if self.experts else 0
        return sum(common + chosen * of_expert for common, of_expert in pairs)

    @property
    def norm_elements(self) -> int:
        """Number of weights of a norm of the residual stream."""
        return self.hidden if self.norm_weight else 0

    @property
    def parameters(self) -> int:
        """Elements of the model, as `kind_parameters` counts them. The exact count of a running model is in
        sharding/stage_parameters.py."""
        by_kind = {kind: sum(self.kind_parameters(kind)) for kind in self._elements}
        layers = self._sum_over(range(self.layers + self.mtp), by_kind) + self.mtp * self.further_parameters
        positions = (self.sequence + self.position_offset) * self.hidden if self.learned_positions else 0
        ends = (1 + self.embedding_norm) * self.norm_elements
        return layers + self.num_tables * self.table_elements + ends + positions

    @property
    def further_parameters(self) -> int:
        """Elements of a module that predicts a further token, without its block: the projection and three norms."""
        return self.further_matrix.num_elements + 3 * self.norm_elements

    @cached_property
    def matrix_parameters(self) -> int:
        """Elements of the matrices with which each token is multiplied: all layers and the head, no lookups; and for
        each module that predicts a further token a block, the projection and the head again.

        Experts count as many as a token chooses, or the average if experts choose tokens.
        """
        blocks = self._sum_over(range(self.layers + self.mtp), self._used_elements)
        return blocks + self.mtp * self.further_matrix.num_elements + (1 + self.mtp) * self.table_elements

    @property
    def _head_elements(self) -> int:
        """Elements of query and value of one token in one layer, over all heads."""
        return self.heads * (self.query_width + self.value_width)

    def flops_per_token(self, causal: bool = False) -> float:
        """Model FLOPs of one token, forward and backward: 6 per matrix element that it uses, and attention. Frozen
        elements count 4, because they have no gradient, and those of adapters 6.

        Chowdhery et al. 2022 (PaLM, arXiv 2204.02311, appendix B): 6 N + 12 x layers x heads x head_dim x sequence,
        with head_dim the mean of the widths of keys and values. Keys of the full sequence are counted (of the window,
        in a layer that has one), or half of them if `causal`. Recomputation is not counted.
        """
        share = 0.5 if causal else 1.0
        matrices = (4.0 if self.is_adapted else 6.0) * self.matrix_parameters + 6.0 * self.trained_by_adapters
        return matrices + 6.0 * self._head_elements * sum(self._keys_by_block) * share

    @property
    def num_passes(self) -> float:
        """FLOPs of forward and backward together by those of the forward: 3, or about 2 if weights are frozen."""
        elements = self.matrix_parameters + self.trained_by_adapters + self._head_elements * sum(self._keys_by_block)
        return self.flops_per_token() / (2.0 * elements) if self.is_adapted else 3.0

    def stage_flops(self, layers: Sequence[int], sequences: int) -> tuple[float, ...]:
        """Forward FLOPs by stage, for a microbatch of `sequences`. Stage s holds `layers[s]` layers, and the last stage
        also the head and the modules that predict further tokens.

        2 per matrix element and token, and attention's scores and sums of values over the full sequence, or over its
        window; those of adapters are left out. The backward is twice the forward: once for input gradients, once for
        weight gradients, unless those are frozen. The forward and backward of all stages together are flops_per_token x
        tokens.
        """
        scores = [2 * self._head_elements * keys for keys in self._keys_by_block]
        flops, first = list[float](), 0
        for stage, count in enumerate(layers):
            mtp = self.mtp if stage == len(layers) - 1 else 0
            matrices = self._sum_over(range(first, first + count + mtp), self._used_elements)
            ends = (1 + mtp) * self.table_elements + mtp * self.further_matrix.num_elements
            head, attention = ends if stage == len(layers) - 1 else 0, sum(scores[first : first + count + mtp])
            flops.append(float(sequences * self.sequence * (2 * (matrices + head) + attention)))
            first += count
        return tuple(flops)


@kept_by_identity
def shape_of(model: ModelSpec) -> ModelShape:
    """The shape of a job's model, with its defaults filled in."""
    moe, low = model.moe, model.latent
    experts = ExpertShape(
        num=moe.experts, topk=moe.num_chosen, ffn=moe.ffn_size(model.ffn_size),
        shared_ffn=moe.shared_size(model.ffn_size), dense_layers=moe.first_dense, every=moe.every,
        reach=moe.groups_kept / moe.num_groups, shared_gate=moe.shared_gate, weighs_input=moe.weigh == "input",
        routing=moe.routing, most_load=moe.capacity_factor or math.inf, limited=model.activation == "clamped-silu",
    )  # fmt: skip
    return ModelShape(
        layers=model.layers, hidden=model.hidden, heads=model.heads, kv_heads=model.num_kv_heads,
        head_dim=model.query_width, ffn=model.ffn_size, gated=model.gated_mlp, vocab=model.vocab,
        sequence=model.sequence, tied=model.tied_embeddings, learned_positions=model.positions == "learned",
        experts=experts if moe.experts else None,
        latent=LatentShape(low.q_rank, low.kv_rank, low.nope_dim, low.rope_dim, low.value_dim)
        if model.is_latent else None,
        layer_norm=model.norm == "layernorm", bias=model.bias, qkv_bias=model.qkv_bias,
        attention_bias=model.attention_bias, mlp_bias=model.mlp_bias,
        head_norms=model.qk_norm != "none", mtp=model.mtp_layers,
        no_rotary_every=1 if model.positions in ("none", "alibi") else model.no_rotary_every, window=model.window,
        clips=model.clip_qkv > 0, caps=model.attention_softcap > 0,
        blockwise=model.attention_softcap > 0 or model.sinks or model.positions == "alibi",
        norm_weight=model.norm_weight, norm_place=model.norm_place, parallel=model.parallel_block,
        embedding_norm=model.embedding_norm, position_offset=model.position_offset, adapter=model.adapter,
        scales_stream=model.residual_scale != 1.0, changes_logits=model.changes_logits,
    )  # fmt: skip
