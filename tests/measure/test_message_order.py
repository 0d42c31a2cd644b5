"""Messages of all ranks come to their end under NCCL's rules, and a fault that is put in is told."""

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from shardwright.measure.checks.message_order import message_faults
from shardwright.measure.checks.message_record import (
    Communicator,
    IssueOrWait,
    MessageRecord,
    Operation,
    recorded_steps,
)
from support.cases import small_job

NUM_PLANTED = 40
PLANS: dict[str, dict[str, Any]] = {
    "1f1b, zero 1": {"pp": 4, "dp": 2, "zero": 1},
    "zb-v, zero 3": {"pp": 2, "dp": 2, "schedule": "zb-v", "zero": 3},
    "dualpipe": {"pp": 4, "schedule": "dualpipe"},
    "tp 2 x cp 2": {"tp": 2, "cp": 2},
    "pipedream": {"pp": 2, "dp": 2, "schedule": "pipedream"},
}


@cache
def records_of(name: str) -> list[MessageRecord]:
    kind = "mixtral" if name == "experts" else "llama"
    plan = {"dp": 4, "ep": 2} if name == "experts" else PLANS[name]
    return recorded_steps(small_job(kind, batch=8 if "dp" in plan or "pp" in plan else 2, **plan))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*PLANS, "experts"])
def test_every_message_comes_to_its_end(name: str) -> None:
    records = records_of(name)
    assert all(record.operations for record in records) and message_faults(records) == []


def swapped(rng: random.Random, record: MessageRecord) -> bool:
    """Two collectives of one communicator change places, of different kinds or sizes."""
    places = [
        (a, b)
        for a, one in enumerate(record.operations)
        for b in range(a + 1, min(a + 12, len(record.operations)))
        if (other := record.operations[b]).communicator == one.communicator and max(one.to, one.source) < 0
        if max(other.to, other.source) < 0 and other != one and other.kind != "all_to_all_v"
    ]
    if places:
        a, b = rng.choice(places)
        record.operations[a], record.operations[b] = record.operations[b], record.operations[a]
    return bool(places)


def left_out(rng: random.Random, record: MessageRecord) -> bool:
    """An operation is not asked for."""
    gone = rng.randrange(len(record.operations))
    del record.operations[gone]
    record.moments = [
        IssueOrWait(moment.operation - (moment.operation > gone), moment.is_wait)
        for moment in record.moments
        if moment.operation != gone
    ]
    return True


def resized(rng: random.Random, record: MessageRecord) -> bool:
    """An operation has another size than its partners'."""
    places = [n for n, one in enumerate(record.operations) if one.kind != "all_to_all_v"]
    place = rng.choice(places)
    record.operations[place] = replace(record.operations[place], num_bytes=record.operations[place].num_bytes + 4)
    return True


def sent_elsewhere(rng: random.Random, record: MessageRecord) -> bool:
    """A message goes to another rank of its communicator."""
    places = [n for n, one in enumerate(record.operations) if one.to >= 0 and len(one.communicator.ranks) > 2]
    if places:
        one = record.operations[place := rng.choice(places)]
        others = [rank for rank in one.communicator.ranks if rank not in (one.to, record.rank)]
        record.operations[place] = replace(one, to=rng.choice(others))
    return bool(places)


def waited_for_too_early(rng: random.Random, record: MessageRecord) -> bool:
    """A rank that sends and receives in turn waits for what it receives before it sends what the other waits for."""
    firsts = [n for n, moment in enumerate(record.moments) if not moment.is_wait]
    sends = [n for n in firsts if record.operations[record.moments[n].operation].kind == "send"]
    if not sends:
        return False
    moment = record.moments.pop(rng.choice(sends))
    record.moments = [other for other in record.moments if other.operation != moment.operation]
    record.moments.append(moment)  # at the very end, behind all that follows from it
    return True


@pytest.mark.parametrize("plant", [swapped, left_out, resized, sent_elsewhere, waited_for_too_early])
def test_what_is_put_in_is_told(plant: Callable[[random.Random, MessageRecord], bool]) -> None:
    """Forty of each kind, in what ranks really do."""
    rng, planted, missed = random.Random(plant.__name__), 0, []
    while planted < NUM_PLANTED:
        name = rng.choice([*PLANS, "experts"])
        records = deepcopy(records_of(name))
        rank = rng.randrange(len(records))
        if plant(rng, records[rank]):
            planted += 1
            missed += [] if message_faults(records) else [(name, rank)]
    assert missed == []


A, B = (Communicator(number, (0, 1)) for number in (1, 2))


def rank_that(rank: int, *words: str) -> MessageRecord:
    """A rank that asks for an all-reduce on communicator A or B ("A", "B"), or waits for it ("wait A")."""
    record, places = MessageRecord(rank), dict[str, int]()
    for word in words:
        if word.startswith("wait "):
            record.wait(places[word[5:]])
        else:
            places[word] = record.issue(Operation("all_reduce", {"A": A, "B": B}[word], 4))
    return record


def test_the_rules_differ() -> None:
    """Two communicators in two orders: that is a fault where one is made at its first use, and where a device runs all
    in one order; elsewhere it is one only if a rank waits between them."""
    together = [rank_that(0, "A", "B", "wait A", "wait B"), rank_that(1, "B", "A", "wait A", "wait B")]
    assert "rules 'lazy'" in message_faults(together)[0]
    made_before = [
        rank_that(0, "A", "wait A", "B", "wait B", "A", "B", "wait A", "wait B"),
        rank_that(1, "A", "wait A", "B", "wait B", "B", "A", "wait A", "wait B"),
    ]
    faults = message_faults(made_before)
    assert "rules 'one queue'" in faults[0] and faults[1].startswith("rank 0 waits for all_reduce of 4 bytes on")
    in_turn = [rank_that(0, "A", "B", "wait A", "wait B"), rank_that(1, "A", "wait A", "B", "wait B")]
    assert message_faults(in_turn) == []
