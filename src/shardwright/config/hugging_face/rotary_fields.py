"""Rotary positions: their base, how many elements turn, and how they are stretched, as fields of [model].

Released configurations say it in two ways: rope_theta, rope_scaling and partial_rotary_factor side by side; or
rope_parameters with all of it within, one for each kind of layer where these differ.
"""

from shardwright.config.hugging_face.decoder_fields import Fields
from shardwright.config.hugging_face.reading import Reading

_STRETCHED = ("full_attention", "sliding_attention", "chunked_attention")
_WORDS = {"default": "none", "su": "longrope", "longrope": "longrope", "linear": "linear", "yarn": "yarn",
          "llama3": "llama3", "dynamic": "none"}  # fmt: skip


def rotary(
    r: Reading, head: int, *, theta: str = "rope_theta", share: str = "partial_rotary_factor", in_part: bool = False
) -> Fields:
    """rotary_base, rotary_dim and rotary_scaling of heads of `head` elements, whose older keys are `theta` and
    `share`. Of a family that does not turn heads `in_part` all of them are turned, whatever the keys say."""
    fields = _fields(r, _parameters(r), head, theta, share)
    if "rotary_dim" in fields and not in_part:
        r.fault(
            f"{share} makes {fields['rotary_dim']} of the {head} elements of a head turn, and this family turns all; "
            f"set {share} to 1, or leave it out"
        )
    return fields


def local_rotary(r: Reading, head: int) -> Fields:
    """Fields of layers that attend within a window, where these have positions of their own; else nothing."""
    local = r.section("rope_parameters").get("sliding_attention")
    return _fields(r, local, head, "rope_theta", "partial_rotary_factor") if isinstance(local, dict) else {}


def _parameters(r: Reading) -> dict[str, object]:
    """The section that says how positions turn, of layers that attend to all."""
    older = r.section("rope_scaling")
    parameters = older if older and not r.has("rope_parameters") else r.section("rope_parameters")
    of_kind = parameters.get("full_attention")
    if isinstance(of_kind, dict):
        return of_kind
    # What stands beside the section is what transformers takes, whatever stands within.
    beside = r.count("original_max_position_embeddings")
    return parameters | ({"original_max_position_embeddings": beside} if beside and parameters else {})


def _fields(r: Reading, parameters: dict[str, object], head: int, theta: str, share: str) -> Fields:
    inner = Reading(
        parameters,
        {
            "rope_theta": r.number(theta, 10000.0),
            "partial_rotary_factor": r.number(share, 1.0),
            "original_max_position_embeddings": r.count("original_max_position_embeddings")
            or r.count("max_position_embeddings", 2048),
        },
    )
    inner.ignore(*_STRETCHED)
    kind = inner.word_of("rope_type" if inner.has("rope_type") else "type", _WORDS, "default")
    fields: Fields = {"rotary_base": inner.number("rope_theta")}
    turned_share = inner.number("partial_rotary_factor")
    if not 0.0 <= turned_share <= 1.0:
        inner.fault(f"partial_rotary_factor is {turned_share:g}, and should be the share of a head that turns, 0 to 1")
        turned_share = 1.0
    turned = int(head * turned_share)
    if turned != head:
        fields["rotary_dim"] = turned
    scaling = _scaling(inner, kind, r.count("max_position_embeddings", 2048))
    if scaling:
        fields["rotary_scaling"] = {"kind": kind} | scaling
    inner.ignore("rope_type", "type")
    r.faults += [f"rope_parameters: {fault}" for fault in inner.all_faults()]
    return fields


def _scaling(inner: Reading, kind: str, longest: int) -> Fields:
    """How far each pair of elements is stretched, by the keys of each kind."""
    trained = inner.count("original_max_position_embeddings")
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
        short, far = (inner.numbers(name) for name in ("short_factor", "long_factor"))
        return fields | {"short_factors": short or [], "long_factors": far or []}
    fields |= {"fast": inner.number("beta_fast", 32.0), "slow": inner.number("beta_slow", 1.0)}
    if inner.has("mscale") and inner.has("mscale_all_dim"):
        fields |= {"mscale": inner.number("mscale"), "mscale_all_dim": inner.number("mscale_all_dim")}
    if not inner.flag("truncate", True):
        fields["truncate"] = False
    return fields
