"""A timeline in the terminal: each rank is a row, and each action a block with the number of its microbatch.

In colour, hue is the kind of computation, and lightness the chunk or direction. Without colour, letters say the same:
F, B, I, W, small on a rank's later chunks, F1B0 for a forward and a backward that run as one. If parameters are
sharded, a second line under each rank has its gathers, reductions and releases, with the number of the stage.
"""

import os
from dataclasses import dataclass
from math import inf
from typing import Literal, TextIO

import numpy as np

from shardwright.config.phrase import ENGLISH, fixed, in_language, say
from shardwright.config.text_columns import num_columns
from shardwright.report.svg import nice_step
from shardwright.report.timeline.colours import NAMES, PAIR, chunk_of, colour_of, ink_on, letters_of, rgb, shade
from shardwright.schedule.action import Action
from shardwright.schedule.schedule import Program
from shardwright.simulate.timeline import RankTimeline, Resource, Timeline
from shardwright.simulate.waits import Cause

Palette = Literal["none", "256", "truecolor"]

_WIDEST_UNIT = 8  # columns of the shortest action; more columns would show nothing new
_GLYPHS = {Cause.WARM_UP: " ", Cause.DEPENDENCY: ".", Cause.COMMUNICATION: "~", Cause.DRAIN: " "}


def palette_of(stream: TextIO, no_colour: bool) -> Palette:
    """The colours that a stream can show. NO_COLOR (no-color.org) is respected."""
    environment = os.environ
    if no_colour or environment.get("NO_COLOR") or environment.get("TERM") == "dumb" or not stream.isatty():
        return "none"
    return "truecolor" if environment.get("COLORTERM") in ("truecolor", "24bit") else "256"


@dataclass(frozen=True)
class _Cell:
    """One character, and its colours as #rrggbb; an empty colour is the terminal's own."""

    text: str = " "
    ink: str = ""
    ground: str = ""


def draw(
    timeline: Timeline, width: int = 120, palette: Palette = "none", language: str = ENGLISH, *, unit: str = ""
) -> str:
    """A timeline as text: the rows, an axis of times in a unit, and a legend, in a language."""
    time = in_language(say("seconds") if unit == "s" else say("time"), language)
    label_width = max(len(f"rank {len(timeline.ranks) - 1} "), num_columns(time) + 1)
    scale = _columns_per_time(timeline, width - label_width)
    is_fine = palette != "none" and _shortest(timeline) * scale < 1
    lines = []
    for rank, row in enumerate(timeline.ranks):
        cells = _halves(timeline, row, scale) if is_fine else _blocks(timeline, row, scale, palette != "none")
        lines.append(f"{f'rank {rank}':<{label_width}}" + _paint(cells, palette))
        if timeline.program.gathers:
            lines.append(" " * label_width + _paint(_collectives(timeline, row, scale, palette != "none"), palette))
    axis = _paint(_axis(timeline.makespan, scale), palette)
    lines.append(time + " " * (label_width - num_columns(time)) + axis)
    legend = _legend(timeline, palette, glyphs=not is_fine)
    lines += ["", *("   ".join(in_language(item, language) for item in items) for items in legend if items)]
    return "\n".join(line.rstrip() for line in lines)


def _shortest(timeline: Timeline) -> float:
    lengths = (row.lengths(row.computations) for row in timeline.ranks)
    shortest = min(float(spans.min(where=spans > 0, initial=inf)) for spans in lengths)
    return shortest if shortest < inf else timeline.makespan or 1.0


def _columns_per_time(timeline: Timeline, columns: int) -> float:
    """Columns for a unit of time, as many as fit. The shortest action has a whole number of columns if all times are
    multiples of it or of a part of it."""
    most = columns / (timeline.makespan or 1.0)
    shortest = _shortest(timeline)
    every_time = [times for row in timeline.ranks for times in (row.starts, row.ends)]
    borders = np.unique(np.concatenate(every_time)) / shortest
    for num_parts in range(1, 11):  # parts of the shortest action, each of a column or several
        num_columns = min(int(most * shortest / num_parts), _WIDEST_UNIT)
        if num_columns < 1:
            break
        if np.all(np.abs(borders * num_parts - np.rint(borders * num_parts)) < 1e-6):
            return num_columns * num_parts / shortest
    return min(most, _WIDEST_UNIT / shortest)


def _blocks(timeline: Timeline, row: RankTimeline, scale: float, in_colour: bool) -> list[_Cell]:
    """A cell for each column: actions as blocks, with a line at the beginning if there is room, and idle time."""
    cells = [_Cell()] * round(timeline.makespan * scale)
    for gap in row.idle:
        begin, stop = round(gap.start * scale), round(gap.end * scale)
        # A blank first separates dots from digits.
        for column in range(begin + (stop - begin > 1), stop):
            cells[column] = _Cell(_GLYPHS[gap.cause], "#8a8f98" if in_colour else "")
    for action, start, end in row.work(scale):
        begin, stop = round(start * scale), round(end * scale)
        if not in_colour:
            text = _plain(timeline.program, action, stop - begin)
            cells[begin:stop] = [_Cell(character) for character in text]
            continue
        ground = colour_of(timeline.program, action)
        label = "+".join(str(part.microbatch) for part in action.computes()) or "S"
        if len(label) > stop - begin:
            label = ""
        text = label.rjust((stop - begin + 1 + len(label)) // 2).ljust(stop - begin)
        block = [_Cell(character, ink_on(ground), ground) for character in text]
        if text[0] == " ":
            darker = "#" + "".join(f"{int(part * 0.6):02x}" for part in rgb(ground))
            block[0] = _Cell("▏", darker, ground)
        cells[begin:stop] = block
    return cells


def _plain(program: Program, action: Action, width: int) -> str:
    """An action in exactly `width` characters: letters and digits, with a bar before them if there is room."""
    parts = action.computes()
    if not parts:
        return "S".ljust(width, "-")
    letters = [str(part.kind).lower() if chunk_of(program, part)[0] else str(part.kind) for part in parts]
    long = "".join(f"{letter}{part.microbatch}" for letter, part in zip(letters, parts, strict=True))
    for text in ("|" + long, long, "|" + "&".join(letters), "&".join(letters), "&" if len(parts) > 1 else letters[0]):
        if len(text) <= width:
            return text.ljust(width)
    raise AssertionError("one letter always fits")


def _halves(timeline: Timeline, row: RankTimeline, scale: float) -> list[_Cell]:
    """A cell for each column with two colours, for actions narrower than a column: a half has its action's colour."""
    halves = [""] * (2 * round(timeline.makespan * scale))
    for action, start, end in row.work(2 * scale):
        begin, stop = round(start * scale * 2), round(end * scale * 2)
        halves[begin:stop] = [colour_of(timeline.program, action)] * (stop - begin)
    pairs = zip(halves[::2], halves[1::2], strict=True)
    return [
        _Cell("▌", left_colour, right_colour) if left_colour else _Cell("▐", right_colour) if right_colour else _Cell()
        for left_colour, right_colour in pairs
    ]


def _collectives(timeline: Timeline, row: RankTimeline, scale: float, in_colour: bool) -> list[_Cell]:
    """Cells by column: gathers and reductions as blocks. A span without duration is a letter if there is room."""
    cells = [_Cell()] * (round(timeline.makespan * scale) + 1)
    spans = [span for span in row.spans if span.resource in (Resource.COLLECTIVES, Resource.RELEASE)]
    # Blocks come first, so that letters take free cells.
    for span in sorted(spans, key=lambda span: span.start - span.end):
        letter = str(span.action.kind)
        ground = shade(letter, 0, 1) if in_colour else ""
        ink = ink_on(ground) if in_colour else ""
        begin, stop = round(span.start * scale), round(span.end * scale)
        if begin < stop:
            name = f"{letter}{span.action.stage}"
            text = next((text for text in (f"|{name}", name) if len(text) <= stop - begin), letter)
            cells[begin:stop] = [_Cell(character, ink, ground) for character in text.ljust(stop - begin, "-")]
            continue
        # A release comes right after the computation that it waited for: draw it in the last column of that.
        column = max(begin - (span.resource is Resource.RELEASE), 0)
        if cells[column] == _Cell():
            cells[column] = _Cell(letter, ink, ground)
    return cells


def _axis(makespan: float, scale: float) -> list[_Cell]:
    """Cells of the axis; each number begins at its time."""
    step = nice_step(8 / scale)
    cells = [_Cell()] * (round(makespan * scale) + 8)
    for n in range(int(makespan / step) + 1):
        for column, character in enumerate(f"{n * step:g}", round(n * step * scale)):
            cells[column] = _Cell(character)
    return cells


def _legend(timeline: Timeline, palette: Palette, glyphs: bool) -> list[list[str]]:
    """The meaning of the colours or letters that occur, and of the marks of waits."""
    letters = letters_of(timeline)
    chunks = max(letters.values(), default=1)
    causes = {gap.cause for row in timeline.ranks for gap in row.idle} if glyphs else set()
    items: list[str] = []
    for letter in [letter for letter in NAMES if letter in letters]:
        if palette == "none":
            items.append(say("{mark} {meaning}", mark=letter, meaning=fixed(NAMES[letter])))
        else:
            num_chunks = letters[letter]
            swatch = [_Cell(" ", "", shade(letter, chunk, num_chunks)) for chunk in range(num_chunks) for _ in range(2)]
            items.append(say("{mark} {meaning}", mark=_paint(swatch, palette), meaning=fixed(NAMES[letter])))
    if "O" in letters:
        swatch = [_Cell(" ", "", PAIR)] * 2
        mark = "F1B0" if palette == "none" else _paint(swatch, palette)
        items.append(say("{mark} {meaning}", mark=mark, meaning=say("both as one")))
    if chunks > 1:
        later = say("second chunk") if chunks == 2 else say("later chunks")
        if timeline.program.placement.num_copies > 1:
            later = say("second direction") if chunks == 2 else say("later directions")
        mark = say("small letters") if palette == "none" else say("lighter")
        items.append(say("{mark}: {meaning}", mark=mark, meaning=later))
    waits: list[str] = [say(". another rank has yet to compute")] if Cause.DEPENDENCY in causes else []
    waits += [say("~ a message is on its way")] if Cause.COMMUNICATION in causes else []
    return [items, waits]


def _paint(cells: list[_Cell], palette: Palette) -> str:
    """The characters, with an escape sequence wherever the colours change."""
    if palette == "none":
        return "".join(cell.text for cell in cells).rstrip()
    out, colours = [], ("", "")
    while cells and cells[-1] == _Cell():
        cells = cells[:-1]
    for cell in cells:
        if (cell.ink, cell.ground) != colours:
            colours = (cell.ink, cell.ground)
            codes = ["0", *_code(38, cell.ink, palette), *_code(48, cell.ground, palette)]
            out.append(f"\x1b[{';'.join(codes)}m")
        out.append(cell.text)
    return "".join(out) + ("\x1b[0m" if colours != ("", "") else "")


def _code(layer: int, colour: str, palette: Palette) -> list[str]:
    if not colour:
        return []
    if palette == "truecolor":
        return [f"{layer};2;" + ";".join(map(str, rgb(colour)))]
    levels = (0, 95, 135, 175, 215, 255)  # of the colour cube of xterm
    steps = [levels.index(min(levels, key=lambda level: abs(level - byte))) for byte in rgb(colour)]
    return [f"{layer};5;{16 + 36 * steps[0] + 6 * steps[1] + steps[2]}"]
