"""One collective as text: who holds what before and after, the steps of an algorithm, seconds by algorithm."""

from collections.abc import Sequence

from shardwright.config.cluster_facts import network_gb_per_s, node_gb_per_s
from shardwright.config.link_words import link_words
from shardwright.config.units import bytes_text, counted, seconds_text
from shardwright.cost.collective_algorithms import MOST_PLAYED, ON_RINGS, PricedCollective
from shardwright.report.text_columns import aligned
from shardwright.sharding.collective_steps import SUMS, Holding, Step, Transfer, held_after

MOST_DRAWN = 8  # ranks of a group whose pieces are drawn
_MOST_STEPS = 16


def collective_text(collective: PricedCollective) -> str:
    """The whole text of the command."""
    parts = [_heading(collective)]
    if 1 < collective.num_ranks <= MOST_DRAWN:
        parts.append(_before_and_after(collective))
        if 0 < len(collective.steps) <= _MOST_STEPS:
            parts.append(_steps(collective))
    parts.append(_table(collective))
    return "\n\n".join(parts)


def piece_name(piece: int, contributions: frozenset[int], num_ranks: int) -> str:
    """The name of a piece: "b3" is that of rank 1, "bc3" a sum of two ranks' pieces, and "S3" the sum of all."""
    if len(contributions) == num_ranks and num_ranks > 1:
        return f"S{piece}"
    return "".join(chr(ord("a") + rank) for rank in sorted(contributions)) + str(piece)


def _heading(collective: PricedCollective) -> str:
    group, cluster, rates = collective.group, collective.cluster, collective.rates
    words, nodes = link_words(cluster), int(group.domains)
    where = f"on {counted(nodes, words.domain) if nodes == 1 else f'{nodes:,} {words.domains}'} of {cluster.device}"
    links = []
    if group.inside > 1:
        link = f" {words.link}" * bool(words.link)
        links.append(
            f"inside a {words.domain}{link} {node_gb_per_s(cluster):g} GB/s a device stated, {rates.link / 1e9:.0f} "
            f"reached, {rates.link_latency_s * 1e6:.3g} us a step"
        )
    if nodes > 1:
        links.append(
            f"{words.between} {network_gb_per_s(cluster):g} GB/s a device stated, {rates.network / 1e9:.0f} reached, "
            f"{rates.network_latency_s * 1e6:.3g} us a step"
        )
    size = _size(collective.num_bytes)
    heading = f"{collective.kind} of {size} over {counted(collective.num_ranks, 'rank')}, {where}."
    return "\n".join([heading, *(f"  {link}" for link in links)])


def _size(num_bytes: int) -> str:
    """A number of bytes; where it is a round one in powers of ten, as somebody asked for it, in these too."""
    megabytes, rest = divmod(num_bytes, 1_000_000)
    if rest or not megabytes:
        return bytes_text(num_bytes)
    whole, thousandths = divmod(megabytes, 1000)
    decimals = f".{thousandths:03}".rstrip("0") if thousandths else ""
    asked = f"{whole:,}{decimals} GB" if whole else f"{megabytes} MB"
    return f"{asked} ({bytes_text(num_bytes)})"


def _grid(held: Holding) -> list[list[str]]:
    """The names of the pieces that each rank holds; "." for those that it lacks."""
    num_ranks = len(held)
    return [
        [piece_name(piece, row[piece], num_ranks) if piece in row else "." for piece in range(num_ranks)]
        for row in held.values()
    ]


def _before_and_after(collective: PricedCollective) -> str:
    kind, n = collective.kind, collective.num_ranks
    before, after = _grid(collective.held(0)), _grid(held_after(kind, n))
    if kind == "all-to-all":  # rank r ends with piece r of every rank
        after = [[f"{chr(ord('a') + source)}{rank}" for source in range(n)] for rank in range(n)]
    sides = [[" ".join(row) for row in side] for side in (before, after)]
    names = [f"rank {rank}" for rank in range(n)]
    table = aligned([["", "before", "after"], *map(list, zip(names, *sides, strict=True))], gap=3, left=range(3))
    legend = "a3 is piece 3 of rank 0's tensor, b3 that of rank 1"
    return table + f"\n\n{legend}" + ("; S3 is the sum of all ranks' piece 3." if kind in SUMS else ".")


def _pieces(pieces: Sequence[int]) -> str:
    """ "3", "0,2", "0-7"."""
    if len(pieces) > 2 and list(pieces) == list(range(pieces[0], pieces[-1] + 1)):
        return f"{pieces[0]}-{pieces[-1]}"
    return ",".join(map(str, pieces))


def _received(step: Step, rank: int) -> str:
    """The message that a rank receives in a step, "2:+5" from rank 2; or the number of messages."""
    moves = [move for move in step if move.receiver == rank]
    if len(moves) > 1:
        pieces = sorted({piece for move in moves for piece in move.pieces})
        return f"{len(moves)} ranks:{_sign(moves[0])}{_pieces(pieces)}"
    return f"{moves[0].sender}:{_sign(moves[0])}{_pieces(moves[0].pieces)}" if moves else "."


def _sign(move: Transfer) -> str:
    return "+" if move.adds else ""


def _steps(collective: PricedCollective) -> str:
    n, steps = collective.num_ranks, collective.steps
    rows = [["step", *(str(number) for number in range(1, len(steps) + 1))]]
    rows += [[f"rank {rank}", *(_received(step, rank) for step in steps)] for rank in range(n)]
    adds = any(move.adds for step in steps for move in step) and collective.kind in SUMS
    sign = ", 2:+5 adds it to its own" if adds else ""
    piece = bytes_text(collective.num_bytes // n)
    heading = f"{collective.drawn}, what each rank receives (2:5 is piece 5 from rank 2{sign}; a piece has {piece}):"
    if collective.kind == "all-to-all":
        rows = [[cell.replace("+", "") for cell in row] for row in rows]
    return f"{heading}\n\n{aligned(rows, left=range(len(steps) + 1))}"


def _table(collective: PricedCollective) -> str:
    words, spans = link_words(collective.cluster), collective.group.domains > 1
    if collective.num_ranks == 1:
        return "A rank alone sends nothing."
    if not collective.rows:
        return f"Only {', '.join(ON_RINGS)} and all-to-all are priced for more than {MOST_PLAYED} ranks."
    heading = ["algorithm", "steps", "busiest rank sends"]
    heading += [f"busiest {words.domain} sends out"] * spans + ["time", "GB/s a rank"]
    rows = [heading]
    for row in sorted(collective.rows, key=lambda row: row.seconds):
        rate = collective.num_bytes / row.seconds / 1e9
        name = row.name + " *" * row.is_predicted
        cells = [name, f"{row.num_steps:,}" if row.num_steps else "-", bytes_text(round(row.inside_bytes))]
        cells += [bytes_text(round(row.out_bytes))] * spans + [seconds_text(row.seconds), f"{rate:,.3g}"]
        rows.append(cells)
    notes = f"\n\nBusiest rank: inside its {words.domain}. GB/s: bytes of the tensor by the time."
    if any(row.is_predicted for row in collective.rows):
        notes += " *: predictions of a step take this."
    return aligned(rows) + notes
