"""The kinds of layers that cost and keep different amounts, as words: "dense" or "experts", by what stands for the MLP,
and behind that how a layer attends, if not to all tokens and with positions."""

WINDOWED, UNTURNED = " windowed", " unturned"


def is_layer(kind: str) -> bool:
    """True if a piece of the model is a layer: others are its ends."""
    return kind.startswith(("dense", "experts"))


def has_experts(kind: str) -> bool:
    """True if a piece of the model is a layer with experts."""
    return kind.startswith("experts")
