"""Text of the command `explain`: the story of one step, chapter by chapter."""

from collections.abc import Iterator

from shardwright.config.cluster_facts import node_devices
from shardwright.config.job import JobSpec
from shardwright.config.link_words import domain_text, link_words
from shardwright.config.software import software_of
from shardwright.config.units import bytes_text, counted, memory_text, number_text, ranks_text, seconds_text
from shardwright.explain.rank_groups import RankGroup
from shardwright.explain.story import Story
from shardwright.explain.strategy_effects import Effect
from shardwright.memory.step_collectives import PieceKind
from shardwright.report.estimate_text import parameters_text
from shardwright.report.explain.story_tables import crossings_text, layout_text, passes_text, piece_name, pieces_text
from shardwright.report.explain.update_text import update_sentences
from shardwright.report.fit_verdict import device_entry, device_room_bytes
from shardwright.report.prediction_notes import job_notes
from shardwright.report.text_columns import aligned, filled
from shardwright.sharding.groups import REPLICAS, axis_groups, num_replicas


def story_text(story: Story) -> str:
    """A story as text: a heading and numbered chapters."""
    chapters = [
        ("Where the batch goes", _batch), ("Who works with whom", _groups), ("What each device holds", _memory),
        ("Forward", _forward), ("Backward", _backward), ("Through the pipeline", _pipeline),
        ("Gradients, update, parameters", _update), ("What crosses which link", _crossings),
        ("The sum", _sum), ("Where every tensor lies", _layouts), ("What is often told otherwise", _contradictions),
    ]  # fmt: skip
    parts = [_heading(story)]
    for title, chapter in chapters:
        if body := list(chapter(story)):
            number = len(parts)
            parts.append("\n\n".join([f"{number}. {title}\n{'-' * (len(title) + 2 + len(str(number)))}", *body]))
    return "\n\n\n".join(parts)


def _says(*sentences: str) -> str:
    return filled(" ".join(sentence for sentence in sentences if sentence))


def _heading(story: Story) -> str:
    job, plan, float8_recipe = story.job, story.job.plan, story.job.precision.float8
    line = (
        f"One step of {job.name}: {parameters_text(job.model)} on {counted(plan.world, 'rank')}, "
        f"{plan.degrees}{f', ep {plan.ep}' if plan.ep > 1 else ''}, ZeRO {plan.zero}, {plan.schedule}, computed in "
        f"{job.precision.compute}{f' and fp8 ({float8_recipe})' if float8_recipe != 'none' else ''}."
    )
    if story.step is not None:
        software = f"{job.cluster.software} on {job.cluster.device}"
        line += f" It takes {seconds_text(story.step.total)} (predicted, with {software})."
    else:
        line += f" Bytes are told, and no times: {story.untimed}."
    return "\n\n".join([_says(line), *(_says(f"Note: {note}.") for note in job_notes(job))])


def _batch(story: Story) -> Iterator[str]:
    rows = [["what", "parts", "sequences", "tokens", "why"]]
    for part in story.portions:
        rows.append([part.kind, f"{part.num_parts:,}", f"{part.num_sequences:,}", f"{part.num_tokens:,}", part.why])
    yield aligned(rows, left=(0, 4))
    yield _says(
        "Each line is one part of the line above it. A token is one number until the embedding makes it a "
        f"vector of {story.job.model.hidden:,}."
    )


def _groups(story: Story) -> Iterator[str]:
    job = story.job
    if not story.groups:
        yield "There is one rank, and nothing to exchange."
        return
    node, words = node_devices(job.cluster), link_words(job.cluster)
    nodes = f"cluster.devices_per_node is not set: all ranks are told as on one {words.domain}."
    if node and node < job.plan.world:
        nodes = f"A {words.domain} has {node:,} devices: rank r is on {words.domain} r // {node}.{_first_node(story)}"
    elif node:
        nodes = f"All ranks are on {domain_text(job.cluster)}."
    yield _says(f"{story.order}.", nodes, "The groups that rank 0 is in:")
    rows = [["axis", "size", "such groups", "ranks", f"on {words.domains}", "what passes"]]
    for group in story.groups:
        rank_columns = f"{len(group.ranks):,}", f"{group.num_groups:,}", ranks_text(group.ranks)
        rows.append([group.axis, *rank_columns, _nodes(group), group.carries])
    yield aligned(rows, left=(0, 3, 4, 5))
    if story.links:
        links = [
            f"{link.name} {number_text(link.peak_bytes_per_s / 1e9)} GB/s a device stated, "
            f"{number_text(link.reached_bytes_per_s / 1e9)} reached"
            for link in story.links
        ]
        link_name = words.link or "its fast links"
        network = f"the network ({words.network})" if words.network else "the network"
        yield _says(
            f"Links: {'; '.join(links)}.",
            f"A group on one {words.domain} stays on {link_name}; one on several crosses {network}."
            if len(story.links) > 1
            else f"All groups stay on {link_name}." * (job.plan.world <= node),
        )


def _first_node(story: Story) -> str:
    """A sentence on the ranks of node 0 by axis: stages of a pipeline, or replicas."""
    inside = [
        f"{axis} {first} to {last}" if last > first else f"{axis} {first}"
        for axis, (first, last) in story.first_node.items()
    ]
    name = link_words(story.job.cluster).domain
    return f" {name.capitalize()} 0 has {', '.join(inside)}." if inside else ""


def _nodes(group: RankGroup) -> str:
    nodes = tuple(dict.fromkeys(group.nodes))
    return ranks_text(nodes, 4) if len(nodes) < len(group.ranks) or len(nodes) == 1 else f"{len(nodes)}, one rank each"


def _memory(story: Story) -> Iterator[str]:
    job, placement = story.job, story.program.placement
    kinds = ["parameters", "gradients", "optimizer", "activations", "buffers"]
    kinds += ["host"] if any(account.host_bytes for account in story.memory.values()) else []
    rows = [["pipeline rank", "stages", *kinds, "together", *(["predicted"] if story.predicted else [])]]
    previous_rank = -1
    for rank, account in story.memory.items():
        if rank > previous_rank + 1:
            rows.append(["...", *[""] * (len(rows[0]) - 1)])
        previous_rank = rank
        values = account.as_dict()
        stages = " ".join(map(str, placement.stages_of(rank)))
        memory_texts = [memory_text(values[f"{kind}_bytes"]) for kind in [*kinds, "total"]]
        memory_texts += [memory_text(round(story.predicted[rank].process))] if story.predicted else []
        rows.append([str(rank), stages, *memory_texts])
    yield aligned(rows)
    yield _says(
        "Of the tensor-parallel rank that holds most. The account is of Shardwright's own runtime: parameters, "
        "gradients and optimizer state exact to the byte, activations what is kept for the backward at the fullest "
        "moment, buffers at their peak.",
        f"The last column is what a process of {job.cluster.software} is predicted to need, with its own kernels and "
        "what its libraries take."
        if story.predicted
        else "",
    )
    yield from _room(story)
    if story.effects:
        yield f"What the plan's choices do to pipeline rank {story.fullest}, the fullest, all else the same:"
        yield "\n".join(map(_effect, story.effects))


def _room(story: Story) -> Iterator[str]:
    """The memory of the fullest rank, compared with a device's; with other software its process, as in `estimate`."""
    job, limit = story.job, device_room_bytes(story.job)
    if limit is None:
        return
    rank, needs, verb, owner = story.fullest, story.memory[story.fullest].total_bytes, "offers", "pipeline rank"
    if story.predicted and not software_of(job.cluster.software).is_own:
        processes = [round(memory.process) for memory in story.predicted]
        rank, needs, limit = (
            processes.index(max(processes)),
            max(processes),
            int(device_entry(job).offered_bytes),
        )
        verb, owner = "shows", f"the process of {job.cluster.software} on pipeline rank"
    difference = f"{memory_text(limit - needs)} less" if needs <= limit else f"{memory_text(needs - limit)} more"
    verdict = "" if needs <= limit else ", so it does not fit"
    device = f"A device, {job.cluster.device}, {verb} {memory_text(limit)}"
    yield _says(f"{device}: {owner} {rank}, the fullest, needs {difference} than that{verdict}.")


def _effect(effect: Effect) -> str:
    with_it, without_it = effect.with_it.as_dict(), effect.without_it.as_dict()
    texts = {kind: (memory_text(with_it[kind]), memory_text(without_it[kind])) for kind in with_it}
    total, total_without = texts.pop("total_bytes")
    kinds = ", ".join(
        f"{kind.removesuffix('_bytes')} {with_text} for {without_text}"
        for kind, (with_text, without_text) in texts.items()
        if with_text != without_text
    )
    text = (
        f"{effect.strategy}: {total} with it, {total_without} without"
        f"{f' ({kinds})' if kinds else ''}. {effect.does[0].upper()}{effect.does[1:]}."
    )
    return filled(text, "- ", "  ")


def _forward(story: Story) -> Iterator[str]:
    yield _says(
        "One microbatch on one rank. A product of rows x inner x columns takes 2 x rows x inner x columns FLOPs.",
        "Exposed is what no computing hides; gaps are what launching kernels leaves idle." if story.step else "",
    )
    yield passes_text(story.passes, backward=False)
    yield from _experts(story)


def _experts(story: Story) -> Iterator[str]:
    use, plan, words = story.experts, story.job.plan, link_words(story.job.cluster)
    if use is None:
        return
    homes = [
        f"{f'experts {first} to {last}' if last > first else f'expert {first}'} on rank {rank}, {words.domain} {node}"
        for first, last, rank, node in use.homes
    ]
    homes_shown = homes if len(homes) <= 4 else [*homes[:2], "...", homes[-1]]
    token_crosses = use.nodes_of_token > 1
    yield _says(
        f"Experts: the router gives each token {use.num_chosen} of {use.num_experts}; in rank 0's group "
        f"{'; '.join(homes_shown)}. Of a microbatch a rank sends {use.num_tokens:,} tokens, a row for each choice: "
        f"{use.num_rows:,} rows, of which {number_text(use.num_stay)} stay if choices are even, and an expert gets "
        f"{number_text(use.rows_of_expert)}.",
        "Each journey is an all-to-all; its backward is the same way back." if plan.ep > 1 else "",
        f"A token's experts are on {use.nodes_of_token:.3g} {words.domains} on average." if token_crosses else "",
    )


def _backward(story: Story) -> Iterator[str]:
    yield _says(
        "From the last operator to the first. Each product becomes two of the same FLOPs: the gradient of its input, "
        "which the operator before waits for, and that of its weight, which nobody waits for until the end of the "
        "step. Attention computes its scores again, 2.5 times its forward.",
        "The head and the loss are computed here alone, their forward too, so that no logits are kept."
        if any(operator.in_backward for piece in story.passes for operator in piece.operators)
        else "",
    )
    yield passes_text(list(reversed(story.passes)), backward=True)


def _pipeline(story: Story) -> Iterator[str]:
    job, plan = story.job, story.job.plan
    if plan.pp == 1:
        return
    num_bytes = story.program.sizes.message if story.program.sizes else 0
    sequence = f"{job.tokens_between:,} tokens x {plan.microbatch_size} x {job.model.hidden:,}"
    yield _says(
        f"{job.num_microbatches:,} microbatches pass through {plan.num_stages} stages on {plan.pp} ranks in the order "
        f"of {plan.schedule}. Between two stages travel hidden states, {sequence} numbers = {bytes_text(num_bytes)}, "
        "and as much back for their gradients.",
    )
    rank_actions = story.program.ranks[story.rank]
    actions = " ".join(map(str, rank_actions[:14])) + (" ..." if len(rank_actions) > 14 else "")
    yield _says(
        f"Pipeline rank {story.rank} begins: {actions} (2F5 is the forward of microbatch 5 through stage 2, B its "
        "backward, I and W its two halves, SF and RF a message sent and received, R the reduction of gradients, S the "
        f"update). `shardwright simulate {job.name}` draws all of it."
    )
    if story.step is not None:
        share = 100 * story.step.bubble / story.step.total
        yield _says(
            f"It waits {seconds_text(story.step.bubble)} for others at the ends of the step, {share:.1f} % of it (the "
            f"bubble), and {seconds_text(story.step.messages)} for messages."
        )


def _update(story: Story) -> Iterator[str]:
    job, plan = story.job, story.job.plan
    crossings = [c for c in story.crossings if c.phase in ("gradients", "parameters")]
    if not crossings:
        yield _says("There is one replica: no gradient has to be summed with another's.")
    elif all(c.axis == "ends" for c in crossings):
        yield _says(
            "There is one replica. The table of embeddings lies on the first and the last stage, which both use it: "
            f"its two gradients are summed, {number_text(crossings[0].full_bytes)} bytes in one {crossings[0].kind}."
        )
    else:
        yield _says(
            f"{num_replicas(plan):,} ranks hold the same part of a layer and have seen different tokens: their "
            f"gradients are summed, in buckets of {plan.bucket_mib:g} MiB of weights or one tensor"
            + f"{_reduction(plan.zero)}.",
            f"Gradients travel in {job.precision.reduce_number}."
            if plan.compress == "none"
            else f"Gradients are compressed on their way: {plan.compress}.",
            _expert_replicas(job),
            "The account is the runtime's, exact in calls and bytes.",
        )
        rows = [["what", "axis", "collective", "calls", "bytes in all"]]
        rows += [[c.phase, c.axis, c.kind, number_text(c.calls), f"{c.full_bytes:,.0f}"] for c in crossings]
        yield aligned(rows, left=(0, 1, 2))
    if story.step is not None:
        yield _says(*update_sentences(job, story.step.optimizer))


def _expert_replicas(job: JobSpec) -> str:
    if not job.model.moe.experts:
        return ""
    count = axis_groups(job.plan, REPLICAS[True]).size
    if count == 1:
        return "Each part of an expert is on one rank alone, and its gradients with it."
    return f"Each part of an expert is on {count:,} ranks, and they sum its gradients."


def _reduction(zero: int) -> str:
    return {
        0: ", so that every one of them has the whole sum and makes the whole update",
        1: ", each rank getting the sum of its own shard; it updates that, and all gather the updated parameters",
        2: ", each rank keeping the sum of its own shard alone; it updates that, and all gather the updated parameters",
        3: ", each rank keeping the sum of its own shard alone; it updates that, and a layer's parameters are gathered "
        "when they are needed",
    }[zero]


def _crossings(story: Story) -> Iterator[str]:
    if not story.crossings:
        return
    rank = f"pipeline rank {story.rank}" + ("" if story.step is None else ", which sets the pace,")
    words, crosses = link_words(story.job.cluster), 0 < node_devices(story.job.cluster) < story.job.plan.world
    yield _says(
        f"All that one rank of {rank} communicates in a step. A tensor's bytes are those of the full tensor; what the "
        "rank sends for it is (n - 1) / n of that in a ring of n ranks (an all_reduce twice)"
        + (
            f", and of a ring over several {words.domains} one hop in each {words.domain} leaves it."
            if crosses
            else "."
        ),
    )
    yield crossings_text(story.crossings, words, crosses)
    if not all(c.calls for c in story.crossings):
        yield "What has no calls is predicted, and our runtime does without it."
    if any((c.exposed_s or 0.0) > 1.5 * (c.seconds or 0.0) for c in story.crossings if c.phase == "parameters"):
        yield _says(
            "More of the replicas' communication is exposed than it takes by itself: the prediction is of software "
            "that gathers each layer for every microbatch, forward and backward; calls and bytes are of our runtime, "
            "which keeps what the next microbatch needs."
        )


def _sum(story: Story) -> Iterator[str]:
    step, job = story.step, story.job
    if step is None:
        yield _says(f"No times: {story.untimed}.")
        return
    num_microbatches = job.num_microbatches
    rows = [["part", "seconds", "share"]]
    for name, part_name in _PARTS:
        if seconds := getattr(step, name):
            rows.append([part_name, f"{seconds:.6f}", f"{100 * seconds / step.total:.1f} %"])
    rows.append(["the step", f"{step.total:.6f}", "100 %"])
    yield _says(
        f"Pipeline rank {story.rank} computes {pieces_text(story.pieces)}. A microbatch takes "
        + ", and ".join(_piece_seconds(story, kind, count) for kind, count in story.pieces.items())
        + ", without what ZeRO 3 gathers and scatters" * any(story.times[kind].shard for kind in story.pieces)
        + f". That {num_microbatches:,} times, and once what only the ends of a step have:",
    )
    yield aligned(rows)
    tokens = story.tokens_per_s or 0.0
    yield _says(
        f"{tokens:,.0f} tokens/s, {tokens / job.plan.world:,.0f} a device. MFU {100 * step.mfu:.1f} %, HFU "
        f"{100 * step.hfu:.1f} %. Four of five runs like this are expected between {seconds_text(step.low)} and "
        f"{seconds_text(step.high)}."
    )


def _piece_seconds(story: Story, kind: PieceKind, count: int) -> str:
    time = story.times[kind]
    parts = [
        ("forward", time.forward),
        ("backward", time.input_grad + time.weight_grad),
        ("again", time.again),
        ("exposed communication", time.exposed - time.host - time.shard),
        ("host memory", time.host),
    ]
    terms = " + ".join(f"{name} {seconds_text(float(seconds))}" for name, seconds in parts if seconds)
    total = float(time.total - time.shard)
    return f"{f'{count} times ' if count > 1 else ''}{seconds_text(total)} in {piece_name(kind)} ({terms})"


_PARTS = (
    ("compute", "computing, forward and backward"), ("again", "computing again"),
    ("tensor", "tp, exposed"), ("context", "cp, exposed"), ("expert", "ep, exposed"),
    ("data", "gradients and parameters, exposed"), ("messages", "messages of the pipeline"),
    ("bubble", "bubble"), ("optimizer", "update"), ("host", "host memory, exposed"),
    ("other", "host, loader, slowest devices"),
)  # fmt: skip


def _layouts(story: Story) -> Iterator[str]:
    yield _says(
        "Three notations of one thing. DTensor's Shard(d), Replicate(), Partial() and SBP's S(d), B, P say for each "
        "mesh axis how it cuts a tensor; GSPMD's says for each dim of the tensor which axes cut it. P is a part of a "
        "sum. An axis that is not named has one rank or replicates. S(buffer): rows of the flat buffer in which the "
        "tensor lies with others are cut."
    )
    yield layout_text(story.layouts)


def _contradictions(story: Story) -> Iterator[str]:
    if story.contradictions:
        yield _says("Claims that are commonly told of plans like this one, and what holds for it:")
        yield "\n".join(filled(f'"{one.told}": {one.holds}.', "- ", "  ") for one in story.contradictions)
