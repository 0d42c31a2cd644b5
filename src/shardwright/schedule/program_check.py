"""Check that a program is correct, also one written by hand. Every fault says where it is.

Rules:
- each microbatch passes every stage once, forward and backward, on the rank that holds the stage;
- no computation runs before its input has arrived;
- every send has its receive, in the same order on both sides;
- no set of ranks waits in a circle, even if sends block;
- a recompute comes after its forward and before its backward;
- if a program gathers parameters, a stage computes only between its gather and its release;
- no rank keeps more microbatches alive than `most_alive`, or more unused received messages than `most_received`.
"""

from collections import Counter, deque

from shardwright.config.phrase import say
from shardwright.schedule.action import RECV, SEND, Action, Kind
from shardwright.schedule.buffer_lifetimes import Buffer, lives, most
from shardwright.schedule.dependencies import MESSAGES, NEEDS, RECEIVED, TRAVELS, Need, Product
from shardwright.schedule.lowering.zero3_gathers import stages_needed
from shardwright.schedule.schedule import Program

_COMPUTE_ORDER = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.RECOMPUTE)
_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD)


def program_faults(program: Program, most_alive: int | None = None, most_received: int | None = None) -> list[str]:
    """All faults of a program; empty if it is correct."""
    faults = coverage_faults(program)
    gathers = any(action.kind in (Kind.GATHER, Kind.RELEASE) for row in program.ranks for action in row)
    for rank in range(program.num_ranks):
        faults += _local_faults(program, rank)
        faults += _gather_faults(program, rank) if gathers else []
    faults += _pairing_faults(program)
    if not faults:  # the replay needs correct pairs and local order
        faults += _deadlock_faults(program)
    for buffer, limit, buffers, remedy in (
        (Buffer.ACTIVATIONS, most_alive, say("microbatches alive"), say("run backwards earlier")),
        (
            Buffer.MESSAGE,
            most_received,
            say("received messages that nothing has used"),
            say("receive later, or compute earlier"),
        ),
    ):
        faults += _limit_faults(program, buffer, limit, buffers, remedy=remedy) if limit is not None else []
    return faults


def _limit_faults(program: Program, buffer: Buffer, limit: int, buffers: str, remedy: str) -> list[str]:
    faults = list[str]()
    for rank, row in enumerate(program.ranks):
        peak, index = most(life for life in lives(program, rank) if life.buffer is buffer)
        if peak > limit:
            faults.append(
                say(
                    "rank {rank} keeps {peak} {buffers}, and {limit} are allowed; the most is at action {index} "
                    "({action}); {remedy}",
                    rank=rank,
                    peak=peak,
                    buffers=buffers,
                    limit=limit,
                    index=index,
                    action=str(row[index]),
                    remedy=remedy,
                )
            )
    return faults


def _computes(row: tuple[Action, ...]) -> list[tuple[int, Action]]:
    return [(index, part) for index, action in enumerate(row) for part in action.computes()]


def coverage_faults(program: Program) -> list[str]:
    """Computations that are missing, that are done twice, or that another rank should do."""
    faults = list[str]()
    counts: Counter[tuple[Kind, int, int]] = Counter()
    for rank, row in enumerate(program.ranks):
        for index, action in _computes(row):
            counts[action.kind, action.stage, action.microbatch] += 1
            place = f"rank {rank}, action {index} ({action})"
            if not (0 <= action.stage < program.num_stages and 0 <= action.microbatch < program.num_microbatches):
                faults.append(
                    say(
                        "{place}: there are {num_stages} stages and {num_microbatches} microbatches",
                        place=place,
                        num_stages=program.num_stages,
                        num_microbatches=program.num_microbatches,
                    )
                )
            elif (holder := program.placement.rank(action.stage, action.microbatch)) != rank:
                faults.append(
                    say(
                        "{place}: stage {stage} is held by rank {holder}",
                        place=place,
                        stage=action.stage,
                        holder=holder,
                    )
                )
    for stage in range(program.num_stages):
        for i in range(program.num_microbatches):
            f, b, ig, w, recomputes = (counts[kind, stage, i] for kind in _COMPUTE_ORDER)
            if f != 1:
                faults.append(say("{stage}F{i} runs {f} times; once is right", stage=stage, i=i, f=f))
            if recomputes > 1:
                faults.append(
                    say("{stage}C{i} runs {recomputes} times; once is right", stage=stage, i=i, recomputes=recomputes)
                )
            if program.trains and not ((b, ig, w) == (1, 0, 0) or (b, ig, w) == (0, 1, 1)):
                faults.append(
                    say(
                        "stage {stage}, microbatch {i}: B {b}, I {ig}, W {w} times; one B, or one I and one W",
                        stage=stage,
                        i=i,
                        b=b,
                        ig=ig,
                        w=w,
                    )
                )
    return faults


def _local_faults(program: Program, rank: int) -> list[str]:
    """Faults in the order of one rank: inputs come before use, complete gradients before their reduction, the step
    last."""
    faults = list[str]()
    row = program.ranks[rank]
    seen: set[tuple[Kind, int, int]] = set()
    for index, entry in enumerate(row):
        for action in entry.computes() or (entry,):
            for needed in _needs(action, program):
                if (needed.kind, needed.stage, needed.microbatch) not in seen:
                    faults.append(
                        say(
                            "rank {rank}, action {index} ({action}): {needed} has not run on this rank before",
                            rank=rank,
                            index=index,
                            action=action,
                            needed=needed,
                        )
                    )
        for action in entry.computes() or (entry,):
            seen.add((action.kind, action.stage, action.microbatch))
    for stage in program.placement.stages_of(rank):
        adds = [i for i, a in _computes(row) if a.stage == stage and a.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)]
        reduces = [i for i, a in enumerate(row) if a.kind is Kind.REDUCE and a.stage == stage]
        steps = [i for i, a in enumerate(row) if a.kind is Kind.STEP and a.stage in (stage, -1)]
        if adds and not (reduces and adds[-1] < reduces[-1] < max(steps, default=-1)):
            faults.append(
                say(
                    "rank {rank}: the gradients of stage {stage} are complete after action {last}, they are reduced "
                    "({stage}R) at {reduced} and the optimizer steps (S) at {stepped}; reduce after the last of "
                    "them, and end with the step",
                    rank=rank,
                    stage=stage,
                    last=adds[-1],
                    reduced=reduces or say("no place"),
                    stepped=steps or say("no place"),
                )
            )
    return faults


def _gather_faults(program: Program, rank: int) -> list[str]:
    """Faults in the gathers of one rank: parameters are gathered once before use, and released before the optimizer
    changes them."""
    faults = list[str]()
    gathered: dict[int, int] = {}  # by stage: the index of its gather
    for index, action in enumerate(program.ranks[rank]):
        place = f"rank {rank}, action {index} ({action})"
        stage = action.stage
        faults += [
            say(
                "{place}: the parameters of stage {needed} are not gathered; put {needed}G before it",
                place=place,
                needed=needed,
            )
            for needed in sorted(stages_needed(action) - gathered.keys())
        ]
        if action.kind is Kind.GATHER:
            faults += _faults_of_gather(program, rank, stage, place, gathered.get(stage))
            gathered[stage] = index
        elif action.kind is Kind.RELEASE and gathered.pop(stage, None) is None:
            faults.append(
                say("{place}: stage {stage} is not gathered, so there is nothing to let go", place=place, stage=stage)
            )
        elif action.kind is Kind.STEP and gathered:
            stale = [candidate for candidate in sorted(gathered) if stage in (candidate, -1)]
            faults += [
                say(
                    "{place}: stage {unreleased} is still gathered; put {unreleased}L before it",
                    place=place,
                    unreleased=unreleased,
                )
                for unreleased in stale
            ]
    return faults + [
        say(
            "rank {rank}, action {index} ({stage}G): stage {stage} is never released; put {stage}L after its last use",
            rank=rank,
            index=index,
            stage=stage,
        )
        for stage, index in gathered.items()
    ]


def _faults_of_gather(program: Program, rank: int, stage: int, place: str, before: int | None) -> list[str]:
    """Faults in the gather of a stage at a place. `before` is the index of an earlier gather of it that still holds."""
    faults = list[str]()
    if before is not None:
        faults.append(
            say(
                "{place}: action {gather} has gathered stage {stage}; release it (L) in between",
                place=place,
                gather=before,
                stage=stage,
            )
        )
    if stage not in program.placement.stages_of(rank):
        faults.append(
            say(
                "{place}: the rank does not hold stage {stage}, it holds {held}",
                place=place,
                stage=stage,
                held=_stages(program, rank),
            )
        )
    return faults


def _stages(program: Program, rank: int) -> str:
    return ", ".join(map(str, program.placement.stages_of(rank))) or "none"


def _needs(action: Action, program: Program) -> list[Action]:
    """The actions that must come before an action, on the same rank."""
    stage, i = action.stage, action.microbatch

    def source(need: Need) -> list[Action]:
        maker = stage + need.stage
        if not 0 <= maker < program.num_stages:
            return []  # tokens, or the loss
        if need.stage and program.placement.rank(maker, i) != program.placement.rank(stage, i):
            return [Action(MESSAGES[need.product][1], stage, i)]
        if need.product is Product.GRADIENT:
            is_split = (maker, i) in program.split_backwards or action.kind is Kind.WEIGHT_GRAD
            return [Action(Kind.INPUT_GRAD if is_split else Kind.BACKWARD, maker, i)]
        is_recomputed = need.stage == 0 and (stage, i) in program.recomputed and action.kind in _BACKWARDS
        return [Action(Kind.RECOMPUTE if is_recomputed else Kind.FORWARD, maker, i)]

    if action.kind in SEND:
        return source(Need(next(product for product, (send, _) in MESSAGES.items() if send is action.kind), 0))
    if not 0 <= stage < program.num_stages:
        return []
    return [needed for need in NEEDS.get(action.kind, ()) for needed in source(need)]


def _pairing_faults(program: Program) -> list[str]:
    """Faults of messages between two ranks that are not sent and received in the same order, in either direction."""
    sent: dict[tuple[int, int, Kind], list[tuple[int, int]]] = {}
    received: dict[tuple[int, int, Kind], list[tuple[int, int]]] = {}
    for rank, row in enumerate(program.ranks):
        for action in row:
            if action.kind in SEND:
                sent.setdefault((rank, action.peer, action.kind), []).append((action.stage, action.microbatch))
            elif action.kind in RECV:
                product = RECEIVED[action.kind]
                key = (action.peer, rank, MESSAGES[product][0])
                received.setdefault(key, []).append((action.stage - TRAVELS[product], action.microbatch))
    faults = list[str]()
    for key in sorted(sent.keys() | received.keys()):
        source, target, kind = key
        sent_order, received_order = sent.get(key, []), received.get(key, [])
        if sent_order != received_order:
            pairs = enumerate(zip(sent_order, received_order, strict=False))
            number = next(
                (n for n, (sent_one, received_one) in pairs if sent_one != received_one),
                min(len(sent_order), len(received_order)),
            )
            faults.append(
                say(
                    "rank {source} to rank {target}, message {number} of {kind}: sent is {sent}, received is "
                    "{received}",
                    source=source,
                    target=target,
                    number=number,
                    kind=kind,
                    sent=_message(sent_order, number),
                    received=_message(received_order, number),
                )
            )
    return faults


def _message(row: list[tuple[int, int]], number: int) -> str:
    return (
        say("stage {stage}, microbatch {microbatch}", stage=row[number][0], microbatch=row[number][1])
        if number < len(row)
        else "nothing"
    )


def _deadlock_faults(program: Program) -> list[str]:
    """Faults of a replay in which a send blocks until the receiver reaches its receive: the strictest transport."""
    queues = [deque(action for action in row if action.kind in SEND | RECV) for row in program.ranks]
    has_progress = True
    while has_progress:
        has_progress = False
        for rank, queue in enumerate(queues):
            while queue and queue[0].kind in SEND:
                peer = queues[queue[0].peer]
                if not (peer and peer[0].kind in RECV and peer[0].peer == rank):
                    break
                queue.popleft()
                peer.popleft()
                has_progress = True
    stuck = [
        say("rank {rank} waits at {action}", rank=rank, action=str(queue[0]))
        for rank, queue in enumerate(queues)
        if queue
    ]
    if not stuck:
        return []
    return [
        say("deadlock: {waits}; issue these sends and receives in one common order", waits=tuple(stuck)),
    ]
