"""Tensors as they lie on two ranks, and the collectives that lead from one placement to the next, drawn from the
placements of jobs: an MLP under tensor parallelism, and the four changes of a placement."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from shardwright.config.phrase import in_language, say
from shardwright.learn.drawing import Drawing
from shardwright.learn.playable_figure import FigureJob
from shardwright.memory.tensor_table import layouts
from shardwright.report import svg
from shardwright.sharding.placements import TensorLayout, TensorPlacement

_WIDTH, _SHADES = 884.0, (svg.LINE_COLOURS[0], svg.LINE_COLOURS[3])  # of rank 0 and rank 1
_CARD = 7.0  # px by which the card of rank 1 lies behind that of rank 0
_SIDES = {"sequence": 58.0, "hidden": 42.0, "inner": 76.0, "heads": 76.0, "key heads": 76.0}  # px of a dim
# The collective that changes a placement into another; a shard's change is to another dim.
_CHANGES = {
    ("partial", "replicate"): "all-reduce",
    ("partial", "shard"): "reduce-scatter",
    ("shard", "replicate"): "all-gather",
    ("shard", "shard"): "all-to-all",
}


@dataclass(frozen=True)
class CutTensor:
    """A tensor of two dims as it is drawn: rows downward, columns to the right, and its placement on the axis of two
    ranks, which cuts rows or columns, replicates, or leaves a part of a sum on each."""

    label: str
    rows: str
    columns: str
    placement: TensorPlacement
    cuts_rows: bool

    @classmethod
    def of(cls, layout: TensorLayout, state: str, label: str) -> "CutTensor":
        """A tensor of a job in one of its states. A weight [out, in] is drawn as the product reads it, in by out."""
        (placement,) = (one for one in layout.states[state] if one.size > 1)
        is_weight = layout.name.endswith(".weight")
        first = len(layout.dims) - 1 if is_weight else 0
        others = [dim for dim in layout.dims if dim in _SIDES and dim != layout.dims[first]]
        return cls(label, layout.dims[first], others[0], placement, placement.dim == first)

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in pixels."""
        return _SIDES[self.columns], _SIDES[self.rows]


def change(before: TensorPlacement, after: TensorPlacement) -> str:
    """The collective that leads from one placement to another, "" if none is needed."""
    return "" if before == after else _CHANGES[before.kind, after.kind]


def _tensors(*sets: str) -> dict[str, TensorLayout]:
    """The tensors of a layer of a small job on two ranks, by name."""
    job = FigureJob("llama3-8b", 2, "h100-sxm", (*sets, "plan.dp=1", "plan.zero=0")).spec
    (layer,) = (region for region in layouts(job) if region.name == "layer")
    return {tensor.name: tensor for tensor in (*layer.parameters, *layer.activations)}


def mlp_chains() -> list[tuple[str, list[CutTensor | str]]]:
    """An MLP on two ranks: forward, backward, and forward with sequence parallelism. Words stand between tensors."""
    chains: list[tuple[str, list[CutTensor | str]]] = []
    for is_sequence, title in ((False, say("forward")), (True, say("forward, with sequence parallel"))):
        tensors = _tensors("plan.tp=2", f"plan.sequence_parallel={str(is_sequence).lower()}")
        normal, product = tensors["mlp normal"], tensors["mlp normal, at the product"]
        entering = CutTensor.of(normal, "value", "x")
        chain: list[CutTensor | str] = [entering]
        whole = CutTensor.of(product, "value", "x")
        if collective := change(entering.placement, whole.placement):
            chain += [collective, whole]
        leaving = CutTensor.of(tensors["down product"], "value", "y")
        output = CutTensor.of(tensors["output"], "value", "y")
        chain += [
            "x",
            CutTensor.of(tensors["mlp.up.weight"], "in use", say("up: by columns")),
            "=",
            CutTensor.of(tensors["inner"], "value", say("inner")),
            "x",
            CutTensor.of(tensors["mlp.down.weight"], "in use", say("down: by rows")),
            "=",
            leaving,
            change(leaving.placement, output.placement),
            output,
        ]
        chains.append((title, chain))
    return [chains[0], _backward(), chains[1]]


def _backward() -> tuple[str, list[CutTensor | str]]:
    """The gradients of the forward without sequence parallelism, from right to left in the model."""
    tensors = _tensors("plan.tp=2", "plan.sequence_parallel=false")
    summed = CutTensor.of(tensors["mlp normal"], "gradient", "dx")
    parts = CutTensor.of(tensors["mlp normal, at the product"], "gradient", "dx")
    chain: list[CutTensor | str] = [
        CutTensor.of(tensors["down product"], "gradient", "dy"),
        "x down^T",
        CutTensor.of(tensors["inner"], "gradient", say("d inner")),
        "x up^T",
        parts,
        change(parts.placement, summed.placement),
        summed,
    ]
    return say("backward"), chain


def placement_changes() -> list[tuple[str, list[CutTensor | str]]]:
    """The four changes, where a layer has them."""
    plain, sequence, traded = (
        _tensors("plan.tp=2", "plan.sequence_parallel=false"),
        _tensors("plan.tp=2", "plan.sequence_parallel=true"),
        _tensors("plan.cp=2", "plan.cp_method=ulysses"),
    )
    rows = (
        (say("tensor parallel, after a pair of products"), plain, "down product", "output"),
        (say("the same with sequence parallel"), sequence, "down product", "output"),
        (say("sequence parallel, before a pair of products"), sequence, "mlp normal", "mlp normal, at the product"),
        (say("Ulysses, before attention"), traded, "qkv", "traded query"),
    )
    chains: list[tuple[str, list[CutTensor | str]]] = []
    for title, tensors, before, after in rows:
        first, last = (CutTensor.of(tensors[name], "value", _notations(tensors[name])) for name in (before, after))
        chains.append((title, [first, change(first.placement, last.placement), last]))
    return chains


def _notations(layout: TensorLayout) -> str:
    """The placement of an activation as DTensor and SBP write it."""
    (placement,) = (one for one in layout.states["value"] if one.size > 1)
    return f"{placement.dtensor}, {placement.sbp}"


def tensor_cut_figure() -> Drawing:
    """An MLP whose matrices two ranks share."""
    title = say("An MLP on two ranks: blue is on rank 0, orange on rank 1, + a part of a sum")
    return partial(_drawn, title, mlp_chains(), 1)


def placement_figure() -> Drawing:
    """The changes of a placement, two beside each other."""
    title = say("Changes of a placement: blue is on rank 0, orange on rank 1, + a part of a sum")
    return partial(_drawn, title, placement_changes(), 2)


def _drawn(title: str, chains: Sequence[tuple[str, list[CutTensor | str]]], num_across: int, language: str) -> str:
    parts, top = [svg.text(16, 26, in_language(title, language), "name", 15)], 40.0
    for number, (name, chain) in enumerate(chains):
        left = 16 + number % num_across * _WIDTH / num_across
        top += 132.0 * (number > 0 and number % num_across == 0)
        parts.append(svg.text(left, top + 16, in_language(name, language), "name", 13))
        parts += _chain(chain, left, top + 66, language)
    return svg.document(in_language(title, language), _WIDTH, top + 132, parts)


def _chain(chain: Sequence[CutTensor | str], left: float, middle: float, language: str) -> Iterator[str]:
    """Tensors with the words between them, around a height."""
    for one in chain:
        if isinstance(one, CutTensor):
            wide, _ = one.size
            slot = max(wide + _CARD, 92.0)
            yield from _tensor(one, left + (slot - wide - _CARD) / 2, middle)
            yield svg.text(left + slot / 2, middle + 56, in_language(one.label, language), size=12, anchor="middle")
            left += slot
        elif one in ("x", "="):
            yield svg.text(left + 4, middle + 5, one, "name", 14, "middle")
            left += 8
        else:
            wide = 96.0
            yield svg.text(left + wide / 2, middle - 8, in_language(one, language), "name", 12, "middle")
            path = f"M {svg.px(left + 10)} {svg.px(middle)} h {wide - 20:g} m -7 -5 l 7 5 l -7 5"
            yield f'<path class="mark" d="{path}" fill="none" stroke-width="1.8"/>'
            left += wide


def _tensor(one: CutTensor, left: float, middle: float) -> Iterator[str]:
    wide, high = one.size
    top = middle - high / 2
    if one.placement.kind == "shard":
        halves = (wide, high / 2) if one.cuts_rows else (wide / 2, high)
        for rank, colour in enumerate(_SHADES):
            x, y = (left, top + rank * halves[1]) if one.cuts_rows else (left + rank * halves[0], top)
            yield _box(x, y, halves, colour, 0.75)
        return
    is_part = one.placement.kind == "partial"
    for rank in (1, 0):
        x, y = left + rank * _CARD, top - rank * _CARD
        yield f'<rect class="ground" x="{svg.px(x)}" y="{svg.px(y)}" width="{wide:g}" height="{high:g}"/>'
        yield _box(x, y, (wide, high), _SHADES[rank], 0.3 if is_part else 0.75)
    if is_part:
        yield svg.text(left + wide / 2, middle + 7, "+", "name", 20, "middle")


def _box(x: float, y: float, size: tuple[float, float], colour: str, opacity: float) -> str:
    return (
        f'<rect x="{svg.px(x)}" y="{svg.px(y)}" width="{size[0]:g}" height="{size[1]:g}" fill="{colour}" '
        f'fill-opacity="{opacity:g}" stroke="{colour}" stroke-width="1.2"/>'
    )
