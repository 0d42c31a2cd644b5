"""The chapters of a story on one microbatch: forward, experts, backward, and the way through the pipeline."""

from collections.abc import Iterator

from shardwright.config.link_words import link_words
from shardwright.config.phrase import fixed, say
from shardwright.config.units import bytes_text, number_text, seconds_text
from shardwright.explain.story import Story
from shardwright.report.document import Part, paragraph
from shardwright.report.explain.story_tables import passes_parts


def forward_chapter(story: Story) -> Iterator[Part]:
    """The operators of a forward."""
    yield paragraph(
        say("One microbatch on one rank."),
        say("A product of rows x inner x columns takes 2 x rows x inner x columns FLOPs."),
        say(
            "A collective lasts as long as it takes by itself; exposed of it is what no computing hides. Gaps are what "
            "launching kernels leaves idle."
        )
        if story.step
        else "",
    )
    yield from passes_parts(story.passes, backward=False)
    yield from _experts(story)


def _experts(story: Story) -> Iterator[Part]:
    use, plan, words = story.experts, story.job.plan, link_words(story.job.cluster)
    if use is None:
        return
    domain = fixed(words.domain)
    homes = [
        say(
            "{experts} on rank {rank}, {domain} {node}",
            experts=_expert_numbers(first, last),
            rank=rank,
            domain=domain,
            node=node,
        )
        for first, last, rank, node in use.homes
    ]
    homes_shown = homes if len(homes) <= 4 else [*homes[:2], "...", homes[-1]]
    listed: str = homes_shown[0]
    for home in homes_shown[1:]:
        listed = say("{homes}; {home}", homes=listed, home=home)
    yield paragraph(
        say(
            "Experts: the router gives each token {chosen} of {experts}; in rank 0's group {homes}.",
            chosen=use.num_chosen,
            experts=use.num_experts,
            homes=listed,
        ),
        say(
            "Of a microbatch a rank sends {tokens:,} tokens, a row for each choice: {rows:,} rows, of which {stay} "
            "stay if choices are even, and an expert gets {of_expert}.",
            tokens=use.num_tokens,
            rows=use.num_rows,
            stay=number_text(use.num_stay),
            of_expert=number_text(use.rows_of_expert),
        ),
        say("Each journey is an all-to-all; its backward is the same way back.") if plan.ep > 1 else "",
        say(
            "A token's experts are on {nodes:.3g} {domains} on average.",
            nodes=use.nodes_of_token,
            domains=fixed(words.domains),
        )
        if use.nodes_of_token > 1
        else "",
    )


def _expert_numbers(first: int, last: int) -> str:
    if last > first:
        return say("experts {first} to {last}", first=first, last=last)
    return say("expert {first}", first=first)


def backward_chapter(story: Story) -> Iterator[Part]:
    """The operators of a backward."""
    is_late = any(operator.in_backward for piece in story.passes for operator in piece.operators)
    yield paragraph(
        say("From the last operator to the first."),
        say(
            "Each product becomes two of the same FLOPs: the gradient of its input, which the operator before waits "
            "for, and that of its weight, which nobody waits for until the end of the step."
        ),
        say("Frozen weights have no gradient, so a product with one becomes one: that for its input.")
        if story.job.model.is_adapted
        else "",
        say(
            "The matrices of layers are stored in NF4, and made numbers for each product, forward and backward: no "
            "copy of 16 bits is kept."
        )
        if story.job.model.adapter.row_format
        else "",
        say("Attention computes its scores again, 2.5 times its forward."),
        say("The head and the loss are computed here alone, their forward too, so that no logits are kept.")
        if is_late
        else "",
    )
    yield from passes_parts(list(reversed(story.passes)), backward=True)


def pipeline_chapter(story: Story) -> Iterator[Part]:
    """The messages between stages, the order of work, and the bubble."""
    job, plan = story.job, story.job.plan
    if plan.pp == 1:
        return
    num_bytes = story.program.sizes.message if story.program.sizes else 0
    yield paragraph(
        say(
            "{microbatches:,} microbatches pass through {stages} stages on {ranks} ranks in the order of {schedule}.",
            microbatches=job.num_microbatches,
            stages=plan.num_stages,
            ranks=plan.pp,
            schedule=plan.schedule,
        ),
        say(
            "Between two stages travel hidden states, {tokens:,} tokens x {size} x {hidden:,} numbers = {bytes}, and "
            "as much back for their gradients.",
            tokens=job.tokens_between,
            size=plan.microbatch_size,
            hidden=job.model.hidden,
            bytes=bytes_text(num_bytes),
        ),
    )
    rank_actions = story.program.ranks[story.rank]
    actions = " ".join(map(str, rank_actions[:14])) + (" ..." if len(rank_actions) > 14 else "")
    yield paragraph(
        say(
            "Pipeline rank {rank} begins: {actions} (2F5 is the forward of microbatch 5 through stage 2, B its "
            "backward, I and W its two halves, SF and RF a message sent and received, R the reduction "
            "of gradients, S the update).",
            rank=story.rank,
            actions=actions,
        ),
        say("`shardwright simulate {job}` draws all of it.", job=job.name),
    )
    if story.step is not None:
        yield paragraph(
            say(
                "It waits {bubble} for others at the ends of the step, {share:.1f} % of it (the bubble), and "
                "{messages} for messages.",
                bubble=seconds_text(story.step.bubble),
                share=100 * story.step.bubble / story.step.total,
                messages=seconds_text(story.step.messages),
            )
        )
