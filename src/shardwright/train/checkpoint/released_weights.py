"""Weights of a released model as the initial values of a run: straight from its files into the boxes of any plan.

What a rank holds of a tensor is read, and nothing else, some MiB at a time: memory beside the boxes is that of a slab.
"""

from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor

from shardwright.config.base import PlanError
from shardwright.config.hugging_face.config_json import MERGE
from shardwright.config.model import ModelSpec
from shardwright.config.units import MIB
from shardwright.parallel.tensor.initial_values import Initial
from shardwright.sharding.hugging_face.layout import Layout, choice_biases, copies, layout_of, tied_head
from shardwright.sharding.hugging_face.released_piece import ReleasedPiece
from shardwright.sharding.parameter_shard import Box, ParameterShard
from shardwright.sharding.row_boxes import cut_rows
from shardwright.train.checkpoint.released_files import ReleasedFiles, is_floating, listed

_MOST_ELEMENTS = 4 * MIB  # of a slab
_ROWS_COMPARED = 1024  # of two tables: those of a head that was trained by itself differ in every row


class ReleasedWeights:
    """The weights of a folder, of a model of a family. Calling it writes elements of a box, as `Initial` says."""

    def __init__(self, folder: Path, family: str, model: ModelSpec) -> None:
        """Raises PlanError with every tensor that is missing, of another shape, or of no place."""
        self.files = ReleasedFiles(folder)
        self.layout = layout_of(family, model)
        self.biases = choice_biases(family, model)
        self.prefix = _prefix(self.files, self.layout)
        _refuse(self, copies(family, model), tied_head(family, model))

    def as_initial(self) -> Initial:
        """The initial values of a run, in place of random ones."""
        return self.write

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
            slab = torch.empty(rows.shape)
            self._read(place.name, rows.box, slab)
            of_both = slice(max(low, start), min(high, stop))
            out[of_both.start - start : of_both.stop - start].copy_(
                slab.view(-1)[of_both.start - low : of_both.stop - low]
            )
        self.files.forget()

    def choice_bias(self, block: int) -> Tensor | None:
        """The biases of a block's router, float32, if the model has such."""
        piece = self.biases.get(block)
        return None if piece is None else self.files.view(self.prefix + piece.name).float()

    def _read(self, name: str, box: Box, out: Tensor) -> None:
        """Fill a box of one of our tensors."""
        for piece in self.layout[name]:
            both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, piece.region, strict=True))
            if all(low < high for low, high in both):
                at = tuple(slice(low - a, high - a) for (low, high), (a, _) in zip(both, box, strict=True))
                copy_part(piece, self.files.view(self.prefix + piece.name), both, out[at])


def seen(piece: ReleasedPiece, theirs: Tensor) -> Tensor:
    """A tensor of theirs as the region of ours that it fills, but for the order of pairs: a view."""
    if piece.may_be_longer:
        theirs = theirs[: piece.shape[0]]
    if piece.cut is not None:
        theirs = theirs.narrow(piece.cut_dim, piece.cut[0], piece.cut[1] - piece.cut[0])
    return theirs.reshape(piece.view).permute(piece.order) if theirs.is_contiguous() else _split(piece, theirs)


def _split(piece: ReleasedPiece, theirs: Tensor) -> Tensor:
    """A part of a tensor whose last dim was cut, with that dim split as the view says."""
    dims = len(theirs.shape) - 1
    return theirs.unflatten(dims, piece.view[dims:]).permute(piece.order)


def copy_part(piece: ReleasedPiece, theirs: Tensor, part: Box, out: Tensor) -> None:
    """Copy a part of a piece's region, given in coordinates of our tensor, from theirs."""
    at = [slice(low - a, high - a) for (low, high), (a, _) in zip(part, piece.region, strict=True)]
    values = seen(piece, theirs)
    if piece.interleaved:
        order = torch.tensor(list(_pairs(piece)))[at[piece.pairs_dim]]
        at[piece.pairs_dim] = slice(None)
        out.copy_(values[tuple(at)].index_select(piece.pairs_dim, order))
    else:
        out.copy_(values[tuple(at)])
    if piece.plus:
        out.add_(piece.plus)


def paste_part(piece: ReleasedPiece, values: Tensor, part: Box, theirs: Tensor) -> None:
    """Put a part of a piece's region, given in coordinates of our tensor, where it lies in theirs."""
    at: list[slice | Tensor] = [
        slice(low - a, high - a) for (low, high), (a, _) in zip(part, piece.region, strict=True)
    ]
    if piece.plus:
        values = values - piece.plus
    view = seen(piece, theirs)
    if piece.interleaved:
        low, high = part[piece.pairs_dim]
        start = piece.region[piece.pairs_dim][0]
        order = torch.tensor(list(_pairs(piece))[low - start : high - start])
        whole = [at[dim] if dim != piece.pairs_dim else slice(None) for dim in range(len(at))]
        view[tuple(whole)].index_copy_(piece.pairs_dim, order, values.to(theirs.dtype))
    else:
        view[tuple(at)].copy_(values)


def _pairs(piece: ReleasedPiece) -> Iterator[int]:
    """Where element i of ours lies with them, along the dim of pairs."""
    start, stop = piece.region[piece.pairs_dim]
    half = piece.interleaved // 2
    for i in range(stop - start):
        yield i if i >= piece.interleaved else 2 * i if i < half else 2 * (i - half) + 1


def _prefix(files: ReleasedFiles, layout: Layout) -> str:
    """The prefix of all names if a model of several kinds of input has the decoder within; empty otherwise."""
    first = next(iter(layout.values()))[0].name
    for found in files.tensors:
        if found.endswith(first):
            return found.removesuffix(first)
    return ""


def _refuse(weights: ReleasedWeights, copied: dict[str, str], tied: tuple[str, str] | None) -> None:
    """PlanError where files and model do not agree."""
    tensors, prefix, faults = weights.files.tensors, weights.prefix, list[str]()
    pieces = [piece for of in weights.layout.values() for piece in of] + list(weights.biases.values())
    wanted = {prefix + piece.name: piece for piece in pieces}
    packed = [name for name in tensors if name.startswith(prefix) and name.endswith("_blocks")]
    if packed and (missing := [name for name in wanted if name + "_blocks" in tensors]):
        faults.append(f"{listed(missing)} are quantised (MXFP4); {_plainly(weights)}")
    elif missing := [name for name in wanted if name not in tensors]:
        why = _why(missing, tensors)
        faults.append(f"{len(missing):,} of {len(wanted):,} tensors are missing: {listed(missing)}; {why}")
    for name, piece in wanted.items():
        stored = tensors.get(name)
        if stored is not None and not piece.fits(stored.shape):
            faults.append(f"{name} is {list(stored.shape)} and should be {list(piece.shape)} for this model")
        elif stored is not None and not is_floating(stored):
            faults.append(f"{name} is of {stored.dtype}, a quantised number type; {_plainly(weights)}")
    known = {*wanted, *(prefix + name for name in copied)}
    # A model's head does not lie within the decoder, which has a prefix where it is a part.
    heads = {} if tied is None else {at + tied[0]: prefix + tied[1] for at in ("", prefix)}
    for head, table in heads.items():
        if head in tensors and table in tensors and tensors[table].shape == wanted[table].shape:
            known.add(head)
            faults += _unlike(weights.files, head, table)
    of_decoder = [name for name in tensors if name.startswith(prefix) and name not in known and _is_weight(name)]
    if of_decoder and not prefix:
        faults.append(
            f"{len(of_decoder):,} tensors have no place in this model: {listed(of_decoder)}; check the folder"
        )
    if faults:
        raise PlanError(f"weights {weights.files.folder}", faults)


def _unlike(files: ReleasedFiles, head: str, table: str) -> list[str]:
    """The fault of a head that should be the table of embeddings and is another matrix, as some rows show."""
    ours, theirs = files.view(head), files.view(table)
    rows = slice(None, None, max(1, len(theirs) // _ROWS_COMPARED))
    if ours.shape == theirs.shape and torch.equal(ours[rows].float(), theirs[rows].float()):
        files.forget()
        return []
    return [
        f"{head} is not {table}, and config.json says that it is (tie_word_embeddings is true, or not there); set "
        "tie_word_embeddings to false there if the head is a matrix of its own, or take that tensor out"
    ]


def _is_weight(name: str) -> bool:
    """True if a tensor is a weight: older files have masks and frequencies too, which follow from the configuration."""
    return not name.endswith(("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "masked_bias"))


def _plainly(weights: ReleasedWeights) -> str:
    return f"run shardwright convert {weights.files.folder} --to OUT, and begin with that"


def _why(missing: list[str], tensors: Collection[str]) -> str:
    if any(name.endswith((".qweight", ".weight_packed")) for name in tensors):
        return "the folder has weights quantised as by GPTQ or AWQ, which are not read: name the plain ones"
    if any(".lora_" in name for name in tensors):
        return f"the folder has {MERGE}"
    if any("lm_head" in name or "embed_out" in name for name in missing) and len(missing) == 1:
        return "the model may be one whose head is its table: set model.tied_embeddings = true"
    return "check that the folder is of this model"
