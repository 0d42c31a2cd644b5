"""The version of the weights that a microbatch sees, in schedules that update while the pipeline is full.

Version k is the weights after k updates. A synchronous schedule has one version a step: 0.
"""

from bisect import bisect_left
from collections import Counter

from shardwright.schedule.action import Action, Kind
from shardwright.schedule.schedule import Schedule


def weight_versions(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Map (stage, microbatch) to the number of updates in the weights that its forward and its backward see.

    Stashed: the updates before its forward. Double-buffered: batch k sees version k - 1, and batches 0 and 1 see the
    initial one.
    """
    versions: dict[tuple[int, int], int] = {}
    for row in schedule.ranks:
        updates: dict[int, list[int]] = {}  # by stage: the last microbatch in each update so far
        for action in row:
            if action.kind is Kind.STEP:
                updates.setdefault(action.stage, []).append(action.microbatch)
            for part in _forwards(action):
                versions[part.stage, part.microbatch] = len(updates.get(part.stage, ()))
        if schedule.weights == "double-buffered":
            for stage, last_of_batch in updates.items():
                ends = sorted(last_of_batch)
                for i in range(schedule.num_microbatches):
                    batch = bisect_left(ends, i)
                    versions[stage, i] = max(batch - 1, 0)
    return dict.fromkeys(versions, 0) if schedule.weights == "current" else versions


def stashed_versions(schedule: Schedule) -> list[int]:
    """Most versions of a stage's weights alive at once, by rank: the newest, and all that a later backward needs.

    Always 2 if double-buffered: the newest, and the version before it, which the next batch uses.
    """
    if schedule.weights != "stashed":
        return [1 if schedule.weights == "current" else 2] * schedule.num_ranks
    version_of = weight_versions(schedule)
    most = []
    for row in schedule.ranks:
        updates = 0
        awaited: Counter[int] = Counter()  # by version: the number of later backwards that need it
        peak = 1
        for action in row:
            for part in _forwards(action):
                awaited[version_of[part.stage, part.microbatch]] += 1
            peak = max(peak, len(awaited) + (updates not in awaited))
            if action.kind is Kind.STEP:
                updates += 1
            elif action.kind is Kind.BACKWARD:
                version = version_of[action.stage, action.microbatch]
                awaited[version] -= 1
                if not awaited[version]:
                    del awaited[version]
        most.append(peak)
    return most


def _forwards(action: Action) -> list[Action]:
    return [part for part in action.computes() if part.kind is Kind.FORWARD]
