"""The tables of a story: the work of one microbatch in a piece of the model, operator by operator, forward and back;
the bytes that cross each link; and the layout of each tensor in the notations of DTensor, SBP and GSPMD."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from shardwright.config.layer_kind import UNTURNED, WINDOWED
from shardwright.config.link_words import LinkWords
from shardwright.config.phrase import Phrase, both, capitalized, fixed, say
from shardwright.config.units import bytes_text, flops_text, number_text, seconds_text
from shardwright.cost.wire_bytes import SentBytes
from shardwright.explain.operator_passes import Collective, OperatorPass, PiecePass, total_s
from shardwright.explain.rank_collectives import Crossing
from shardwright.layers.operators import MatrixProduct
from shardwright.memory.step_collectives import PieceKind
from shardwright.memory.tensor_table import RegionLayout
from shardwright.report.document import AlignedRows, Part
from shardwright.sharding.placements import TensorLayout, TensorPlacement


def passes_parts(passes: Iterable[PiecePass], backward: bool) -> Iterator[Part]:
    """A table for each kind of piece, in the order in which a pass meets its operators."""
    for piece in passes:
        title, rows = _title(piece, backward), operator_rows(piece, backward)
        if len(rows) == 1:
            yield say("{title}: nothing to compute or to move that a prediction counts.", title=title)
        else:
            yield title
            yield AlignedRows(rows, left=[column for column, name in enumerate(rows[0]) if name in _WORDS])


_WORDS = ("operator", "work")  # columns of words; the others have numbers
_NAMES = {
    "dense": "a layer",
    "experts": "a layer with experts",
    "embedding": "the embedding",
    "head": "the head",
    "mtp": "a further token beside its layer",
}
_PLURALS = {"dense": "layers", "experts": "layers with experts", "mtp": "further tokens beside their layers"}


def piece_name(kind: PieceKind) -> str:
    """The name of a kind of piece: "a layer", "a layer with experts that computes attention and norm again"."""
    name, policy = _piece_words(kind[0]), kind[1]
    if policy == "none":
        return name
    *first_names, last_name = policy.replace("full", "all").replace("stage", "all").split("+")
    operators = both([*([", ".join(first_names)] if first_names else []), last_name])
    return say("{piece} that computes {operators} again", piece=name, operators=operators)


def pieces_text(pieces: Mapping[PieceKind, int]) -> str:
    """Pieces with their numbers: "8 layers, the head"."""
    texts = tuple(
        say("{count} {pieces}", count=count, pieces=_piece_words(kind[0], _PLURALS))
        if kind[0] not in ("embedding", "head") and count > 1
        else piece_name(kind)
        for kind, count in pieces.items()
    )
    return say("{pieces}", pieces=texts)


def _piece_words(kind: str, names: Mapping[str, str] = _NAMES) -> str:
    """A kind of piece in words, with the attention of its layers if a model has layers of several kinds."""
    attention: list[str] = [
        text
        for word, text in ((WINDOWED, say("with a window")), (UNTURNED, say("without rotary positions")))
        if word in kind
    ]
    name = fixed(names[kind.split()[0]])
    return say("{piece} {attention}", piece=name, attention=both(attention)) if attention else name


def _title(piece: PiecePass, backward: bool) -> str:
    name = piece_name((piece.kind, piece.policy))
    seconds, flops = (piece.backward_s, piece.backward_flops) if backward else (piece.forward_s, piece.flops)
    time_text = "" if seconds is None else say(", {seconds} of kernels and gaps", seconds=seconds_text(seconds))
    again_text = ""
    if backward and piece.again_s:
        again_text = say(", and {seconds} of computing again", seconds=seconds_text(piece.again_s))
    return say(
        "{piece}: {flops} on a rank{time}{again}",
        piece=_capital(name),
        flops=flops_text(flops),
        time=time_text,
        again=again_text,
    )


def _capital(name: str) -> str:
    """The name of a piece, which may be a phrase in others, with a capital."""
    if isinstance(name, Phrase) and name.template.startswith("{piece}"):
        return Phrase(name.template, name.values | {"piece": _capital(name.values["piece"])})
    return capitalized(name)


def operator_rows(piece: PiecePass, backward: bool) -> list[list[str]]:
    """A row of column names, a row for each operator that computes or communicates in this pass, and a row of gaps.

    Each further product and each collective of an operator has a row without its name.
    """
    times = ("forward", "input gradient", "weight gradient", "computed again") if backward else ("time", "a second")
    rows: list[list[str]] = [[say("operator"), say("work"), "FLOP", *map(say, (*times, "lasts", "exposed"))]]
    for operator in reversed(piece.operators) if backward else piece.operators:
        moves = operator.backward if backward else (*operator.forward, *operator.with_graph)
        if backward and operator.again_share:
            moves = (*operator.forward, *moves)
        figures = _backward_figures(operator) if backward else _forward_figures(operator)
        blank = [""] * len(figures)
        is_later = operator.in_backward and not backward
        if any(figures) or moves or is_later:
            computed: list[str] = [say("in the backward")] if is_later else _computed(operator, backward)
            lines = [[work, *(figures if not number else blank), "", ""] for number, work in enumerate(computed)]
            lines = [line for line in lines if any(line)]
            lines += [[moved, *blank, *seconds] for moved, *seconds in map(_collective_cells, moves)]
            rows += [["" if number else operator.name, *line] for number, line in enumerate(lines)]
    gaps = [None, piece.backward_gap_s, None, piece.again_gap_s] if backward else [piece.forward_gap_s, None]
    if any(gaps):
        gap_texts = [seconds_text(gap) if gap else "" for gap in gaps]
        rows.append([say("gaps"), say("between kernels"), "", *gap_texts, "", ""])
    used = [any(row[column] for row in rows[1:]) or column == 0 for column in range(len(rows[0]))]
    return [[cell for cell, is_used in zip(row, used, strict=True) if is_used] for row in rows]


def _forward_figures(operator: OperatorPass) -> list[str]:
    """FLOPs, seconds, and FLOPs a second."""
    seconds = operator.forward_s
    rate = flops_text(operator.flops / seconds) if seconds and operator.flops else ""
    return [flops_text(operator.flops) if operator.flops else "", seconds_text(seconds) if seconds else "", rate]


def _backward_figures(operator: OperatorPass) -> list[str]:
    """FLOPs; seconds of a forward that runs only in the backward, of the input gradient, of the weight gradient, and of
    recomputation."""
    again_s = None if operator.forward_s is None else operator.repeated * operator.forward_s
    flops = operator.backward_flops + operator.repeated * operator.flops
    times = (operator.late_s, operator.input_grad_s, operator.weight_grad_s, again_s)
    return [flops_text(flops) if flops else "", *(seconds_text(seconds) if seconds else "" for seconds in times)]


def _computed(operator: OperatorPass, backward: bool) -> list[str]:
    """A line for each product of an operator in this pass, or else one for its memory traffic."""
    if operator.pairs:
        return [say("{pairs} pairs of query and key", pairs=number_text(operator.pairs))]
    if operator.products:
        return [_shape(p) for p in operator.products]
    moved_bytes = (
        operator.backward_moved_bytes + operator.repeated * operator.moved_bytes if backward else operator.moved_bytes
    )
    return [say("reads and writes {bytes}", bytes=bytes_text(round(moved_bytes)))] if moved_bytes else [""]


def _shape(p: MatrixProduct) -> str:
    shape = f"{number_text(float(p.rows))} x {number_text(float(p.inner))} x {number_text(float(p.columns))}"
    return shape if float(p.batch) == 1 else say("{count} of {shape}", count=number_text(float(p.batch)), shape=shape)


def _collective_cells(collective: Collective) -> tuple[str, str, str]:
    """A collective, the seconds that it takes by itself, and those that no computing hides; empty if unknown."""
    size: str = say("nothing in our runtime")
    if collective.calls:
        size = bytes_text(round(collective.full_bytes / collective.calls))
    text = say(
        "{collective} over {axis} of {calls}{size}",
        collective=collective.kind,
        axis=collective.axis,
        calls=f"{collective.calls} x " if collective.calls > 1 else "",
        size=size,
    )
    if collective.seconds is None or collective.exposed_s is None:
        return text, "", ""
    return text, seconds_text(collective.seconds), seconds_text(collective.exposed_s)


def layout_parts(regions: Sequence[RegionLayout]) -> Iterator[Part]:
    """Tables of the parameters and activations of each piece: the shape of each full tensor, and how it is sharded."""
    for region in regions:
        for title, tensors in (("parameters", region.parameters), ("activations", region.activations)):
            if tensors:
                yield say("{piece}, {kind}:", piece=fixed(region.name), kind=say(title))
                yield AlignedRows(_rows(tensors), left=range(4))


def _rows(tensors: Iterable[TensorLayout]) -> list[list[str]]:
    """A header; then each tensor with the dims of the whole, above a row for each group of states sharded alike."""
    rows: list[list[str]] = [[say("state"), "DTensor", "SBP", "GSPMD"]]
    for tensor in tensors:
        dims = " x ".join(f"{name} {size:,}" for name, size in zip(tensor.dims, tensor.shape, strict=True))
        name: str = say("{name} (expected)", name=tensor.name) if tensor.rows_vary else tensor.name
        rows.append([say("{name}: {dims}", name=name, dims=dims)])
        for states in _alike(tensor):
            other_states = [state for state in tensor.states if state not in states]
            states_shown: str = say("{listed}", listed=tuple(map(fixed, states)))
            if len(states) > 2:
                others = tuple(map(fixed, other_states))
                states_shown = say("all but {states}", states=others) if other_states else "all"
            split_over = [p for p in tensor.states[states[0]] if p.size > 1]
            dtensor = ", ".join(f"{p.axis} {p.dtensor}" for p in split_over) or say("whole")
            sbp = " ".join(f"{p.axis} {p.sbp}" for p in split_over) or say("whole")
            rows.append([say("  {states}", states=states_shown), dtensor, sbp, tensor.gspmd(states[0])])
    return rows


def _alike(tensor: TensorLayout) -> list[list[str]]:
    """The states of a tensor, grouped by equal placement."""
    groups: dict[tuple[TensorPlacement, ...], list[str]] = {}
    for state, placements in tensor.states.items():
        groups.setdefault(placements, []).append(state)
    return list(groups.values())


def layout_dict(regions: Sequence[RegionLayout]) -> list[dict[str, Any]]:
    """The layout as plain data, with axes of one rank too."""
    return [
        {
            "region": region.name,
            "stage": region.stage,
            "parameters": [_tensor_dict(tensor) for tensor in region.parameters],
            "activations": [_tensor_dict(tensor) for tensor in region.activations],
        }
        for region in regions
    ]


def _tensor_dict(tensor: TensorLayout) -> dict[str, Any]:
    states = {
        state: {
            "dtensor": {p.axis: p.dtensor for p in placements},
            "sbp": {p.axis: p.sbp for p in placements},
            "gspmd": tensor.gspmd(state),
        }
        for state, placements in tensor.states.items()
    }
    return {"name": tensor.name, "dims": tensor.dims, "shape": tensor.shape, "states": states}


def crossings_table(crossings: Sequence[Crossing], words: LinkWords, crosses: bool) -> AlignedRows:
    """A table with a row for each collective on each axis, and a last row with their sums.

    `crosses` is True if ranks are on several domains of fast links: then a column has the bytes between domains.
    """
    has_times = any(crossing.seconds is not None for crossing in crossings)
    names = ("when", "axis", "collective", "ranks", "calls", "tensor a call")
    rows: list[list[str]] = [[*map(say, names)]]
    inside = say("inside {domains}", domains=fixed(words.domains))
    rows[0] += [inside, fixed(words.between)] if crosses else [say("sent")]
    rows[0] += [say("by itself"), say("exposed")] if has_times else []
    for c in crossings:
        rows.append(
            [
                fixed(c.phase),
                c.axis,
                c.kind,
                str(c.num_ranks),
                number_text(c.calls),
                _size(c.full_bytes / max(1, c.calls)),
            ]
        )
        rows[-1] += _size_and_time(c.sent, c.seconds, c.exposed_s, has_times, crosses=crosses)
    total_sent = sum((c.sent for c in crossings), SentBytes())
    seconds, exposed = total_s(c.seconds for c in crossings), total_s(c.exposed_s for c in crossings)
    rows.append(
        [say("all"), "", "", "", "", "", *_size_and_time(total_sent, seconds, exposed, has_times, crosses=crosses)]
    )
    return AlignedRows(rows, left=(0, 1, 2))


def _size_and_time(
    sent: SentBytes, seconds: float | None, exposed: float | None, has_times: bool, *, crosses: bool
) -> list[str]:
    times = ["" if value is None else seconds_text(value) for value in (seconds, exposed)] if has_times else []
    return [*([_size(sent.inside), _size(sent.between)] if crosses else [_size(sent.total)]), *times]


def _size(num_bytes: float) -> str:
    return bytes_text(round(num_bytes)) if num_bytes else "-"
