"""Text in columns."""

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], gap: int = 2, left: Collection[int] = (0,)) -> str:
    """Rows as lines of columns, each as wide as its widest cell. Columns in `left` are aligned left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((" " * gap).join(cells).rstrip())
    return "\n".join(lines)
