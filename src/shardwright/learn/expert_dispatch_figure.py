"""Tokens of four ranks on their way to experts and back: the choices of a gate, those that find no room, the counts of
the all-to-all. Drawn from the gate, the capacity and the counts of the runtime, for logits that are hashes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shardwright.config.moe import MoeSpec
from shardwright.config.phrase import in_language, say
from shardwright.learn.drawing import Drawing
from shardwright.model.capacity import fit
from shardwright.model.gates.choice import Known, make_gate
from shardwright.parallel.expert.grouped_linear import count_each
from shardwright.parallel.tensor.counter_rng import stream_key, uniform
from shardwright.report import svg

RANKS, TOKENS = 4, 8  # of a rank; each rank has one expert, whose number is the rank's
SPEC = MoeSpec(experts=RANKS, gate="switch", capacity_factor=1.0)
_SEED = 0
_LEFT, _TOP, _ROW, _TOKEN, _CELL = 16.0, 104.0, 44.0, 20.0, 30.0
_COLUMNS = (76.0, 284.0, 466.0, 672.0)  # left edges: tokens, counts, experts, results


@dataclass(frozen=True)
class RankTokens:
    """The tokens of a rank: the expert that each chose, and True for those for which the expert has room."""

    experts: tuple[int, ...]
    holds: tuple[bool, ...]

    @property
    def sent(self) -> list[int]:
        """The tokens that the rank sends to each expert."""
        kept = [expert if holds else RANKS for expert, holds in zip(self.experts, self.holds, strict=True)]
        return count_each(torch.tensor(kept), RANKS).tolist()


def capacity() -> int:
    """The most tokens of a rank that an expert takes."""
    room = SPEC.capacity(TOKENS)
    assert room is not None, "the example has a capacity"
    return room


def logits(rank: int) -> torch.Tensor:
    """The logits of the tokens of a rank, [T, E]."""
    numbers = torch.arange(TOKENS * RANKS) + rank * TOKENS * RANKS
    return 4.0 * uniform(numbers, stream_key(_SEED, 0, "tokens of a picture")).view(TOKENS, RANKS)


def routed(rank: int) -> RankTokens:
    """The decision on a rank's tokens, as a router makes it for its microbatch."""
    gate, logits_TE = make_gate(SPEC), logits(rank)
    scores_TE = gate.score(logits_TE)
    known = Known(torch.zeros(RANKS), torch.zeros(RANKS, RANKS), None)
    choice = gate.choose(scores_TE, known)
    final = fit(choice, gate.weigh(logits_TE, scores_TE, choice.experts_TK), capacity(), SPEC.overflow)
    return RankTokens(tuple(final.experts_TK[:, 0].tolist()), tuple(final.holds_TK[:, 0].tolist()))


def expert_dispatch_figure() -> Drawing:
    """Four columns: tokens with their experts, counts from rank to rank, experts with their room, results."""
    return partial(_drawn, [routed(rank) for rank in range(RANKS)])


def sums(ranks: Sequence[RankTokens]) -> tuple[int, int]:
    """The tokens that are dropped, and those of the fullest expert if there were no capacity."""
    num_dropped = sum(not holds for rank in ranks for holds in rank.holds)
    wanted = count_each(torch.tensor([rank.experts for rank in ranks]), RANKS)
    return num_dropped, int(wanted.max())


def _drawn(ranks: Sequence[RankTokens], language: str) -> str:
    title = say(
        "{gate}, capacity_factor {factor:g}: {tokens} tokens of each of {ranks} ranks, at most {room} to an expert",
        gate=SPEC.gate,
        factor=SPEC.capacity_factor,
        tokens=TOKENS,
        ranks=RANKS,
        room=capacity(),
    )
    parts = [svg.text(_LEFT, 26, in_language(title, language), "name", 15)]
    headings = (
        (say("gate: chosen experts"), say("dashed: no room, dropped")),
        (say("all-to-all: sent"), say("to rank")),
        (say("experts: tokens by sender"), say("dotted: room that stays free")),
        (say("all-to-all back: results"), say("dashed: no result")),
    )
    for left, (name, note) in zip(_COLUMNS, headings, strict=True):
        parts.append(svg.text(left, 54, in_language(name, language), "name", 13))
        parts.append(svg.text(left, 72, in_language(note, language), size=12))
    for number in range(RANKS):
        parts.append(svg.text(_COLUMNS[1] + _CELL * (number + 0.5), 92, str(number), "name", 12, "middle"))
    for number, rank in enumerate(ranks):
        y = _TOP + _ROW * number
        parts.append(svg.text(_LEFT, y + 15, in_language(say("rank {rank}", rank=number), language), "name", 13))
        for left in (_COLUMNS[0], _COLUMNS[3]):
            parts += _tokens(left, y, rank)
        parts += _counts(y, rank.sent)
        parts += _expert(number, y, [one.sent[number] for one in ranks])
        parts += [_arrow(left - 26, y + _TOKEN / 2 - 1) for left in _COLUMNS[1:]]
    num_dropped, fullest = sums(ranks)
    kept = say(
        "{kept} of {tokens} tokens have a result; {dropped} pass the layer by their residual alone.",
        kept=RANKS * TOKENS - num_dropped,
        tokens=RANKS * TOKENS,
        dropped=num_dropped,
    )
    free = say(
        "Without a capacity the fullest expert would have {fullest} tokens, where the mean is {mean}.",
        fullest=fullest,
        mean=TOKENS,
    )
    bottom = _TOP + _ROW * RANKS + 28
    for number, told in enumerate((kept, free)):
        parts.append(svg.text(_LEFT, bottom - 20 * (1 - number), in_language(told, language), size=13))
    return svg.document(in_language(title, language), 884.0, bottom + 18, parts)


def _tokens(left: float, y: float, rank: RankTokens) -> Iterator[str]:
    """The tokens of a rank in the colours of their experts' ranks, with their numbers."""
    for place, (expert, holds) in enumerate(zip(rank.experts, rank.holds, strict=True)):
        yield from _square(left + place * (_TOKEN + 2), y, expert, str(expert), "" if holds else "4 2")


def _counts(y: float, sent: Sequence[int]) -> Iterator[str]:
    """The number of tokens that a rank sends to each."""
    for rank, count in enumerate(sent):
        x = _COLUMNS[1] + rank * _CELL
        shade = f'fill="{svg.LINE_COLOURS[rank]}" fill-opacity="{0.2 * count:g}"'
        yield f'<rect x="{svg.px(x)}" y="{svg.px(y)}" width="{_CELL - 2:g}" height="{_TOKEN:g}" {shade}/>'
        yield svg.text(x + _CELL / 2 - 1, y + 15, str(count), "name", 13, "middle")


def _expert(expert: int, y: float, arrived: Sequence[int]) -> Iterator[str]:
    """The room of an expert: tokens in order of their senders, with the senders' numbers, then what stays free."""
    senders = [str(sender) for sender, count in enumerate(arrived) for _ in range(count)]
    for place in range(capacity() * RANKS):
        is_free = place >= len(senders)
        x = _COLUMNS[2] + place * (_TOKEN + 2)
        yield from _square(x, y, expert, "" if is_free else senders[place], "1 3" if is_free else "")


def _square(x: float, y: float, rank: int, name: str, dashes: str) -> Iterator[str]:
    colour = svg.LINE_COLOURS[rank]
    kind = f'stroke-dasharray="{dashes}" fill="none"' if dashes else f'fill="{colour}" fill-opacity="0.45"'
    yield (
        f'<rect x="{svg.px(x)}" y="{svg.px(y)}" width="{_TOKEN:g}" height="{_TOKEN:g}" rx="3" stroke="{colour}" '
        f'stroke-width="1.4" {kind}/>'
    )
    if name:
        yield svg.text(x + _TOKEN / 2, y + 14.5, name, "quiet" if dashes else "name", 12, "middle")


def _arrow(x: float, y: float) -> str:
    return (
        f'<path class="mark" d="M {svg.px(x)} {svg.px(y)} h 16 m -6 -4 l 6 4 l -6 4" fill="none" stroke-width="1.6"/>'
    )
