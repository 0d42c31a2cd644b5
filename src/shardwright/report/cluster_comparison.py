"""A job on several clusters side by side: the plan to take on each, and the cluster on which a run is cheapest, fastest
and takes the least energy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.config.cluster import ClusterSpec
from shardwright.config.cluster_facts import network_gb_per_s, node_devices, node_gb_per_s
from shardwright.config.job import JobSpec
from shardwright.config.link_words import link_words
from shardwright.config.percent import percent_text
from shardwright.config.phrase import capitalized, fixed, in_language, note_phrase, say
from shardwright.config.text_columns import terminal_width
from shardwright.config.units import counted_phrase, days_column, number_text, tokens_text
from shardwright.cost.money import device_hour_price, price_words, usd_per_device_hour
from shardwright.planner.advice.priced_plan import PricedPlan
from shardwright.planner.search.objectives import Objective
from shardwright.planner.search.plan_price import room_bytes
from shardwright.report.document import Lines, Part, paragraph
from shardwright.report.fit_verdict import no_plan_text, share_text
from shardwright.report.plan_screen import lacks_note
from shardwright.report.plans_text import (
    lacking,
    marked_words,
    model_name,
    plan_cost,
    plan_dict,
    run_days,
    step_text,
    usd_text,
)
from shardwright.report.prediction_notes import told_notes
from shardwright.report.rendered import ScreenPart
from shardwright.report.step_cost import software_part

_OTHER_SOFTWARE = say("For plans of software that you run: --as megatron-core, and others of `shardwright software`.")
_LABELS_WIDTH = 15  # columns of the first column of the table
_LEAST_WIDTH, _MOST_WIDTH = 18, 48  # columns of a cluster
_GAP = 2
_GOALS = {say("cheapest"): "usd", say("fastest"): "days", say("least energy"): "kwh"}


@dataclass(frozen=True)
class ClusterPlan:
    """A job on one of the clusters, and the plan to take there for a run of `run_tokens` tokens; None if no plan fits.
    `refusal` is the reason if no plan is legal or can be priced, else empty."""

    job: JobSpec
    plan: PricedPlan | None
    refusal: str
    run_tokens: float

    @property
    def name(self) -> str:
        """The cluster in words: "64 h100-sxm", or with a price that is not the list's "64 h100-sxm at $2.50"."""
        cluster = self.job.cluster
        if not cluster.usd_per_device_hour:
            return f"{cluster.num_devices:,} {cluster.device}"
        return say(
            "{devices:,} {device} at {price}",
            devices=cluster.num_devices,
            device=cluster.device,
            price=usd_text(cluster.usd_per_device_hour),
        )

    @property
    def run_totals(self) -> dict[str, float | None]:
        """Days, US dollars and kilowatt-hours of the run, without time lost to failures; None is unknown."""
        if self.plan is None:
            return {"days": None, "usd": None, "kwh": None}
        run = Objective(tokens=self.run_tokens)
        money = plan_cost(self.plan, run)
        days, usd, kwh = run_days(self.plan, run), money.usd, money.kwh
        return {"days": days, "usd": None if usd is None else float(usd), "kwh": None if kwh is None else float(kwh)}

    def to_dict(self) -> dict[str, Any]:
        """The column of `--json`. `plan` is as in `plan --json`; null if there is none."""
        return {
            "device": self.job.cluster.device,
            "num_devices": self.job.cluster.num_devices,
            "usd_per_device_hour": usd_per_device_hour(self.job.cluster),
            "price": price_words(self.job.cluster) or None,
            "room_bytes": room_bytes(self.job),
            "compute": self.job.precision.compute,
            "refusal": self.refusal or None,
            "plan": plan_dict(self.plan, Objective(tokens=self.run_tokens)) if self.plan else None,
        }


def best_index(clusters: Sequence[ClusterPlan], total: str) -> int | None:
    """The index of the cluster whose run has the least of a total, such as "usd"; None if it is known of none."""
    amounts = {index: amount for index, amount in enumerate(_amounts(clusters, total)) if amount is not None}
    return min(amounts, key=amounts.__getitem__, default=None)


def comparison_dict(clusters: Sequence[ClusterPlan]) -> dict[str, Any]:
    """The answer of `--json`: the clusters as they were asked for, and the indices of the best ones, or null."""
    best = {goal.replace(" ", "_"): best_index(clusters, total) for goal, total in _GOALS.items()}
    return {"tokens": clusters[0].run_tokens, "clusters": [cluster.to_dict() for cluster in clusters], **best}


def comparison_screen(clusters: Sequence[ClusterPlan], notes: Sequence[str]) -> list[ScreenPart]:
    """The clusters as parts of a screen. `notes` are about values that nobody stated."""
    times = [cluster.plan.time for cluster in clusters if cluster.plan]
    parts: list[ScreenPart] = [software_part(clusters[0].job, times, _OTHER_SOFTWARE), _heading(clusters)]
    parts += _tables(clusters)
    parts.append(Lines([paragraph(sentence) for sentence in _best_words(clusters)]))
    for cluster in clusters:
        if cluster.plan is None:
            reason = cluster.refusal or no_plan_text(cluster.job)
            parts.append(paragraph(say("{cluster}: {reason}", cluster=cluster.name, reason=reason)))
    lacks = dict.fromkeys(word for cluster in clusters if cluster.plan for word in lacking(cluster.plan))
    if lacks:
        parts.append(paragraph(lacks_note(clusters[0].job, tuple(lacks))))
    remarks = dict.fromkeys([*notes, *(note for cluster in clusters for note in told_notes(cluster.job))])
    remarks[say("time, money and energy are without time lost to failures")] = None
    parts.append(Lines([paragraph(note_phrase(remark)) for remark in remarks]))
    return parts


def _amounts(clusters: Sequence[ClusterPlan], total: str) -> list[float | None]:
    return [cluster.run_totals[total] for cluster in clusters]


def _heading(clusters: Sequence[ClusterPlan]) -> Part:
    job, tokens = clusters[0].job, tokens_text(clusters[0].run_tokens)
    words = say(
        "{model} on {count} clusters, the best plan on each; a run of {tokens} tokens",
        model=model_name(job),
        count=len(clusters),
        tokens=tokens,
    )
    if not _has_one_batch(clusters):
        return paragraph(words)
    return paragraph(
        say(
            "{run}, {sequences} of {tokens:,} tokens a step, computed in {number}",
            run=words,
            sequences=counted_phrase(job.batch.global_batch_size, "sequence"),
            tokens=job.model.sequence,
            number=job.precision.product_number,
        )
    )


def _has_one_batch(clusters: Sequence[ClusterPlan]) -> bool:
    """True if a step has as many tokens, in the same number type, on each cluster, so that steps compare."""
    return len({(one.job.tokens_per_step, one.job.precision.product_number) for one in clusters}) == 1


def _tables(clusters: Sequence[ClusterPlan]) -> "Iterator[_Figures]":
    """Figures with a column for each cluster, in as many tables as the terminal's width asks for."""
    num_columns = min(len(clusters), (terminal_width() - _LABELS_WIDTH) // (_LEAST_WIDTH + _GAP))
    width = min(_MOST_WIDTH, (terminal_width() - _LABELS_WIDTH) // num_columns - _GAP)
    for start in range(0, len(clusters), num_columns):
        yield _Figures(clusters, range(start, min(start + num_columns, len(clusters))), width)


@dataclass(frozen=True)
class _Figures:
    """Rows of figures with a column of `width` characters for each of some clusters; the best of all are green."""

    clusters: Sequence[ClusterPlan]
    indices: range
    width: int

    def renderable(self, language: str) -> RenderableType:
        """The table in a language."""
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
        table.add_column("", width=_LABELS_WIDTH, no_wrap=True)
        shown = [self.clusters[index] for index in self.indices]
        for cluster in shown:
            table.add_column(in_language(cluster.name, language), width=self.width, overflow="fold")
        times_label, times = days_column([cluster.run_totals["days"] or 0.0 for cluster in self.clusters])
        has_batch = not _has_one_batch(self.clusters)
        columns = [_cells(self.clusters[index], times[index], has_batch=has_batch) for index in self.indices]
        totals = {"days": "days", "money": "usd", "energy": "kwh"}
        for label in columns[0]:
            cells = []
            for index, column in zip(self.indices, columns, strict=True):
                is_best = label in totals and best_index(self.clusters, totals[label]) == index
                cells.append(Text(in_language(column[label], language), style="green" if is_best else ""))
            table.add_row(in_language(times_label if label == "days" else label, language), *cells)
        return table


def _cells(cluster: ClusterPlan, run_time: str, has_batch: bool) -> dict[str, str]:
    """The figures of a cluster by their labels; empty for those that need a plan if none fits. `run_time` is the time
    of its run, labelled "days" in any unit."""
    job, plan = cluster.job, cluster.plan
    no_plan = say("none is legal") if cluster.refusal else say("none fits")
    cells: dict[str, str] = {say("plan"): marked_words(plan) if plan else no_plan}
    if has_batch:
        sequences = say("{number:,} sequences", number=job.batch.global_batch_size)
        cells[say("batch")] = say("{listed}", listed=(sequences, job.precision.product_number))
    figures = _plan_cells(cluster, run_time)
    return cells | figures | {say("links"): _link_words(job.cluster), say("price"): _price(job.cluster)}


def _plan_cells(cluster: ClusterPlan, run_time: str) -> dict[str, str]:
    """The figures of a cluster's plan; empty if it has none."""
    job, plan, totals = cluster.job, cluster.plan, cluster.run_totals
    labels = ("step", "tokens/s/device", "MFU", "memory", "days", "money", "energy")
    if plan is None:
        return {fixed(label): "" for label in labels}
    kwh = totals["kwh"]
    figures = (
        step_text(plan.time.total),
        f"{plan.tokens_per_s_per_device:,.0f}",
        percent_text(plan.time.mfu),
        share_text(plan.memory.process, job, plan.fit_chance),
        run_time,
        usd_text(totals["usd"]),
        say("unknown") if kwh is None else f"{number_text(kwh)} kWh",
    )
    return {fixed(label): figure for label, figure in zip(labels, figures, strict=True)}


def _price(cluster: ClusterSpec) -> str:
    """The price of a device and hour."""
    price = device_hour_price(cluster)
    return say("${price:,.2f} a device and hour ({origin})", **price) if price else say("unknown (DEVICE:N@USD)")


def _link_words(cluster: ClusterSpec) -> str:
    """Gigabytes a second of a device within its node, and between nodes."""
    size, domain = node_devices(cluster), fixed(link_words(cluster).domain)
    words = say("{rate:g} GB/s in a {domain} of {devices:,}", rate=node_gb_per_s(cluster), domain=domain, devices=size)
    if cluster.num_devices <= size:
        return words
    return say("{inside}, {rate:g} between", inside=words, rate=network_gb_per_s(cluster))


def _best_words(clusters: Sequence[ClusterPlan]) -> Iterator[str]:
    """A line for each goal: the cluster that reaches it best, and how much more the others take."""
    for goal, total in _GOALS.items():
        index = best_index(clusters, total)
        if index is None:
            yield say("{goal}: unknown.", goal=capitalized(goal))
            continue
        amounts = _amounts(clusters, total)
        others = tuple(
            _excess(cluster, amount, amounts[index] or 0.0)
            for other, (cluster, amount) in enumerate(zip(clusters, amounts, strict=True))
            if other != index and cluster.plan
        )
        best = say("{goal}: {cluster}", goal=capitalized(goal), cluster=clusters[index].name)
        yield say("{best} ({others}).", best=best, others=others) if others else say("{sentence}.", sentence=best)


def _excess(cluster: ClusterPlan, amount: float | None, least: float) -> str:
    """The ratio by which a cluster takes more than the best one."""
    if amount is None or not least:
        return say("{cluster} unknown", cluster=cluster.name)
    return say("{cluster} {share:.0%} more", cluster=cluster.name, share=amount / least - 1)
