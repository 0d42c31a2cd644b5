"""Rotary positions as fields of [model]: their base, the number of rotary elements, their scaling.

Released configurations have one of two forms: the keys rope_theta, rope_scaling and partial_rotary_factor side by side;
or rope_parameters with all of these within it, and one section per kind of layer if kinds differ.
"""

from shardwright.config.hugging_face.config_reader import ConfigReader
from shardwright.config.hugging_face.decoder_fields import Fields
from shardwright.config.phrase import say
from shardwright.config.rotary_scaling import RotaryScalingSpec

_ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
_TRAINED = "original_max_position_embeddings"
_WORDS = {
    "default": "none",
    "su": "longrope",
    "longrope": "longrope",
    "linear": "linear",
    "yarn": "yarn",
    "llama3": "llama3",
    "dynamic": "none",
}


def rotary(
    r: ConfigReader,
    head: int,
    *,
    theta: str = "rope_theta",
    share: str = "partial_rotary_factor",
    in_part: bool = False,
    scales_scores: bool = False,
) -> Fields:
    """The fields rotary_base, rotary_dim and rotary_scaling for heads of `head` elements. `theta` and `share` are the
    older keys. A family that does not turn heads `in_part` turns all elements, whatever the keys say. With
    `scales_scores` yarn's mscale_all_dim scales the scores, as in DeepSeek's families."""
    fields = _fields(r, _parameters(r), head, (theta, share), scales_scores)
    if r.given.get("rotary_dim") == fields.get("rotary_dim", head):  # the same, said in elements
        r.ignore("rotary_dim")
    if "rotary_dim" in fields and not in_part:
        r.fault(
            say(
                "{share} makes {turned} of the {head} elements of a head turn, and this family turns all; set {share} "
                "to 1, or leave it out",
                share=share,
                turned=fields["rotary_dim"],
                head=head,
            )
        )
    return fields


def local_rotary(r: ConfigReader, head: int) -> Fields:
    """Fields of the rotary positions of layers with a window, if they differ from other layers; else empty."""
    local = r.section("rope_parameters").get("sliding_attention")
    return _fields(r, local, head, ("rope_theta", "partial_rotary_factor"), False) if isinstance(local, dict) else {}


def _parameters(r: ConfigReader) -> dict[str, object]:
    """The section with the rotary positions of layers that attend to all tokens."""
    # transformers takes the older section where a file has both, such as one that a user added.
    newer, older = r.section("rope_parameters"), r.section("rope_scaling")
    parameters = older or newer
    full_attention = parameters.get("full_attention")
    if isinstance(full_attention, dict):
        return full_attention
    # In a family whose configuration has this key outside the section, it goes before the same key inside.
    # So it does where channels have factors of their own (transformers' _compute_longrope_parameters).
    is_long = any(_WORDS.get(str(parameters.get(name))) == "longrope" for name in ("rope_type", "type"))
    if _TRAINED not in r.defaults and not (is_long and r.has(_TRAINED)):
        return parameters
    trained_sequence = r.count(_TRAINED)
    return parameters | ({_TRAINED: trained_sequence} if trained_sequence and parameters else {})


def _fields(
    r: ConfigReader, parameters: dict[str, object], head: int, older: tuple[str, str], scales_scores: bool
) -> Fields:
    """The fields of a section; `older` are the keys beside it that its base and its share of a head may have."""
    theta, share = older
    inner = ConfigReader(
        parameters,
        {
            "rope_theta": r.number(theta, 10000.0),
            "partial_rotary_factor": r.number(share, 1.0),
            _TRAINED: r.count("max_position_embeddings", 2048),
        },
    )
    inner.ignore(*_ATTENTION_KINDS)
    kind = inner.word_of("rope_type" if inner.has("rope_type") else "type", _WORDS, "default")
    fields: Fields = {"rotary_base": inner.number("rope_theta")}
    turned_share = inner.number("partial_rotary_factor")
    if not 0.0 <= turned_share <= 1.0:
        inner.fault(
            say(
                "partial_rotary_factor is {share:g}, and should be the share of a head that turns, 0 to 1",
                share=turned_share,
            )
        )
        turned_share = 1.0
    turned = int(head * turned_share)
    if turned != head:
        fields["rotary_dim"] = turned
    scaling = _scaling(inner, kind, r.count("max_position_embeddings", 2048), scales_scores)
    if scaling:
        fields["rotary_scaling"] = {"kind": kind} | scaling
    inner.ignore("rope_type", "type")
    r.faults += [say("{subject}: {fault}", subject="rope_parameters", fault=fault) for fault in inner.all_faults()]
    return fields


def _scaling(inner: ConfigReader, kind: str, longest: int, scales_scores: bool) -> Fields:
    """The fields of [model.rotary_scaling], from the keys of a kind of scaling; `longest` is the longest sequence."""
    trained = inner.count(_TRAINED)
    if kind == "none":
        inner.ignore("factor")
        return {}
    if kind == "linear":
        return {"factor": inner.number("factor", 1.0)}
    factor = inner.number("factor") if inner.has("factor") else longest / max(1, trained)
    fields: Fields = {"factor": factor, "trained_sequence": trained}
    if kind == "llama3":
        return fields | {"slow": inner.number("low_freq_factor", 1.0), "fast": inner.number("high_freq_factor", 4.0)}
    if inner.has("attention_factor"):
        fields["magnitude"] = inner.number("attention_factor")
    if kind == "longrope":
        short, long = (inner.numbers(name) for name in ("short_factor", "long_factor"))
        return fields | {"short_factors": short or [], "long_factors": long or []}
    fields |= {"fast": inner.number("beta_fast", 32.0), "slow": inner.number("beta_slow", 1.0)}
    magnitudes = _magnitudes(inner, factor, scales_scores)
    fields = magnitudes | fields  # attention_factor goes before what is computed
    if not inner.flag("truncate", True):
        fields["truncate"] = False
    return fields


def _magnitudes(inner: ConfigReader, factor: float, scales_scores: bool) -> Fields:
    """The fields of yarn's two magnitudes, of which 0 is none. Where they leave scores as they are, both together are
    a factor of cosines and sines."""
    values = {name: inner.number(name) for name in ("mscale", "mscale_all_dim")}
    mscale, mscale_all_dim = (
        inner.checked(name, value, value >= 0, say("a number, not negative"), 0.0) for name, value in values.items()
    )
    if scales_scores and mscale_all_dim:
        return {"mscale_all_dim": mscale_all_dim} | (
            {"mscale": mscale} if mscale else {"magnitude": _turned_magnitude(factor, 1.0, 0.0)}
        )
    both = mscale and mscale_all_dim
    return {"magnitude": _turned_magnitude(factor, mscale, mscale_all_dim)} if both else {}


def _turned_magnitude(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """The factor of cosines and sines by yarn's formula, which is 1 for a factor of at most 1."""
    scaling = RotaryScalingSpec.model_construct(
        kind="yarn", factor=max(1.0, factor), mscale=mscale, mscale_all_dim=mscale_all_dim, magnitude=0.0
    )
    return scaling.turned_magnitude
