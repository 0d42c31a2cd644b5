"""The chapter of a story about the bytes that cross each link."""

from collections.abc import Sequence

from shardwright.config.link_words import LinkWords
from shardwright.config.units import bytes_text, number_text, seconds_text
from shardwright.cost.wire_bytes import SentBytes
from shardwright.explain.operator_passes import total_s
from shardwright.explain.rank_collectives import Crossing
from shardwright.report.text_columns import aligned


def crossings_text(crossings: Sequence[Crossing], words: LinkWords, crosses: bool) -> str:
    """A table with a row for each collective on each axis, and a last row with their sums.

    `crosses` is True if ranks are on several domains of fast links: then a column has the bytes between domains.
    """
    has_times = any(crossing.seconds is not None for crossing in crossings)
    rows = [["when", "axis", "collective", "ranks", "calls", "tensor a call"]]
    rows[0] += [f"sent inside {words.domains}", words.between] if crosses else ["sent"]
    rows[0] += ["by itself", "exposed"] if has_times else []
    for c in crossings:
        rows.append(
            [c.phase, c.axis, c.kind, str(c.num_ranks), number_text(c.calls), _size(c.full_bytes / max(1, c.calls))]
        )
        rows[-1] += _size_and_time(c.sent, c.seconds, c.exposed_s, has_times, crosses=crosses)
    total_sent = sum((c.sent for c in crossings), SentBytes())
    seconds, exposed = total_s(c.seconds for c in crossings), total_s(c.exposed_s for c in crossings)
    rows.append(["all", "", "", "", "", "", *_size_and_time(total_sent, seconds, exposed, has_times, crosses=crosses)])
    return aligned(rows, left=(0, 1, 2))


def _size_and_time(
    sent: SentBytes, seconds: float | None, exposed: float | None, has_times: bool, *, crosses: bool
) -> list[str]:
    times = ["" if value is None else seconds_text(value) for value in (seconds, exposed)] if has_times else []
    return [*([_size(sent.inside), _size(sent.between)] if crosses else [_size(sent.total)]), *times]


def _size(num_bytes: float) -> str:
    return bytes_text(round(num_bytes)) if num_bytes else "-"
