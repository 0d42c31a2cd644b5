"""Columns of a packed timeline, as the page reads them."""

from base64 import b64decode

import numpy as np


def unpacked_column(text: str) -> list[int]:
    """The numbers of a column, as unpack.js reads them."""
    numbers: list[int] = np.frombuffer(b64decode(text), "<i4").tolist()
    return numbers
