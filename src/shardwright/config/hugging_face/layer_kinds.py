"""Layers that attend within a window and layers that know no positions: rules behind lists of layers."""

from collections.abc import Callable, Sequence

from shardwright.config import largest
from shardwright.config.base import shortened
from shardwright.config.hugging_face.decoder_fields import Fields
from shardwright.config.hugging_face.reading import Reading

_FULL, _SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_WITHIN = {_SLIDING: False, CHUNKED: True}  # whether windows are chunks


def window(
    r: Reading, size: int, layers: int, is_full: Callable[[int], bool] = lambda layer: False, kind: str = _SLIDING
) -> Fields:
    """Fields of [model.window], of a window of `size` tokens, where layer_types says which layers have it: else all
    but those of which `is_full` is true, of some `kind`. More layers than a model may have are told later, and not
    looked at here."""
    if layers > largest.LAYERS:
        return {}
    kinds = r.words("layer_types") or [_FULL if is_full(layer) else kind for layer in range(layers)]
    if unknown := sorted({kind for kind in kinds if kind not in (_FULL, *_WITHIN)}):
        r.fault(
            f"layer_types has {shortened(unknown[0])!r}, which can't be expressed; name kinds of layers that "
            "attend to all, or in windows"
        )
        return {}
    if len(kinds) != layers:
        r.fault(f"layer_types has {len(kinds)} entries, and num_hidden_layers is {layers}; name each layer once")
        return {}
    within = [kind != _FULL for kind in kinds]
    if not any(within) or not size:
        return {}
    rule = _rule(within)
    if rule is None:
        r.fault(
            f"layer_types has windows in layers {shortened(str([i for i, one in enumerate(within) if one]))}, which no "
            "rule of first_full and full_every gives: the first so many attend to all, or every so many-th does; set "
            "layer_types to one of these"
        )
        return {}
    chunked = _WITHIN[next(kind for kind in kinds if kind != _FULL)]
    return {"window": {"size": size} | rule | ({"chunked": True} if chunked else {})}


def _rule(within: Sequence[bool]) -> Fields | None:
    """first_full and full_every that make these layers attend within windows, or None. full_every counts all layers."""
    layers = len(within)
    first = within.index(True)
    if all(within[first:]) and not any(within[:first]):
        return {"first_full": first} if first else {}
    every = within.index(False) + 1
    return {"full_every": every} if list(within) == [(layer + 1) % every != 0 for layer in range(layers)] else None


def without_positions(r: Reading, layers: int, usual_every: int) -> Fields:
    """no_rotary_every, from no_rope_layers (1 where a layer has positions) or no_rope_layer_interval."""
    every = r.count("no_rope_layer_interval", usual_every)
    listed = r.counts("no_rope_layers")
    if not listed:
        return {"no_rotary_every": every} if every else {}
    if len(listed) != layers:
        r.fault(f"no_rope_layers has {len(listed)} entries, and num_hidden_layers is {layers}; name each layer once")
    has = [bool(one) for one in listed]
    if all(has):
        return {}
    every = has.index(False) + 1
    if has != [(layer + 1) % every != 0 for layer in range(len(has))]:
        r.fault("no_rope_layers has no rule; set every so many-th layer to be without positions, or none")
    return {"no_rotary_every": every}
