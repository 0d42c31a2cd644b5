"""The chapters of a story on the end of a step: the update, all that crosses links, and the sum of the times."""

from collections.abc import Iterator

from shardwright.config.cluster_facts import node_devices
from shardwright.config.job import JobSpec
from shardwright.config.link_words import link_words
from shardwright.config.phrase import fixed, say
from shardwright.config.units import number_text, seconds_text
from shardwright.explain.rank_collectives import Crossing
from shardwright.explain.step_traffic import link_uses
from shardwright.explain.story import Story
from shardwright.memory.step_collectives import PieceKind
from shardwright.report.document import AlignedRows, Part, paragraph
from shardwright.report.explain.story_tables import crossings_table, piece_name, pieces_text
from shardwright.report.explain.update_text import update_sentences
from shardwright.sharding.groups import REPLICAS, axis_groups, num_replicas

_EXCESS = 1.005  # times what a collective takes by itself: more must be explained
_GATHERED_AGAIN = 1.5  # likewise, as where software gathers parameters for every microbatch


def update_chapter(story: Story) -> Iterator[Part]:
    """The collectives of gradients and parameters, and the update."""
    job, plan = story.job, story.job.plan
    crossings = [c for c in story.crossings if c.phase in ("gradients", "parameters")]
    if not crossings:
        yield paragraph(say("There is one replica: no gradient has to be summed with another's."))
    elif {c.axis for c in crossings} <= {"ends", "tp"}:
        yield paragraph(say("There is one replica."), *_sums_within(story, crossings))
        if any(c.axis == "tp" for c in crossings):
            yield _table_of_sums(crossings)
    else:
        yield paragraph(
            say(
                "{replicas:,} ranks hold the same part of a layer and have seen different tokens: their gradients are "
                "summed, in buckets of {bucket:g} MiB of weights or one tensor{reduction}.",
                replicas=num_replicas(plan),
                bucket=plan.bucket_mib,
                reduction=_REDUCTIONS[plan.zero],
            ),
            say("Gradients travel in {number}.", number=job.precision.reduce_number)
            if plan.compress == "none"
            else say("Gradients are compressed on their way: {compression}.", compression=plan.compress),
            _expert_replicas(job),
            say("The account is the runtime's, exact in calls and bytes."),
        )
        yield _table_of_sums(crossings)
    if story.step is not None:
        yield paragraph(*update_sentences(job, story.step.optimizer))


def _sums_within(story: Story, crossings: list[Crossing]) -> Iterator[str]:
    """The sums of gradients within a single replica: of the table of embeddings, and over the tensor ranks."""
    if ends := [c for c in crossings if c.axis == "ends"]:
        yield say(
            "The table of embeddings lies on the first and the last stage, which both use it: its two gradients "
            "are summed, {bytes} bytes in one {collective}.",
            bytes=number_text(ends[0].full_bytes),
            collective=ends[0].kind,
        )
    if any(c.axis == "tp" for c in crossings):
        yield say(
            "Each of {tp:,} tensor ranks has only a part of the gradient of parameters that they all hold whole, such "
            "as those of norms: these parts are summed over tp.",
            tp=story.job.plan.tp,
        )


def _table_of_sums(crossings: list[Crossing]) -> AlignedRows:
    rows: list[list[str]] = [[say("what"), say("axis"), say("collective"), say("calls"), say("bytes in all")]]
    rows += [[fixed(c.phase), c.axis, c.kind, number_text(c.calls), f"{c.full_bytes:,.0f}"] for c in crossings]
    return AlignedRows(rows, left=(0, 1, 2))


_REDUCTIONS = {
    0: say(", so that every one of them has the whole sum and makes the whole update"),
    1: say(", each rank getting the sum of its own shard; it updates that, and all gather the updated parameters"),
    2: say(
        ", each rank keeping the sum of its own shard alone; it updates that, and all gather the updated parameters"
    ),
    3: say(
        ", each rank keeping the sum of its own shard alone; it updates that, and a layer's parameters are gathered "
        "when they are needed"
    ),
}


def _expert_replicas(job: JobSpec) -> str:
    if not job.model.moe.experts:
        return ""
    count = axis_groups(job.plan, REPLICAS[True]).size
    if count == 1:
        return say("Each part of an expert is on one rank alone, and its gradients with it.")
    return say("Each part of an expert is on {ranks:,} ranks, and they sum its gradients.", ranks=count)


def crossings_chapter(story: Story) -> Iterator[Part]:
    """Every collective and message of a step, by axis."""
    if not story.crossings:
        return
    words, crosses = link_words(story.job.cluster), 0 < node_devices(story.job.cluster) < story.job.plan.world
    pace = "" if story.step is None else say(", which sets the pace,")
    hops = (
        say(
            ", and of a ring over several {domains} one hop in each {domain} leaves it",
            domains=fixed(words.domains),
            domain=fixed(words.domain),
        )
        if crosses
        else ""
    )
    yield paragraph(
        say("All that one rank of pipeline rank {rank}{pace} communicates in a step.", rank=story.rank, pace=pace),
        say(
            "A tensor's bytes are those of the full tensor; what the rank sends for it is (n - 1) / n of that in a "
            "ring of n ranks (an all_reduce twice){hops}.",
            hops=hops,
        ),
    )
    yield crossings_table(story.crossings, words, crosses)
    yield from _link_use(story)
    if not all(c.calls for c in story.crossings):
        yield say("What has no calls is predicted, and our runtime does without it.")
    yield from _excess_words(story)


def _excess_words(story: Story) -> Iterator[Part]:
    """The reason why collectives have more exposed seconds than they take by themselves, where some do."""
    in_excess = [c for c in story.crossings if (c.exposed_s or 0.0) > _EXCESS * (c.seconds or 0.0) > 0.0]
    if story.job.plan.zero == 3 and any(
        c.phase == "parameters" and (c.exposed_s or 0.0) > _GATHERED_AGAIN * (c.seconds or 0.0) for c in in_excess
    ):
        yield paragraph(
            say(
                "More of the replicas' communication is exposed than it takes by itself: the prediction is of software "
                "that gathers each layer for every microbatch, forward and backward; calls and bytes are of our "
                "runtime, which keeps what the next microbatch needs."
            )
        )
    elif in_excess:
        yield paragraph(
            say(
                "Where more is exposed than a collective takes by itself: by itself are the calls of our runtime on "
                "this rank; exposed is by how much the predicted step is longer, with waits for slower ranks, with "
                "work that is slower beside the traffic, and with calls that the predicted software makes more often."
            )
        )


def _link_use(story: Story) -> Iterator[Part]:
    """The use of each link as a share of its bandwidth."""
    step_s = None if story.step is None else float(story.step.total)
    uses = link_uses(story.job, story.links, story.crossings, step_s)
    sentences = [
        say(
            "Of {peak} GB/s {link} that is {share:.1f} % over the step.",
            peak=number_text(use.link.peak_bytes_per_s / 1e9),
            link=fixed(use.link.name),
            share=100 * use.share,
        )
        for use in uses
        if use.share is not None
    ]
    if sentences:
        yield paragraph(*sentences)


def sum_chapter(story: Story) -> Iterator[Part]:
    """The parts of a step's time, and the speed."""
    step, job = story.step, story.job
    if step is None:
        yield paragraph(say("No times: {reason}.", reason=story.untimed))
        return
    rows: list[list[str]] = [[say("part"), say("seconds"), say("share")]]
    for name, part_name in _PARTS:
        if seconds := getattr(step, name):
            rows.append([part_name, f"{seconds:.6f}", f"{100 * seconds / step.total:.1f} %"])
    rows.append([say("the step"), f"{step.total:.6f}", "100.0 %"])
    yield paragraph(
        say("Pipeline rank {rank} computes {pieces}.", rank=story.rank, pieces=pieces_text(story.pieces)),
        say(
            "A microbatch takes {times}{without}.",
            times=_piece_times(story),
            without=say(", without what ZeRO 3 gathers and scatters")
            if any(story.times[kind].shard for kind in story.pieces)
            else "",
        ),
        say("That {count:,} times, and once what only the ends of a step have:", count=job.num_microbatches),
    )
    yield AlignedRows(rows)
    tokens = story.tokens_per_s or 0.0
    yield paragraph(
        say("{tokens:,.0f} tokens/s, {a_device:,.0f} a device.", tokens=tokens, a_device=tokens / job.plan.world),
        say("MFU {mfu:.1f} %, HFU {hfu:.1f} %.", mfu=100 * step.mfu, hfu=100 * step.hfu),
        say(
            "Four of five runs like this are expected between {low} and {high}.",
            low=seconds_text(step.low, step.total),
            high=seconds_text(step.high, step.total),
        ),
    )


def _piece_times(story: Story) -> str:
    """The times of all kinds of pieces: "a, and b, and c"."""
    texts = [_piece_seconds(story, kind, count) for kind, count in story.pieces.items()]
    listed = texts[0]
    for text in texts[1:]:
        listed = say("{times}, and {time}", times=listed, time=text)
    return listed


def _piece_seconds(story: Story, kind: PieceKind, count: int) -> str:
    time = story.times[kind]
    parts = [
        (say("forward"), time.forward),
        (say("backward"), time.input_grad + time.weight_grad),
        (say("again"), time.again),
        (say("exposed communication"), time.exposed - time.host - time.shard),
        (say("host memory"), time.host),
    ]
    terms = [say("{part} {seconds}", part=name, seconds=seconds_text(float(value))) for name, value in parts if value]
    listed: str = terms[0] if terms else ""
    for term in terms[1:]:
        listed = say("{terms} + {term}", terms=listed, term=term)
    values = {"seconds": seconds_text(float(time.total - time.shard)), "piece": piece_name(kind), "terms": listed}
    if count > 1:
        return say("{count} times {seconds} in {piece} ({terms})", count=count, **values)
    return say("{seconds} in {piece} ({terms})", **values)


_PARTS = (
    ("compute", say("computing, forward and backward")), ("again", say("computing again")),
    ("tensor", say("tp, exposed")), ("context", say("cp, exposed")), ("expert", say("ep, exposed")),
    ("data", say("gradients and parameters, exposed")), ("messages", say("messages of the pipeline")),
    ("bubble", say("bubble")), ("optimizer", say("update")), ("host", say("host memory, exposed")),
    ("other", say("host, loader, slowest devices")),
)  # fmt: skip
