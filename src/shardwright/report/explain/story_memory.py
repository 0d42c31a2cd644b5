"""The chapter of a story on memory: what each device holds, and what each choice of the plan changes."""

from collections.abc import Iterator

from shardwright.config.phrase import capitalized, say
from shardwright.config.software import software_of
from shardwright.config.units import memory_text, ranks_text
from shardwright.explain.story import Story
from shardwright.explain.strategy_effects import Effect
from shardwright.planner.advice.rules import first_place_of_state
from shardwright.report.document import AlignedRows, Lines, Paragraph, Part, paragraph
from shardwright.report.fit_verdict import device_room_bytes, offered_bytes


def memory_chapter(story: Story) -> Iterator[Part]:
    """The account of each pipeline rank, compared with a device, and the effects of strategies."""
    job, placement = story.job, story.program.placement
    kinds = ["parameters", "gradients", "optimizer", "activations", "buffers"]
    kinds += ["host"] if any(account.host_bytes for account in story.memory.values()) else []
    heading = [say("pipeline rank"), say("stages"), *map(say, kinds), say("together")]
    rows: list[list[str]] = [[*heading, *([say("predicted")] if story.predicted else [])]]
    previous_rank = -1
    for rank, account in story.memory.items():
        if rank > previous_rank + 1:
            rows.append(["...", *[""] * (len(rows[0]) - 1)])
        previous_rank = rank
        values = account.as_dict()
        stages = ranks_text(tuple(placement.stages_of(rank)), 4)
        memory_texts = [memory_text(values[f"{kind}_bytes"]) for kind in [*kinds, "total"]]
        memory_texts += [memory_text(round(story.predicted[rank].process))] if story.predicted else []
        rows.append([str(rank), stages, *memory_texts])
    yield AlignedRows(rows)
    yield paragraph(
        say("Of the tensor-parallel rank that holds most."),
        say(
            "The account is of Shardwright's own runtime: parameters, gradients and optimizer state exact to the byte, "
            "activations what is kept for the backward at the fullest moment, buffers at their peak."
        ),
        say(
            "Together has working memory, too, which operators need while they run: {working} on the fullest rank.",
            working=memory_text(round(story.memory[story.fullest].working_bytes)),
        ),
        say(
            "The last column is what a process of {software} is predicted to need, with its own kernels and what its "
            "libraries take.",
            software=job.cluster.software,
        )
        if story.predicted
        else "",
    )
    yield from _room(story)
    if place := first_place_of_state(job):
        yield paragraph(
            say(
                "By the tree of `shardwright learn choosing`, with 18 bytes a parameter: {says}. {verdict}",
                says=place.says,
                verdict=say("This plan is on that branch.") if place.agrees else say("This plan is on another branch."),
            )
        )
    if story.effects:
        yield say(
            "What the plan's choices do to pipeline rank {rank}, the fullest, all else the same:", rank=story.fullest
        )
        yield Lines(tuple(map(_effect, story.effects)))


def _room(story: Story) -> Iterator[Part]:
    """The memory of the fullest rank's process, compared with that which a device shows, as in `estimate`."""
    job, room = story.job, device_room_bytes(story.job)
    if room is None:
        return
    limit = offered_bytes(job)
    rank, needs = story.fullest, story.memory[story.fullest].total_bytes + limit - room
    device = say("A device, {device}, shows {room}", device=job.cluster.device, room=memory_text(limit))
    owner = say("the process of pipeline rank {rank}, the fullest,", rank=rank)
    if story.predicted and not software_of(job.cluster.software).is_own:
        processes = [round(memory.process) for memory in story.predicted]
        needs = max(processes)
        owner = say(
            "the process of {software} on pipeline rank {rank}, the fullest,",
            software=job.cluster.software,
            rank=processes.index(needs),
        )
    if needs <= limit:
        yield paragraph(
            say(
                "{device}: {owner} needs {left} less than that.",
                device=device,
                owner=owner,
                left=memory_text(limit - needs),
            )
        )
    else:
        yield paragraph(
            say(
                "{device}: {owner} needs {lack} more than that, so it does not fit.",
                device=device,
                owner=owner,
                lack=memory_text(needs - limit),
            )
        )


def _effect(effect: Effect) -> Paragraph:
    with_it, without_it = effect.with_it.as_dict(), effect.without_it.as_dict()
    texts = {kind: (memory_text(with_it[kind]), memory_text(without_it[kind])) for kind in with_it}
    total, total_without = texts.pop("total_bytes")
    kinds = tuple(
        say(
            "{kind} {with_it} for {without}",
            kind=say(kind.removesuffix("_bytes")),
            with_it=with_text,
            without=without_text,
        )
        for kind, (with_text, without_text) in texts.items()
        if with_text != without_text
    )
    change = say(
        "{strategy}: {total} with it, {without} without{kinds}.",
        strategy=effect.strategy,
        total=total,
        without=total_without,
        kinds=say(" ({kinds})", kinds=kinds) if kinds else "",
    )
    return Paragraph((change, say("{does}.", does=capitalized(effect.does))), "- ", "  ")
