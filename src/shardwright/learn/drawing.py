"""The type of a figure that was computed, and is drawn in each language."""

from collections.abc import Callable

Drawing = Callable[[str], str]  # the SVG document with words of a language
