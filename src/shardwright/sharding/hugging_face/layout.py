"""The tensors of a released checkpoint that make up each tensor of a model, and their places in it.

Shapes: G key/value heads, Q query heads of each, D width of a head, H hidden, F inner width, E experts.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.config.model import ModelSpec
from shardwright.sharding.hugging_face.family_names import FAMILY_NAMES, FamilyNames
from shardwright.sharding.hugging_face.released_piece import (
    ReleasedPiece,
    halves_swapped,
    plain,
    rows,
    seen_as,
    transposed,
    whole,
)
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.sharding.stage_parameters import model_parameters

_BLOCK = re.compile(r"(?:layers\.(\d+)|mtp\.(\d+)\.block)\.(.+)")
_STACKED_EXPERTS = ".mlp.experts.gate_up_proj"
_FURTHER = re.compile(r"mtp\.(\d+)\.(.+)")

Layout = dict[str, tuple[ReleasedPiece, ...]]


def names_of(family: str, model: ModelSpec) -> FamilyNames:
    """The tensor names of a model of a family."""
    names = FAMILY_NAMES[family]
    if family == "gpt_bigcode" and model.num_kv_heads > 1:
        return replace(names, fused="grouped")
    if family == "falcon" and model.parallel_block == "two-norms":
        return replace(names, attention_norm="ln_attn", mlp_norm="ln_mlp")
    return names


def family_of_files(family: str, model: ModelSpec, shapes: Mapping[str, Sequence[int]]) -> str:
    """The name in FAMILY_NAMES of how files with tensors of some shapes, by name, lay a family out: with experts as the
    family has them, or all in one tensor."""
    stacked = next((shape for name, shape in shapes.items() if name.endswith(_STACKED_EXPERTS)), ())
    if len(stacked) != 3 or f"{family}-rows" not in FAMILY_NAMES:
        return family
    is_rows = stacked[-1] == model.hidden and stacked[-1] != stacked[-2]
    return f"{family}-{'rows' if is_rows else 'columns'}"


def layout_of(family: str, model: ModelSpec) -> Layout:
    """The pieces of each of our tensors, by its name, in the order of the model's parameters. Each released tensor is
    one piece of one of our tensors, except the copies of tables in modules of multi-token prediction (`copies`)."""
    pieces_of = _Made(model, names_of(family, model))
    return {place.name: tuple(pieces_of.pieces(place)) for place in model_parameters(model)}


def correction_biases(family: str, model: ModelSpec) -> dict[int, ReleasedPiece]:
    """The score-correction biases of routers, by the number of the block: they are not parameters."""
    names, shape = names_of(family, model), (model.moe.experts,)
    if "bias_update" not in model.moe.gate_facts.reads or model.moe.weigh == "input":
        return {}
    stored = (1, *shape) if names.correction_bias_is_row else shape
    return {
        number: seen_as(f"{names.layer.format(n=number)}.{names.correction_bias}", stored, shape)
        for number in model.blocks_with_experts
    }


def copies(family: str, model: ModelSpec) -> dict[str, str]:
    """Released tensors that are copies of others: the tables in each module of multi-token prediction."""
    names, copied = names_of(family, model), {}
    head = names.embedding if model.tied_embeddings else names.head
    for index in range(model.mtp_layers) if names.further.copies_tables else ():
        module = names.layer.format(n=model.layers + index)
        copied[f"{module}.embed_tokens.weight"] = f"{names.embedding}.weight"
        copied[f"{module}.shared_head.head.weight"] = f"{head}.weight"
    return copied


def tied_head(family: str, model: ModelSpec) -> tuple[str, str] | None:
    """The names of the head and of the table of embeddings that it is tied to: some files also store the head as a
    tensor. None if the model's head is not tied."""
    names = names_of(family, model)
    return (f"{names.head}.weight", f"{names.embedding}.weight") if model.tied_embeddings else None


@dataclass(frozen=True)
class _Made:
    """The pieces of a model's tensors, with the names of its family."""

    model: ModelSpec
    names: FamilyNames

    def pieces(self, place: ParameterShard) -> Iterator[ReleasedPiece]:
        """The pieces of one of our tensors."""
        n, shape = self.names, place.full_shape
        if block := _BLOCK.fullmatch(place.name):
            layer = n.layer.format(n=block[1]) if block[1] else self._further_layer(int(block[2]))
            yield from self._of_block(layer, block[3], shape)
        elif further := _FURTHER.fullmatch(place.name):
            part, _, kind = further[2].rpartition(".")
            name = f"{self._further_layer(int(further[1]))}.{getattr(n.further, part)}.{kind}"
            yield from (
                halves_swapped(name, shape) if part == "project" and n.further.hidden_first else (plain(name, shape),)
            )
        else:
            part, _, kind = place.name.rpartition(".")
            make = self._norm if "norm" in part else self._table
            yield make(getattr(n, part), kind, shape)

    def _further_layer(self, index: int) -> str:
        """The name of a module of multi-token prediction."""
        further = self.names.further.layer
        return further.format(n=index) if further else self.names.layer.format(n=self.model.layers + index)

    def _table(self, name: str, kind: str, shape: tuple[int, ...]) -> ReleasedPiece:
        return replace(plain(f"{name}.{kind}", shape), may_be_longer=name == self.names.positions)

    def _norm(self, name: str, kind: str, shape: tuple[int, ...]) -> ReleasedPiece:
        return plain(f"{name}.{kind}", shape, plus=1.0 if self.names.plus_one and kind == "weight" else 0.0)

    def _of_block(self, layer: str, part: str, shape: tuple[int, ...]) -> Iterator[ReleasedPiece]:
        """The pieces of a tensor of a block, by its name within the block."""
        n = self.names
        match part.split("."):
            case [norm, kind] if norm.endswith("_norm"):
                yield self._norm(f"{layer}.{getattr(n, norm)}", kind, shape)
            case ["attention", *rest]:
                yield from self._of_attention(layer, rest, shape)
            case ["mlp", *rest]:
                yield from self._of_mlp(layer, (n.gate, n.up, n.down), rest, shape)
            case ["moe", "shared", *rest]:
                yield from self._of_mlp(layer, (n.shared_gate_proj, n.shared_up, n.shared_down), rest, shape)
            case ["moe", "shared_gate"]:
                yield plain(f"{layer}.{n.shared_gate}.weight", shape)
            case ["moe", "router", kind]:
                yield plain(f"{layer}.{n.router}.{kind}", shape)
            case ["moe", "experts", which]:
                yield from self._of_experts(layer, which, shape)
            case _:
                raise AssertionError(f"{part} has no place in a released checkpoint")

    def _of_attention(self, layer: str, part: list[str], shape: tuple[int, ...]) -> Iterator[ReleasedPiece]:
        n, latent = self.names, self.model.is_latent
        match part:
            case ["qkv", "weight"]:
                yield from self._query_key_value(layer, "weight", shape)
            case ["qkv_bias"]:
                yield from self._query_key_value(layer, "bias", shape)
            case ["sinks"]:
                yield seen_as(f"{layer}.{n.sinks}", (shape[0] * shape[1],), shape)
            case ["out", kind]:
                yield self._product(f"{layer}.{n.out}.{kind}", shape)
            case [("q_norm" | "k_norm" | "kv_norm") as norm, kind] if latent:
                yield plain(f"{layer}.self_attn.{norm[: norm.index('_')]}_a_layernorm.{kind}", shape)
            case [("q_norm" | "k_norm") as norm, kind]:
                size = shape[0] if len(shape) == 1 else shape[0] * shape[1] * shape[2]
                plus = 1.0 if n.plus_one and kind == "weight" else 0.0
                yield seen_as(f"{layer}.{getattr(n, norm)}.{kind}", (size,), shape, plus)
            case ["down", kind]:
                yield from self._latents(f"{layer}.self_attn", kind, shape)
            case ["q_up", kind]:
                name = "q_b_proj" if self.model.latent.q_rank else "q_proj"
                yield seen_as(f"{layer}.self_attn.{name}.{kind}", (shape[0] * shape[1], shape[2]), shape)
            case ["kv_up", kind]:
                yield seen_as(f"{layer}.self_attn.kv_b_proj.{kind}", (shape[0] * shape[1], shape[2]), shape)

    def _latents(self, attention: str, kind: str, shape: tuple[int, ...]) -> Iterator[ReleasedPiece]:
        """Both latents, which are one matrix in our model."""
        rank = self.model.latent.q_rank
        if rank:
            yield rows(f"{attention}.q_a_proj.{kind}", shape, 0, rank)
        yield rows(f"{attention}.kv_a_proj_with_mqa.{kind}", shape, rank, shape[0])

    def _query_key_value(self, layer: str, kind: str, shape: tuple[int, ...]) -> Iterator[ReleasedPiece]:
        """[G, Q + 2, D, H], or [G, Q + 2, D] for biases: each group is Q queries, a key and a value."""
        n = self.names
        groups, members, width, *inner = shape
        parts = ((n.q, 0, members - 2), (n.k, members - 2, members - 1), (n.v, members - 1, members))
        interleaved_width = (self.model.rotary_width if n.interleaved else 0) if self.model.positions == "rotary" else 0
        if n.fused == "grouped":
            yield seen_as(f"{layer}.{n.q}.{kind}", (groups * members * width, *inner), shape)
            return
        if n.fused == "stacked":
            yield from self._stacked(layer, kind, shape)
            return
        for name, first, end in parts:
            region = ((0, groups), (first, end), *whole((width, *inner)))
            view = (groups, end - first, width, *inner)
            stored = (groups * (end - first) * width, *inner)
            is_interleaved = interleaved_width and name != n.v
            yield ReleasedPiece(
                f"{layer}.{name}.{kind}",
                stored,
                region,
                view,
                tuple(range(len(view))),
                interleaved=interleaved_width if is_interleaved else 0,
                pairs_dim=2 if is_interleaved else 0,
            )

    def _stacked(self, layer: str, kind: str, shape: tuple[int, ...]) -> Iterator[ReleasedPiece]:
        """All queries, then all keys, then all values, in one matrix: three slices of one released tensor."""
        n = self.names
        groups, members, width, *inner = shape
        total, start = groups * members * width, 0
        stored = (*inner, total) if n.transposed and inner else (total, *inner)
        for first, end in ((0, members - 2), (members - 2, members - 1), (members - 1, members)):
            size = groups * (end - first) * width
            region = ((0, groups), (first, end), *whole((width, *inner)))
            view = (groups, end - first, width)
            cut_dim = len(stored) - 1 if n.transposed else 0
            turned = n.interleaved and self.model.positions == "rotary" and first < members - 1
            transposed_order = (len(inner), len(inner) + 1, len(inner) + 2, *range(len(inner)))
            yield ReleasedPiece(
                f"{layer}.{n.q}.{kind}",
                stored,
                region,
                (*inner, *view) if cut_dim else (*view, *inner),
                transposed_order if cut_dim else tuple(range(len(shape))),
                interleaved=self.model.rotary_width if turned else 0,
                pairs_dim=2 if turned else 0,
                cut_dim=cut_dim,
                cut_range=(start, start + size),
            )
            start += size

    def _product(self, name: str, shape: tuple[int, ...]) -> ReleasedPiece:
        """A matrix [outputs, inputs], or its bias."""
        return transposed(name, shape) if self.names.transposed and len(shape) == 2 else plain(name, shape)

    def _of_mlp(
        self, layer: str, names: tuple[str, str, str], part: list[str], shape: tuple[int, ...]
    ) -> Iterator[ReleasedPiece]:
        """Up [gates, F, H] with its bias [gates, F], and down [H, F] with its bias [H]."""
        gate, up, down = names
        match part:
            case ["down", kind]:
                yield self._product(f"{layer}.{down}.{kind}", shape)
            case _:
                kind = "bias" if part == ["up_bias"] else "weight"
                if gate:
                    yield self._half(f"{layer}.{gate}.{kind}", shape, 0)
                    yield self._half(f"{layer}.{up}.{kind}", shape, 1)
                elif self.names.transposed and kind == "weight":
                    gates, ffn, hidden = shape
                    yield ReleasedPiece(
                        f"{layer}.{up}.{kind}", (hidden, gates * ffn), whole(shape), (hidden, gates, ffn), (1, 2, 0)
                    )
                else:
                    yield seen_as(f"{layer}.{up}.{kind}", (shape[0] * shape[1], *shape[2:]), shape)

    @staticmethod
    def _half(name: str, shape: tuple[int, ...], which: int) -> ReleasedPiece:
        """Gate (0) or up (1) of [2, F, ...]."""
        view = (1, *shape[1:])
        return ReleasedPiece(name, shape[1:], ((which, which + 1), *whole(shape[1:])), view, tuple(range(len(view))))

    def _of_experts(self, layer: str, which: str, shape: tuple[int, ...]) -> Iterator[ReleasedPiece]:
        """Up [E, gates, F, H] and down [E, H, F], with biases [E, gates, F] and [E, H]."""
        n = self.names
        if n.experts == "each":
            yield from self._of_each_expert(layer, which, shape)
            return
        name = f"{layer}.{n.expert_down if which.startswith('down') else n.expert_up}"
        if which.endswith("_bias"):
            name += "_bias"
        num = shape[0]
        if n.experts == "rows":
            flat = shape if which == "down" else (num, shape[1] * shape[2], *shape[3:])
            yield seen_as(name, flat, shape)
        elif which == "down":
            yield ReleasedPiece(name, (num, shape[2], shape[1]), whole(shape), (num, shape[2], shape[1]), (0, 2, 1))
        elif which == "down_bias":
            yield plain(name, shape)
        elif which == "up_bias":
            stored_view = (num, shape[2], shape[1])
            yield ReleasedPiece(name, (num, shape[1] * shape[2]), whole(shape), stored_view, (0, 2, 1))
        else:
            gates, ffn, hidden = shape[1:]
            stored = (num, hidden, gates * ffn)
            if n.experts == "turns":
                yield ReleasedPiece(name, stored, whole(shape), (num, hidden, ffn, gates), (0, 3, 2, 1))
            else:
                yield ReleasedPiece(name, stored, whole(shape), (num, hidden, gates, ffn), (0, 2, 3, 1))

    def _of_each_expert(self, layer: str, which: str, shape: tuple[int, ...]) -> Iterator[ReleasedPiece]:
        n = self.names
        for expert in range(shape[0]):
            if which == "down":
                yield self._of_one(f"{layer}.{n.expert_down.format(e=expert)}.weight", shape, expert, ())
                continue
            for gate, name in enumerate((n.expert_gate, n.expert_up)):
                yield self._of_one(f"{layer}.{name.format(e=expert)}.weight", shape, expert, (gate,))

    @staticmethod
    def _of_one(name: str, shape: tuple[int, ...], expert: int, gate: tuple[int, ...]) -> ReleasedPiece:
        """A matrix of one expert: its down matrix if `gate` is empty, else its gate (0) or up (1)."""
        matrix_shape = shape[1 + len(gate) :]
        region = ((expert, expert + 1), *((which, which + 1) for which in gate), *whole(matrix_shape))
        view = (*(1 for _ in range(1 + len(gate))), *matrix_shape)
        return ReleasedPiece(name, matrix_shape, region, view, tuple(range(len(view))))
