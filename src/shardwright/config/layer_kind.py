"""The kinds of layers that differ in cost or memory, as words: "dense" or "experts" for the MLP, followed by suffixes
for attention within a window and for attention without rotary positions."""

WINDOWED, UNTURNED = " windowed", " unturned"


def is_layer(kind: str) -> bool:
    """True if a piece of the model is a layer; the other pieces are its ends."""
    return kind.startswith(("dense", "experts"))


def has_experts(kind: str) -> bool:
    """True if a piece of the model is a layer with experts."""
    return kind.startswith("experts")
