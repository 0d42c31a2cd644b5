"""The ladder of bandwidths on a scale of powers of ten: device memory, links inside a node, PCIe, networks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from shardwright.api.one_collective import CollectiveQuestion, one_collective
from shardwright.config.cluster_facts import device_entry
from shardwright.config.phrase import in_language, say
from shardwright.config.text_columns import num_columns
from shardwright.cost.calibration import Rates
from shardwright.learn.drawing import Drawing
from shardwright.report import svg

_LEFT, _TOP, _WIDTH, _PITCH, _BAR = 244.0, 62.0, 800.0, 24.0, 14.0
_LEAST, _MOST = 1.0, 10_000.0  # GB/s, the ends of the scale
_WORDS = 290.0  # px right of the longest bar that its words may take
_MEMORY, _LINK, _HOST, _NETWORK = (
    say("device memory"),
    say("links inside a node"),
    say("PCIe to the host"),
    say("network, a port"),
)
_DEVICES = ("v100-sxm-32g", "a100-sxm-80g", "h100-sxm", "b200-sxm")
# Names of generations, by the device whose entry has their bandwidth.
_HOSTS = {"PCIe 3.0 x16": "v100-sxm-32g", "PCIe 4.0 x16": "a100-sxm-80g", "PCIe 5.0 x16": "h100-sxm"}
_PORTS = (
    ("InfiniBand HDR", "a100-sxm-80g", "infiniband"),
    ("InfiniBand NDR", "h100-sxm", "infiniband"),
    ("InfiniBand XDR", "b300-sxm", "infiniband"),
    ("RoCE", "ascend-910b", "roce"),
    ("RoCE", "h100-sxm", "roce"),
    ("EFA", "l40s", "efa"),
    ("EFA", "h100-sxm", "efa"),
)


@dataclass(frozen=True)
class Rung:
    """A bandwidth in GB/s in one direction as stated, what collectives reach of it (0 if none uses it), and the
    latency of one of their steps."""

    group: str
    name: str
    stated: float
    reached: float = 0.0
    latency_s: float = 0.0

    @property
    def words(self) -> str:
        """The figures of the rung."""
        if not self.reached:
            return say("{stated:,g} GB/s", stated=self.stated)
        if self.group == _LINK:
            return say(
                "{stated:,g} GB/s ({both:,g} both ways), {reached:.0f} reached, {latency:.3g} us a step",
                stated=self.stated,
                both=2 * self.stated,
                reached=self.reached,
                latency=self.latency_s * 1e6,
            )
        return say(
            "{stated:,g} GB/s, {reached:.0f} reached, {latency:.3g} us a step",
            stated=self.stated,
            reached=self.reached,
            latency=self.latency_s * 1e6,
        )


def rungs() -> Iterator[Rung]:
    """The ladder from top to bottom: what the entries of devices state, and what the cost model takes."""
    for device in _DEVICES:
        yield Rung(_MEMORY, say("memory, {device}", device=device), device_entry(device).memory_gb_per_s)
    for device in (*_DEVICES, "mi300x", "h100-pcie"):
        entry, rates = device_entry(device), _rates(8, device)
        link = say("{link}, {device}", link=entry.link_name, device=device)
        yield Rung(_LINK, link, entry.link_gb_per_s, rates.link_bytes_per_s / 1e9, rates.link_latency_s)
    for name, device in _HOSTS.items():
        yield Rung(_HOST, say("{link}, {device}", link=name, device=device), device_entry(device).host_gb_per_s)
    for name, device, kind in _PORTS:
        rates = _rates(16, device, f"cluster.network.kind={kind}")
        stated = device_entry(device).network_gb_per_s
        label = say("{link}, {device}", link=name, device=device)
        yield Rung(_NETWORK, label, stated, rates.network_bytes_per_s / 1e9, rates.network_latency_s)


def _rates(ranks: int, device: str, *overrides: str) -> Rates:
    return one_collective(CollectiveQuestion("all-gather", 2**20, ranks, device, overrides=overrides)).priced.rates


def ladder_figure() -> Drawing:
    """A bar for each rung, filled as far as collectives reach."""
    return partial(_drawn, tuple(rungs()))


def _across(gb_per_s: float) -> float:
    share = math.log10(gb_per_s / _LEAST) / math.log10(_MOST / _LEAST)
    return _LEFT + share * (_WIDTH - _LEFT)


def _drawn(ladder: Sequence[Rung], language: str) -> str:
    title = in_language(say("GB/s in one direction, each line ten times the one before"), language)
    groups = list(dict.fromkeys(rung.group for rung in ladder))
    bottom = _TOP + (len(ladder) + 0.5 * (len(groups) - 1)) * _PITCH
    parts = [svg.text(16, 26, title, "name", 15)]
    for power in range(round(math.log10(_MOST)) + 1):
        x = _across(10.0**power)
        ends = f'x1="{svg.px(x)}" x2="{svg.px(x)}" y1="{_TOP - 6:g}" y2="{svg.px(bottom)}"'
        parts.append(f'<line class="grid" {ends}/>')
        parts.append(svg.text(x, _TOP - 12, f"{10**power:,}", anchor="middle"))
    y, group = _TOP, ladder[0].group
    for rung in ladder:
        y, group = y + 0.5 * _PITCH * (rung.group != group), rung.group
        parts += _bar(rung, y, svg.LINE_COLOURS[groups.index(group)], language)
        y += _PITCH
    x = _LEFT
    for name, colour in zip(groups, svg.LINE_COLOURS, strict=False):
        words = in_language(name, language)
        parts.append(f'<rect x="{svg.px(x)}" y="{svg.px(bottom + 12)}" width="13" height="13" fill="{colour}"/>')
        parts.append(svg.text(x + 19, bottom + 23, words, size=13))
        x += 41 + 7 * num_columns(words)
    return svg.document(title, _WIDTH + _WORDS, bottom + 40, parts)


def _bar(rung: Rung, y: float, colour: str, language: str) -> list[str]:
    """A pale bar to the stated bandwidth, and a full one to the reached."""
    middle, end = y + _BAR - 3, _across(rung.stated)
    parts = [svg.text(_LEFT - 10, middle, in_language(rung.name, language), "name", 13, "end")]
    for rate, opacity in ((rung.stated, 0.35), (rung.reached or rung.stated, 0.85)):
        parts.append(
            f'<rect x="{_LEFT:g}" y="{svg.px(y)}" width="{svg.px(_across(rate) - _LEFT)}" height="{_BAR:g}" '
            f'fill="{colour}" fill-opacity="{opacity:g}"/>'
        )
    return [*parts, svg.text(end + 8, middle, in_language(rung.words, language), size=13)]
