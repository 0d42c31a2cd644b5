"""Comparison, by hash, of the state that several ranks hold alike: it names a rank with a flipped bit.

The state that is equal depends on the stage of ZeRO. The groups are those of sharding/groups.py:

    kind            state                                         equal on
    values          full values of parameters (stages 0 to 2)     all replicas
                    shards of them (stage 3)                      ranks that hold the same shard (hybrid sharding)
    state           float32 weights and moments (stage 0)         all replicas
                    shards of them (stages 1 to 3)                ranks that hold the same shard
    norms           norms and biases that tp does not cut         the ranks of a tp line

Stages 1 and 2 all-gather all values after each update. So a wrong value in another rank's shard disappears with the
next update, and a wrong value in a rank's own shard becomes wrong on all ranks alike, which no comparison detects.

Experts have the first two kinds once more, because their replicas are other ranks. Matrices that tp does not cut are
not compared over tp: their gradients are products over many tokens, which devices need not sum in one order.

A rank has one hash of each kind. One all-gather of a few numbers per rank distributes the hashes, and every rank
compares all of them. Only if some differ, the hashes of the parts are gathered too. If most ranks of a group agree, the
others are named, else all ranks of the group.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.config.base import PassingError
from shardwright.config.job import JobSpec
from shardwright.config.phrase import each, fixed, say
from shardwright.config.plan import PlanSpec
from shardwright.config.units import counted_phrase
from shardwright.parallel.comm.collectives import all_gather, all_reduce_max
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.zero.flat_unit import FlatUnit
from shardwright.sharding.groups import COPIES, SHARDS, TP, axis_groups, num_replicas, zero_stage
from shardwright.train.build import Replica
from shardwright.train.health.repeated_step import content_hash, gather_texts, wrapped

KINDS: tuple[str, ...] = (say("values"), say("state"), say("values of experts"), say("state of experts"), say("norms"))
_MOST_NAMED = 8


class ReplicasDifferError(PassingError):
    """State that should be equal on several ranks differs: the run can only resume from a checkpoint."""


@dataclass(frozen=True)
class HeldPart:
    """A part of a rank's state: one of KINDS, its name, and its hash. Ranks with equal state have the same parts in the
    same order."""

    kind: str
    name: str
    hash: Tensor


@dataclass(frozen=True)
class OddRanks:
    """Ranks whose state of a kind differs from that of the other `compared` ranks. Without a majority `ranks` are all
    compared ranks, and `are_sure` is False. `by_rank` is False if sums over several ranks were compared."""

    kind: str
    ranks: tuple[int, ...]
    compared: tuple[int, ...]
    are_sure: bool
    by_rank: bool = True


def parts_of(replica: Replica) -> Iterator[HeldPart]:
    """All parts of this rank's state that another rank may hold, too."""
    for stage, shards in sorted(replica.shards.items()):
        for unit in shards.units:
            yield from _parts_of_unit(stage, unit)


def _parts_of_unit(stage: int, unit: FlatUnit) -> Iterator[HeldPart]:
    suffix = " of experts" if unit.parameters[0].place.is_expert else ""
    for parameter in unit.parameters:
        first, values = unit.held_values(parameter)
        values_hash = content_hash(values, first)
        yield HeldPart(f"values{suffix}", parameter.place.name, values_hash)
        if not suffix and len(parameter.shape) == 1 and not parameter.place.sharded_over:
            yield HeldPart("norms", parameter.place.name, values_hash)
    for on_host in (False, True):
        for i, tensor in enumerate(unit.masters.memory(on_host)):
            yield HeldPart(f"state{suffix}", f"the optimizer's state {i} of {unit.name}", content_hash(tensor))


def totals(parts: Iterable[HeldPart], device: torch.device) -> Tensor:
    """The hash of each kind, int64 [kinds]: a sum over parts, each with a factor. The factor is the part's number, but
    for norms its name: so the hashes of shards of a norm add up to the hash of the norm."""
    sums = {kind: torch.zeros((), dtype=torch.int64, device=device) for kind in KINDS}
    number: Counter[str] = Counter()
    for part in parts:
        number[part.kind] += 1
        factor = wrapped(2 * _text_hash(part.name if part.kind == "norms" else str(number[part.kind])) + 1)
        sums[part.kind] += part.hash.to(device) * factor
    return torch.stack([sums[kind] for kind in KINDS])


def _text_hash(text: str) -> int:
    """A hash of a text in 63 bits, the same in every process (FNV-1a)."""
    mixed = 0xCBF29CE484222325
    for byte in text.encode():
        mixed = (mixed ^ byte) * 0x100000001B3 % (1 << 64)
    return mixed >> 1


def groups_alike(plan: PlanSpec) -> dict[str, list[list[list[int]]]]:
    """The groups with equal state, by kind. A group is a list of sets of ranks. The sum of the hashes of a set's ranks
    is equal for all sets of a group; most sets are one rank."""
    groups_of_kind: dict[str, list[list[list[int]]]] = {}
    for is_expert, suffix in ((False, ""), (True, " of experts")):
        shards, copies = (axis_groups(plan, kinds[is_expert]).lines() for kinds in (SHARDS, COPIES))
        zero = zero_stage(plan, is_expert)
        all_replicas = [[[rank] for rank in line] for line in _joined(shards + copies)]
        same_shard = [[[rank] for rank in line] for line in copies]
        groups_of_kind[f"values{suffix}"] = same_shard if zero == 3 else all_replicas
        groups_of_kind[f"state{suffix}"] = all_replicas if zero == 0 else same_shard
    tp_lines = axis_groups(plan, TP).lines()
    if zero_stage(plan) < 3:
        groups_of_kind["norms"] = [[[rank] for rank in line] for line in tp_lines]
    else:
        shard_line = {rank: line for line in axis_groups(plan, SHARDS[False]).lines() for rank in line}
        groups = ([shard_line[rank] for rank in line] for line in tp_lines)
        groups_of_kind["norms"] = list({str(group): group for group in groups}.values())
    return {kind: [group for group in groups if len(group) > 1] for kind, groups in groups_of_kind.items()}


def _joined(lines: list[list[int]]) -> list[list[int]]:
    """The sets of ranks that are connected by lines, each ascending."""
    sets: list[set[int]] = []
    for line in lines:
        connected = [ranks for ranks in sets if ranks & set(line)]
        sets = [ranks for ranks in sets if not ranks & set(line)] + [set(line).union(*connected)]
    return [sorted(ranks) for ranks in sets]


def odd_ranks(hashes: list[list[int]], alike: Mapping[str, list[list[list[int]]]]) -> list[OddRanks]:
    """The ranks whose state differs from others'. `hashes` are by rank and kind, `alike` is from `groups_alike`."""
    odd_groups = []
    for kind, groups in alike.items():
        kind_index = KINDS.index(kind)
        for group in groups:
            set_hashes = [wrapped(sum(hashes[rank][kind_index] for rank in ranks)) for ranks in group]
            (majority_hash, count), *others = Counter(set_hashes).most_common()
            if not others:
                continue
            is_sure = 2 * count > len(group)
            odd_sets = [
                ranks
                for ranks, set_hash in zip(group, set_hashes, strict=True)
                if not is_sure or set_hash != majority_hash
            ]
            odd, compared = (tuple(rank for ranks in sets for rank in ranks) for sets in (odd_sets, group))
            odd_groups.append(OddRanks(kind, odd, compared, is_sure, by_rank=len(compared) == len(group)))
    return odd_groups


class ReplicaComparison:
    """Compares the state that ranks hold alike, every so many steps."""

    def __init__(self, job: JobSpec) -> None:
        self._every_steps = job.health.compare_replicas_every
        self._alike = groups_alike(job.plan) if self._every_steps else {}
        # If tp cuts the vocabulary unevenly, the ranks of a tp line have norms in different shards of ZeRO, and the
        # gradients of more than two replicas are summed in a different order there.
        if zero_stage(job.plan) and job.model.vocab % job.plan.tp and num_replicas(job.plan) > 2:
            self._alike.pop("norms", None)
        self._last_compared = -1  # steps done at the last comparison
        self.num_compared = 0

    def is_due(self, steps_done: int, before_save: bool) -> bool:
        """True if the state after so many steps is to be compared: every so many steps, and before a save, but only
        once."""
        is_on = self._every_steps > 0 and any(self._alike.values()) and steps_done != self._last_compared
        return is_on and (before_save or steps_done % self._every_steps == 0)

    def compare(self, replica: Replica, steps_done: int) -> None:
        """Raise ReplicasDifferError, with the same sentence on every rank, if the state of a rank differs. Moves one
        all-gather of 5 numbers per rank over the world, and more only if some differ."""
        self.num_compared += 1
        self._last_compared = steps_done
        parts, mesh = list(parts_of(replica)), replica.mesh
        gathered = mesh.on_host(all_gather(totals(parts, mesh.device)[None], mesh.world)).tolist()
        if odd_groups := odd_ranks(gathered, self._alike):
            raise ReplicasDifferError(_sentence(odd_groups, parts, mesh, steps_done))


def _sentence(odd_groups: list[OddRanks], parts: list[HeldPart], mesh: Mesh, steps_done: int) -> str:
    clauses: list[str] = []
    for odd in odd_groups[:_MOST_NAMED]:
        part_name = _first_odd_part(odd, parts, mesh) if odd.by_rank else ""
        ranks = say("{listed}", listed=tuple(map(mesh.shape.describe, odd.ranks[:_MOST_NAMED])))
        num_others = sum(rank not in odd.ranks for rank in odd.compared)
        others, kind = counted_phrase(num_others, "other rank"), fixed(odd.kind)
        clause = say("{ranks} hold different {kind}, and no majority says which is right", ranks=ranks, kind=kind)
        if odd.are_sure:
            clause = say("{ranks} hold other {kind} than {others}", ranks=ranks, kind=kind, others=others)
            if len(odd.ranks) == 1:
                clause = say("{rank} holds other {kind} than {others}", rank=ranks, kind=kind, others=others)
        clauses.append(say("{clause}, first in {name}", clause=clause, name=part_name) if part_name else clause)
    listed = each(clauses)
    if len(odd_groups) > _MOST_NAMED:
        listed = say("{clauses}, and {more} more", clauses=listed, more=len(odd_groups) - _MOST_NAMED)
    return say(
        "ranks that should hold the same do not after step {step}: {clauses}. A bit has flipped, or a device computes "
        "wrongly: go on from a checkpoint before it, and without that device",
        step=steps_done,
        clauses=listed,
    )


def _first_odd_part(odd: OddRanks, parts: list[HeldPart], mesh: Mesh) -> str:
    """The name of the first part of a kind in which the compared ranks differ. Every rank calls this. Moves two
    all-gathers and an all-reduce over the world."""
    own_parts = [part for part in parts if part.kind == odd.kind]
    num_parts = torch.tensor([len(own_parts)], dtype=torch.int64, device=mesh.device)
    length = int(mesh.numbers(all_reduce_max(num_parts, mesh.world))[0])
    hashes = torch.zeros(length, dtype=torch.int64, device=mesh.device)
    for i, part in enumerate(own_parts):
        hashes[i] = part.hash
    hashes_by_rank = mesh.on_host(all_gather(hashes[None], mesh.world))
    others = [rank for rank in odd.compared if rank not in odd.ranks] or [odd.compared[0]]
    differing = (hashes_by_rank[odd.ranks[-1]] != hashes_by_rank[others[0]]).nonzero().flatten().tolist()
    own_name = own_parts[differing[0]].name if differing and differing[0] < len(own_parts) else ""
    names = gather_texts(own_name, mesh)
    return names[odd.ranks[-1]]
