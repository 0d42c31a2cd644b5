"""Weights of a released model as the initial values of a run, read from its files into the boxes of any plan.

A rank reads only the parts of tensors that it holds: besides the boxes it needs memory for one buffer of at most 16
MiB. A released tensor is one of the files; a model tensor is a parameter of Shardwright's model. Pieces map one to the
other (sharding/hugging_face/released_piece.py).
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from shardwright.config.base import PlanError
from shardwright.config.hugging_face.config_json import MERGE
from shardwright.config.model import ModelSpec
from shardwright.config.phrase import say
from shardwright.config.units import MIB
from shardwright.sharding.hugging_face.layout import (
    Layout,
    copies,
    correction_biases,
    family_of_files,
    layout_of,
    tied_head,
)
from shardwright.sharding.hugging_face.released_piece import ReleasedPiece
from shardwright.sharding.parameter_shard import Box, ParameterShard
from shardwright.sharding.row_boxes import cut_rows, overlap
from shardwright.train.checkpoint.released_files import ReleasedFiles, is_floating, listed

# Beginnings of names of tensors for other kinds of input, in models of several kinds whose decoder has no prefix.
_OTHER_INPUTS = ("visual.", "vision_tower.", "vision_model.", "audio_tower.", "multi_modal_projector.")
_MOST_ELEMENTS = 4 * MIB  # of the buffer
_ROWS_COMPARED = 1024  # rows of head and table that are compared: if the head is a matrix of its own, every row differs


class ReleasedTensors:
    """The tensors in a folder, and the pieces of a model's tensors that they are. `write` is an `Initial`: it writes
    elements of a box."""

    def __init__(self, files: ReleasedFiles, layout: Layout, prefix: str = "") -> None:
        self.files, self.layout, self.prefix = files, layout, prefix

    def write(self, place: ParameterShard, start: int, out: Tensor) -> None:
        """Write elements start, start + 1, ... of a box to a flat tensor."""
        width = place.shape[-1] if len(place.shape) > 1 else 1
        stop = start + out.numel()
        first, end = start // width, -(-stop // width)
        for rows in cut_rows(place.box, first, end, _MOST_ELEMENTS):
            low, high = rows.first * width, rows.end * width
            if start <= low and high <= stop and out.dtype == torch.float32:
                self._read(place.name, rows.box, out[low - start : high - start].view(rows.shape))
                continue
            buffer = torch.empty(rows.shape)
            self._read(place.name, rows.box, buffer)
            common = slice(max(low, start), min(high, stop))
            out[common.start - start : common.stop - start].copy_(
                buffer.view(-1)[common.start - low : common.stop - low]
            )
        self.files.forget()

    def stored_name(self, piece: ReleasedPiece) -> str:
        """The name in the files of a decoder's tensor, which may be a part of a larger model's: with the prefix of the
        decoder, or without it for a head that lies outside."""
        name = self.prefix + piece.name
        return piece.name if name not in self.files.tensors and piece.name in self.files.tensors else name

    def _read(self, name: str, box: Box, out: Tensor) -> None:
        """Fill `out` with a box of the model tensor `name`."""
        for piece in self.layout[name]:
            if (common := overlap(box, piece.region)) is not None:
                slices = tuple(slice(low - a, high - a) for (low, high), (a, _) in zip(common, box, strict=True))
                copy_part(piece, self.files.view(self.stored_name(piece)), common, out[slices])


class ReleasedWeights(ReleasedTensors):
    """The weights in a folder, for a model of a family."""

    def __init__(self, folder: Path, family: str, model: ModelSpec) -> None:
        """Raises PlanError with every tensor that is missing, has another shape, or has no place in the model."""
        files = ReleasedFiles(folder)
        family = family_of_files(family, model, {name: stored.shape for name, stored in files.tensors.items()})
        layout = layout_of(family, model)
        super().__init__(files, layout, _prefix(files, layout))
        self.correction_biases = correction_biases(family, model)
        _check_files_fit_model(self, copies(family, model), tied_head(family, model))

    def correction_bias(self, block: int) -> Tensor | None:
        """The score-correction biases of a block's router, [experts] in float32; None if the model has none."""
        piece = self.correction_biases.get(block)
        return None if piece is None else self.files.view(self.stored_name(piece)).float().reshape(piece.view)


def _region_view(piece: ReleasedPiece, released: Tensor) -> Tensor:
    """A released tensor as a view with the shape of the region that it fills in the model tensor. Interleaved pairs
    keep the order of the released tensor."""
    if piece.may_be_longer:
        released = released[: piece.shape[0]]
    if piece.cut_range is not None:
        released = released.narrow(piece.cut_dim, piece.cut_range[0], piece.cut_range[1] - piece.cut_range[0])
    return released.reshape(piece.view).permute(piece.order) if released.is_contiguous() else _split(piece, released)


def _split(piece: ReleasedPiece, released: Tensor) -> Tensor:
    """A released tensor with a narrowed last dim, as a view with that dim split; a reshape would copy it."""
    last_dim = len(released.shape) - 1
    return released.unflatten(last_dim, piece.view[last_dim:]).permute(piece.order)


def copy_part(piece: ReleasedPiece, released: Tensor, part: Box, out: Tensor) -> None:
    """Copy a part of a piece's region, in coordinates of the model tensor, from the released tensor."""
    slices = [slice(low - a, high - a) for (low, high), (a, _) in zip(part, piece.region, strict=True)]
    values = _region_view(piece, released)
    if piece.interleaved:
        order = torch.tensor(list(_pairs(piece)))[slices[piece.pairs_dim]]
        slices[piece.pairs_dim] = slice(None)
        out.copy_(values[tuple(slices)].index_select(piece.pairs_dim, order))
    else:
        out.copy_(values[tuple(slices)])
    if piece.plus:
        out.add_(piece.plus)


def paste_part(piece: ReleasedPiece, values: Tensor, part: Box, released: Tensor) -> None:
    """Write a part of a piece's region, in coordinates of the model tensor, to its place in the released tensor."""
    slices: list[slice | Tensor] = [
        slice(low - a, high - a) for (low, high), (a, _) in zip(part, piece.region, strict=True)
    ]
    if piece.plus:
        values = values - piece.plus
    view = _region_view(piece, released)
    if piece.interleaved:
        low, high = part[piece.pairs_dim]
        start = piece.region[piece.pairs_dim][0]
        order = torch.tensor(list(_pairs(piece))[low - start : high - start])
        all_pairs = [slices[dim] if dim != piece.pairs_dim else slice(None) for dim in range(len(slices))]
        view[tuple(all_pairs)].index_copy_(piece.pairs_dim, order, values.to(released.dtype))
    else:
        view[tuple(slices)].copy_(values)


def _pairs(piece: ReleasedPiece) -> Iterator[int]:
    """For each element of the region along the dim of pairs, its index in the released tensor."""
    start, stop = piece.region[piece.pairs_dim]
    half = piece.interleaved // 2
    for i in range(stop - start):
        yield i if i >= piece.interleaved else 2 * i if i < half else 2 * (i - half) + 1


def _prefix(files: ReleasedFiles, layout: Layout) -> str:
    """The prefix of the decoder's tensors in a multimodal model; "" if it has none."""
    first = next(iter(layout.values()))[0].name
    for name in files.tensors:
        if name.endswith(first):
            return name.removesuffix(first)
    return ""


def _check_files_fit_model(
    weights: ReleasedWeights, duplicate_names: dict[str, str], tied: tuple[str, str] | None
) -> None:
    """Raise PlanError if the files do not fit the model. `duplicate_names` are released tensors that repeat others."""
    tensors, prefix, faults = weights.files.tensors, weights.prefix, list[str]()
    released_pieces = [piece for tensor_pieces in weights.layout.values() for piece in tensor_pieces]
    released_pieces += weights.correction_biases.values()
    expected_pieces = {weights.stored_name(piece): piece for piece in released_pieces}
    packed_names = [name for name in tensors if name.startswith(prefix) and name.endswith("_blocks")]
    if packed_names and (quantised_names := [name for name in expected_pieces if name + "_blocks" in tensors]):
        faults.append(
            say(
                "{names} are quantised (MXFP4); {way_out}",
                names=listed(quantised_names),
                way_out=_convert_hint(weights),
            )
        )
    elif missing_names := [name for name in expected_pieces if name not in tensors]:
        way_out = _way_out(missing_names, tensors)
        share = say("{count:,} of {total:,} tensors", count=len(missing_names), total=len(expected_pieces))
        faults.append(
            say(
                "{share} are missing: {missing}; {way_out}", share=share, missing=listed(missing_names), way_out=way_out
            )
        )
    faults += _piece_faults(weights, expected_pieces)
    known_names = {*expected_pieces, *(prefix + name for name in duplicate_names)}
    # If the decoder's tensors have a prefix, the head may have none, because it may lie outside the decoder.
    heads = {} if tied is None else {head_prefix + tied[0]: prefix + tied[1] for head_prefix in ("", prefix)}
    for head, table in heads.items():
        if head in tensors and table in tensors and tensors[table].shape == expected_pieces[table].shape:
            known_names.add(head)
            faults += _untied_head(weights.files, head, table)
    # With a prefix the decoder is a part of a larger model, whose other tensors may begin with that prefix, too.
    unknown_names = [
        name
        for name in tensors
        if name.startswith(prefix)
        and name not in known_names
        and _is_weight(name)
        and not name.startswith(_OTHER_INPUTS)
    ]
    if unknown_names and not prefix:
        faults.append(
            say(
                "{count:,} tensors have no place in this model: {names}; check the folder",
                count=len(unknown_names),
                names=listed(unknown_names),
            )
        )
    if faults:
        raise PlanError(say("weights {folder}", folder=str(weights.files.folder)), faults)


def _piece_faults(weights: ReleasedWeights, expected_pieces: Mapping[str, ReleasedPiece]) -> list[str]:
    """The faults of tensors with another shape, or with a number type of a quantisation."""
    faults = list[str]()
    for name, piece in expected_pieces.items():
        stored = weights.files.tensors.get(name)
        if stored is not None and not piece.fits(stored.shape):
            faults.append(
                say(
                    "{name} is {shape} and should be {wanted} for this model",
                    name=name,
                    shape=list(stored.shape),
                    wanted=list(piece.shape),
                )
            )
        elif stored is not None and not is_floating(stored):
            faults.append(
                say(
                    "{name} is of {dtype}, a quantised number type; {way_out}",
                    name=name,
                    dtype=stored.dtype,
                    way_out=_convert_hint(weights),
                )
            )
    return faults


def _untied_head(files: ReleasedFiles, head: str, table: str) -> list[str]:
    """The fault if a head should be tied to the table of embeddings, but some of its rows differ; else no fault."""
    head_rows, table_rows = files.view(head), files.view(table)
    rows = slice(None, None, max(1, len(table_rows) // _ROWS_COMPARED))
    if head_rows.shape == table_rows.shape and torch.equal(head_rows[rows].float(), table_rows[rows].float()):
        files.forget()
        return []
    return [
        say(
            "{head} is not {table}, and config.json says that it is (tie_word_embeddings is true, or not there); set "
            "tie_word_embeddings to false there if the head is a matrix of its own, or take that tensor out",
            head=head,
            table=table,
        )
    ]


def _is_weight(name: str) -> bool:
    """True if a tensor is a weight. Older files also have masks and frequencies, which follow from config.json."""
    return not name.endswith(("inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "masked_bias"))


def _convert_hint(weights: ReleasedWeights) -> str:
    return say("run shardwright convert {folder} --to OUT, and begin with that", folder=str(weights.files.folder))


def _way_out(missing: list[str], tensors: Collection[str]) -> str:
    """The advice for a folder with missing tensors, by its probable cause."""
    if any(name.endswith((".qweight", ".weight_packed")) for name in tensors):
        return say("the folder has weights quantised as by GPTQ or AWQ, which are not read: name the plain ones")
    if any(".lora_" in name for name in tensors):
        return say("the folder has {merge}", merge=MERGE)
    if any("lm_head" in name or "embed_out" in name for name in missing) and len(missing) == 1:
        return say("the model may be one whose head is its table: set model.tied_embeddings = true")
    return say("check that the folder is of this model")
