"""Text of the command `explain`: the story of one step, chapter by chapter."""

from collections.abc import Iterator

from shardwright.config.cluster_facts import node_devices
from shardwright.config.link_words import domain_phrase, link_words
from shardwright.config.phrase import ENGLISH, capitalized, fixed, note_phrase, say
from shardwright.config.units import counted_phrase, number_text, ranks_text, seconds_text
from shardwright.explain.rank_groups import RankGroup
from shardwright.explain.step_traffic import Link
from shardwright.explain.story import Story
from shardwright.report.document import AlignedRows, Lines, Paragraph, Part, Title, document_text, paragraph
from shardwright.report.estimate_text import parameters_text
from shardwright.report.explain.story_memory import memory_chapter
from shardwright.report.explain.story_sum import crossings_chapter, sum_chapter, update_chapter
from shardwright.report.explain.story_tables import layout_parts
from shardwright.report.explain.story_work import backward_chapter, forward_chapter, pipeline_chapter
from shardwright.report.prediction_notes import job_notes


def story_text(story: Story, language: str = ENGLISH) -> str:
    """A story as text: a heading and numbered chapters."""
    chapters = [
        (say("Where the batch goes"), _batch), (say("Who works with whom"), _groups),
        (say("What each device holds"), memory_chapter), (say("Forward"), forward_chapter),
        (say("Backward"), backward_chapter), (say("Through the pipeline"), pipeline_chapter),
        (say("Gradients, update, parameters"), update_chapter), (say("What crosses which link"), crossings_chapter),
        (say("The sum"), sum_chapter), (say("Where every tensor lies"), _layouts),
        (say("What is often told otherwise"), _contradictions),
    ]  # fmt: skip
    texts = [document_text(_heading(story), language)]
    for title, chapter in chapters:
        if body := list(chapter(story)):
            texts.append(document_text([Title(title, len(texts)), *body], language))
    return "\n\n\n".join(texts)


def _heading(story: Story) -> list[Part]:
    job, plan, float8_recipe = story.job, story.job.plan, story.job.precision.float8
    line = say(
        "One step of {job}: {parameters} on {ranks}, {degrees}{ep}, ZeRO {zero}, {schedule}, computed in {compute}.",
        job=job.name,
        parameters=parameters_text(job.model),
        ranks=counted_phrase(plan.world, "rank"),
        degrees=plan.degrees,
        ep=f", ep {plan.ep}" if plan.ep > 1 else "",
        zero=plan.zero,
        schedule=plan.schedule,
        compute=job.precision.compute
        if float8_recipe == "none"
        else say("{compute} and fp8 ({recipe})", compute=job.precision.compute, recipe=float8_recipe),
    )
    if story.step is not None:
        more = say(
            "It takes {seconds} (predicted, with {software} on {device}).",
            seconds=seconds_text(story.step.total),
            software=job.cluster.software,
            device=job.cluster.device,
        )
    else:
        more = say("Bytes are told, and no times: {reason}.", reason=story.untimed)
    return [paragraph(line, more), *(paragraph(note_phrase(note)) for note in job_notes(job))]


def _batch(story: Story) -> Iterator[Part]:
    rows: list[list[str]] = [[say("what"), say("parts"), say("sequences"), say("tokens"), say("why")]]
    for part in story.portions:
        numbers = f"{part.num_parts:,}", f"{part.num_sequences:,}", f"{part.num_tokens:,}"
        rows.append([fixed(part.kind), *numbers, part.why])
    yield AlignedRows(rows, left=(0, 4))
    yield paragraph(
        say("Each line is one part of the line above it."),
        say(
            "A token is one number until the embedding makes it a vector of {hidden:,}.", hidden=story.job.model.hidden
        ),
    )


def _groups(story: Story) -> Iterator[Part]:
    job = story.job
    if not story.groups:
        yield say("There is one rank, and nothing to exchange.")
        return
    node, words = node_devices(job.cluster), link_words(job.cluster)
    domain, domains = fixed(words.domain), fixed(words.domains)
    nodes: list[str] = [
        say("cluster.devices_per_node is not set: all ranks are told as on one {domain}.", domain=domain)
    ]
    if node and node < job.plan.world:
        sentence = say(
            "A {domain} has {node:,} devices: rank r is on {domain} r // {divisor}.",
            domain=domain,
            node=node,
            divisor=str(node),
        )
        nodes = [sentence, *_first_node(story)]
    elif node:
        nodes = [say("All ranks are on {domain}.", domain=domain_phrase(job.cluster))]
    yield paragraph(say("{order}.", order=story.order), *nodes, say("The groups that rank 0 is in:"))
    heading = [say("axis"), say("size"), say("such groups"), say("ranks"), say("on {domains}", domains=domains)]
    rows: list[list[str]] = [[*heading, say("what passes")]]
    for group in story.groups:
        rank_columns = f"{len(group.ranks):,}", f"{group.num_groups:,}", ranks_text(group.ranks)
        rows.append([group.axis, *rank_columns, _nodes(group), fixed(group.carries)])
    yield AlignedRows(rows, left=(0, 3, 4, 5))
    if story.links:
        yield _links(story)


def _links(story: Story) -> Paragraph:
    words, node, world = link_words(story.job.cluster), node_devices(story.job.cluster), story.job.plan.world
    link_name = words.link or say("its fast links")
    network = say("the network ({name})", name=words.network) if words.network else say("the network")
    links = tuple(map(_link, story.links))
    sentences = [
        say("Links: {links}.", links=say("{inside}; {between}", inside=links[0], between=links[1]))
        if len(links) == 2
        else say("Links: {links}.", links=links[0])
    ]
    if len(links) > 1:
        sentences.append(
            say(
                "A group on one {domain} stays on {link}; one on several crosses {network}.",
                domain=fixed(words.domain),
                link=link_name,
                network=network,
            )
        )
    elif world <= node:
        sentences.append(say("All groups stay on {link}.", link=link_name))
    return paragraph(*sentences)


def _link(link: Link) -> str:
    return say(
        "{name} {peak} GB/s a device stated, {reached} reached",
        name=fixed(link.name),
        peak=number_text(link.peak_bytes_per_s / 1e9),
        reached=number_text(link.reached_bytes_per_s / 1e9),
    )


def _first_node(story: Story) -> list[str]:
    """A sentence on the ranks of node 0 by axis: stages of a pipeline, or replicas."""
    inside = tuple(
        say("{axis} {first} to {last}", axis=axis, first=first, last=last)
        if last > first
        else say("{axis} {first}", axis=axis, first=first)
        for axis, (first, last) in story.first_node.items()
    )
    domain = fixed(link_words(story.job.cluster).domain)
    return [say("{domain} 0 has {ranks}.", domain=capitalized(domain), ranks=inside)] if inside else []


def _nodes(group: RankGroup) -> str:
    nodes = tuple(dict.fromkeys(group.nodes))
    if len(nodes) < len(group.ranks) or len(nodes) == 1:
        return ranks_text(nodes, 4)
    return say("{nodes}, one rank each", nodes=len(nodes))


def _layouts(story: Story) -> Iterator[Part]:
    yield paragraph(
        say("Three notations of one thing."),
        say(
            "DTensor's Shard(d), Replicate(), Partial() and SBP's S(d), B, P say for each mesh axis how it cuts a "
            "tensor; GSPMD's says for each dim of the tensor which axes cut it."
        ),
        say("P is a part of a sum."),
        say("An axis that is not named has one rank or replicates."),
        say("S(buffer): rows of the flat buffer in which the tensor lies with others are cut."),
    )
    yield from layout_parts(story.layouts)


def _contradictions(story: Story) -> Iterator[Part]:
    if story.contradictions:
        yield paragraph(say("Claims that are commonly told of plans like this one, and what holds for it:"))
        yield Lines(
            tuple(
                Paragraph((say('"{told}": {holds}.', told=one.told, holds=one.holds),), "- ", "  ")
                for one in story.contradictions
            )
        )
