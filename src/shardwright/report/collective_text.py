"""One collective as text: who holds what before and after, the steps of an algorithm, seconds by algorithm."""

from collections.abc import Sequence

from shardwright.config.cluster_facts import network_gb_per_s, node_gb_per_s
from shardwright.config.link_words import link_words
from shardwright.config.phrase import ENGLISH, Phrase, fixed, say
from shardwright.config.units import bytes_text, counted_phrase, seconds_text
from shardwright.cost.collective_algorithms import MOST_PLAYED, ON_RINGS, PricedCollective
from shardwright.report.document import AlignedRows, Lines, Part, document_text
from shardwright.sharding.collective_steps import SUMS, Holding, Step, Transfer, held_after

MOST_DRAWN = 8  # ranks of a group whose pieces are drawn
_MOST_STEPS = 16


def collective_text(collective: PricedCollective, language: str = ENGLISH) -> str:
    """The whole text of the command, in a language."""
    parts: list[Part] = [_heading(collective)]
    if 1 < collective.num_ranks <= MOST_DRAWN:
        parts += _before_and_after(collective)
        if 0 < len(collective.steps) <= _MOST_STEPS:
            parts += _steps(collective)
    return document_text([*parts, *_table(collective)], language)


def piece_name(piece: int, contributions: frozenset[int], num_ranks: int) -> str:
    """The name of a piece: "b3" is that of rank 1, "bc3" a sum of two ranks' pieces, and "S3" the sum of all."""
    if len(contributions) == num_ranks and num_ranks > 1:
        return f"S{piece}"
    return "".join(chr(ord("a") + rank) for rank in sorted(contributions)) + str(piece)


def _heading(collective: PricedCollective) -> Lines:
    group, cluster, rates = collective.group, collective.cluster, collective.rates
    words, nodes = link_words(cluster), int(group.domains)
    lines: list[Part] = [
        say(
            "{collective} of {size} over {ranks}, on {count:,} {domains} of {device}.",
            collective=collective.kind,
            size=_size(collective.num_bytes),
            ranks=counted_phrase(collective.num_ranks, "rank"),
            count=nodes,
            domains=fixed(words.domain if nodes == 1 else words.domains),
            device=cluster.device,
        )
    ]
    if group.inside > 1:
        place = fixed(words.inside)
        if words.link:
            place = say("{place} {link}", place=place, link=words.link)
        lines.append(_rates(place, node_gb_per_s(cluster), rates.link_bytes_per_s, rates.link_latency_s))
    if nodes > 1:
        lines.append(
            _rates(fixed(words.between), network_gb_per_s(cluster), rates.network_bytes_per_s, rates.network_latency_s)
        )
    return Lines(lines)


def _rates(place: str, stated_gb_per_s: float, rate: float, latency_s: float) -> Phrase:
    """The line of links: their stated bandwidth, and the one that is reached, in bytes a second."""
    return say(
        "  {place} {stated:g} GB/s a device stated, {reached:.0f} reached, {latency:.3g} us a step",
        place=place,
        stated=stated_gb_per_s,
        reached=rate / 1e9,
        latency=latency_s * 1e6,
    )


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


def _before_and_after(collective: PricedCollective) -> list[Part]:
    kind, n = collective.kind, collective.num_ranks
    before, after = _grid(collective.held(0)), _grid(held_after(kind, n))
    if kind == "all-to-all":  # rank r ends with piece r of every rank
        after = [[f"{chr(ord('a') + source)}{rank}" for source in range(n)] for rank in range(n)]
    sides = [[" ".join(row) for row in side] for side in (before, after)]
    names = [f"rank {rank}" for rank in range(n)]
    rows = [["", say("before"), say("after")], *map(list, zip(names, *sides, strict=True))]
    legend = say("a3 is piece 3 of rank 0's tensor, b3 that of rank 1.")
    if kind in SUMS:
        legend = say("a3 is piece 3 of rank 0's tensor, b3 that of rank 1; S3 is the sum of all ranks' piece 3.")
    return [AlignedRows(rows, left=range(3), gap=3), legend]


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


def _steps(collective: PricedCollective) -> list[Part]:
    n, steps = collective.num_ranks, collective.steps
    rows = [[say("in step"), *(str(number) for number in range(1, len(steps) + 1))]]
    rows += [[f"rank {rank}", *(_received(step, rank) for step in steps)] for rank in range(n)]
    adds = any(move.adds for step in steps for move in step) and collective.kind in SUMS
    algorithm, piece = collective.drawn, bytes_text(collective.num_bytes // n)
    heading = say(
        "{algorithm}, what each rank receives (2:5 is piece 5 from rank 2; a piece has {piece}):",
        algorithm=algorithm,
        piece=piece,
    )
    if adds:
        heading = say(
            "{algorithm}, what each rank receives (2:5 is piece 5 from rank 2, 2:+5 adds it to its own; a piece has "
            "{piece}):",
            algorithm=algorithm,
            piece=piece,
        )
    if collective.kind == "all-to-all":
        rows = [rows[0], *([cell.replace("+", "") for cell in row] for row in rows[1:])]
    return [heading, AlignedRows(rows, left=range(len(steps) + 1))]


def _table(collective: PricedCollective) -> list[Part]:
    domain, spans = fixed(link_words(collective.cluster).domain), collective.group.domains > 1
    if collective.num_ranks == 1:
        return [say("A rank alone sends nothing.")]
    if not collective.rows:
        return [
            say(
                "Only {kinds} and all-to-all are priced for more than {most} ranks.",
                kinds=tuple(ON_RINGS),
                most=MOST_PLAYED,
            )
        ]
    heading: list[str] = [say("algorithm"), say("steps"), say("busiest rank sends")]
    heading += [say("busiest {domain} sends out", domain=domain)] * spans + [say("time"), say("GB/s a rank")]
    rows = [heading]
    for row in sorted(collective.rows, key=lambda row: row.seconds):
        rate = collective.num_bytes / row.seconds / 1e9
        name = row.name + " *" * row.is_predicted
        cells = [name, f"{row.num_steps:,}" if row.num_steps else "-", bytes_text(round(row.inside_bytes))]
        cells += [bytes_text(round(row.out_bytes))] * spans + [seconds_text(row.seconds), f"{rate:,.3g}"]
        rows.append(cells)
    note = say("Busiest rank: inside its {domain}. GB/s: bytes of the tensor by the time.", domain=domain)
    if any(row.is_predicted for row in collective.rows):
        note = say(
            "Busiest rank: inside its {domain}. GB/s: bytes of the tensor by the time. *: predictions of a step take "
            "this.",
            domain=domain,
        )
    return [AlignedRows(rows), note]
