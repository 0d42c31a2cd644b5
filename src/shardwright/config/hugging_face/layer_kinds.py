"""Layers with a window and layers without positions: the rules of [model] that give the lists of layers."""

from collections.abc import Callable, Sequence

from shardwright.config import largest
from shardwright.config.base import shortened
from shardwright.config.hugging_face.config_reader import ConfigReader
from shardwright.config.hugging_face.decoder_fields import Fields
from shardwright.config.phrase import both, say

_FULL, _SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_IS_CHUNKED = {_SLIDING: False, CHUNKED: True}  # kinds of layers with windows; True if windows are chunks


def window(
    r: ConfigReader, size: int, layers: int, is_full: Callable[[int], bool] = lambda layer: False, kind: str = _SLIDING
) -> Fields:
    """The field `window` for a window of `size` tokens. layer_types gives the layers with a window; without that key,
    all layers except those for which `is_full` is true have a window of the kind `kind`. Empty if no layer has one,
    after a fault, or if there are more layers than a model may have, which is reported later."""
    if layers > largest.LAYERS:
        return {}
    kinds = r.words("layer_types") or [_FULL if is_full(layer) else kind for layer in range(layers)]
    if unknown := sorted({kind for kind in kinds if kind not in (_FULL, *_IS_CHUNKED)}):
        r.fault(
            say(
                "layer_types has {kind}, which can't be expressed; name kinds of layers that attend to all, or in "
                "windows",
                kind=repr(shortened(unknown[0])),
            )
        )
        return {}
    if len(kinds) != layers:
        r.fault(_not_each_once("layer_types", len(kinds), layers))
        return {}
    has_window = [kind != _FULL for kind in kinds]
    if not any(has_window) or not size:
        return {}
    rule = _rule(has_window)
    if rule is None:
        windowed = [layer for layer, has in enumerate(has_window) if has]
        r.fault(
            say(
                "layer_types has windows in layers {layers}, which no rule of first_full and full_every gives: the "
                "first so many attend to all, or the first or last of every so many does; set layer_types to one of "
                "these",
                layers=shortened(str(windowed)),
            )
        )
        return {}
    windows = sorted({kind for kind in kinds if kind != _FULL})
    if len(windows) > 1:
        r.fault(
            say(
                "layer_types has {kinds}, and all windows of a model are of one kind; use one of them",
                kinds=both(windows),
            )
        )
        return {}
    chunked = _IS_CHUNKED[windows[0]]
    return {"window": {"size": size} | rule | ({"chunked": True} if chunked else {})}


def window_in_all(r: ConfigReader, size: int, layers: int) -> Fields:
    """The field `window` of a family whose layers all have a window of `size` tokens, or none if that is 0, whatever
    layer_types says: so that may not say anything else."""
    if size and set(r.words("layer_types") or ()) - {_SLIDING}:
        r.fault(
            say(
                "layer_types has layers without windows, and in this family all have one; leave layer_types out, or "
                "set model_type to one whose layers may differ, such as ministral or qwen3"
            )
        )
    r.ignore("layer_types")
    return {"window": {"size": size}} if size and layers <= largest.LAYERS else {}


def _not_each_once(name: str, count: int, layers: int) -> str:
    """The fault of a list that should name each layer once."""
    return say(
        "{name} has {count} entries, and num_hidden_layers is {layers}; name each layer once",
        name=name,
        count=count,
        layers=layers,
    )


def _rule(has_window: Sequence[bool]) -> Fields | None:
    """The fields first_full, or full_every with full_first, that give these layers windows; None if no such rule
    exists. full_every counts all layers."""
    layers = len(has_window)
    first = has_window.index(True)
    if all(has_window[first:]) and not any(has_window[:first]):
        return {"first_full": first} if first else {}
    if not has_window[0] and False in has_window[1:]:
        every = has_window.index(False, 1)
        is_first = list(has_window) == [layer % every != 0 for layer in range(layers)]
        return {"full_every": every, "full_first": True} if is_first else None
    every = has_window.index(False) + 1
    return {"full_every": every} if list(has_window) == [(layer + 1) % every != 0 for layer in range(layers)] else None


def without_positions(r: ConfigReader, layers: int) -> Fields:
    """The field no_rotary_every, from no_rope_layers (1 for a layer with positions) or no_rope_layer_interval."""
    every = r.count("no_rope_layer_interval", 4)
    flags = r.counts("no_rope_layers")
    if not flags:
        return {"no_rotary_every": every} if every else {}
    if len(flags) != layers:
        r.fault(_not_each_once("no_rope_layers", len(flags), layers))
    has_positions = [bool(flag) for flag in flags]
    if all(has_positions):
        return {}
    every = has_positions.index(False) + 1
    if has_positions != [(layer + 1) % every != 0 for layer in range(len(has_positions))]:
        r.fault(say("no_rope_layers has no rule; set every so many-th layer to be without positions, or none"))
    return {"no_rotary_every": every}
