"""What each rank keeps at its fullest moment, by kind of buffer, as a table and as JSON."""

from typing import Any

from shardwright.config.units import bytes_text
from shardwright.report.timeline.study import Study
from shardwright.schedule.buffer_lifetimes import Buffer


def memory_table(study: Study) -> list[list[str]]:
    """A header, then for each rank the most buffers of each kind at once, and their bytes where those are known."""
    ranks = study.timeline.ranks
    kinds = [buffer for buffer in Buffer if any(row.kept[buffer].most for row in ranks)]
    rows = [["most at once", *(str(buffer) for buffer in kinds)]]
    for rank, row in enumerate(ranks):
        cells = []
        for buffer in kinds:
            kept = row.kept[buffer]
            known = kept.most and kept.most_bytes is not None
            cells.append(f"{kept.most} ({bytes_text(kept.most_bytes or 0)})" if known else str(kept.most))
        rows.append([f"rank {rank}", *cells])
    return rows


def memory_dict(study: Study) -> list[dict[str, Any]]:
    """Most buffers of every kind at once, of every rank; bytes are null where they are not known."""
    return [
        {str(buffer): {"most": kept.most, "bytes": kept.most_bytes} for buffer, kept in row.kept.items()}
        for row in study.timeline.ranks
    ]
