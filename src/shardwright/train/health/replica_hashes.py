"""A comparison of the state that several ranks hold alike, by hash: a rank with a bit that has flipped is found and
named.

What is alike hangs on the stage of ZeRO. The groups are those of sharding/groups.py:

    kind            what                                          alike on
    values          whole values of parameters (stages 0 to 2)    all replicas
                    shards of them (stage 3)                      ranks that hold the same shard (hybrid sharding)
    state           float32 weights and moments (stage 0)         all replicas
                    shards of them (stages 1 to 3)                ranks that hold the same shard
    norms           norms and biases that tp does not cut         the ranks of a tp line

Stages 1 and 2 gather all values anew after each update: what one holds wrong of another's share lasts until then, and
what it holds wrong of its own is then wrong on all alike, which no comparison finds.

The first two kinds are there again for experts, whose replicas are other ranks. Matrices that tp does not cut are left
out: their gradients are products over many tokens, in which devices need not add in one order.

A rank has one hash of each kind. They are gathered in one all-gather of a few numbers a rank, and every rank compares
them all; only where some differ, the hashes of the parts are gathered too. Of three or more, those that are not as most
are named, else all of them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.config.base import PassingError
from shardwright.config.job import JobSpec
from shardwright.config.plan import PlanSpec
from shardwright.config.units import counted
from shardwright.parallel.comm.collectives import all_gather, all_reduce_max
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.zero.flat_unit import FlatUnit
from shardwright.sharding.groups import COPIES, SHARDS, TP, axis_groups, num_replicas, zero_stage
from shardwright.train.build import Replica
from shardwright.train.health.content_hash import content_hash, wrapped
from shardwright.train.health.repeated_step import gather_texts

KINDS = ("values", "state", "values of experts", "state of experts", "norms")
_MOST_NAMED = 8


class ReplicasDifferError(PassingError):
    """State that ranks should hold alike differs: the run can only go on from a checkpoint."""


@dataclass(frozen=True)
class HeldPart:
    """A piece of what a rank holds: one of KINDS, a name, and its hash. Ranks that hold the same have the same parts in
    the same order."""

    kind: str
    name: str
    hash: Tensor


@dataclass(frozen=True)
class OddRanks:
    """Ranks that hold something else than others: all of those compared, `are_sure` False, where there is no
    majority; `by_rank` where each was compared by itself and not several together."""

    kind: str
    ranks: tuple[int, ...]
    compared: tuple[int, ...]
    are_sure: bool
    by_rank: bool = True


def parts_of(replica: Replica) -> Iterator[HeldPart]:
    """All that this rank holds and another might too."""
    for stage, shards in sorted(replica.shards.items()):
        for unit in shards.units:
            yield from _parts_of_unit(stage, unit)


def _parts_of_unit(stage: int, unit: FlatUnit) -> Iterator[HeldPart]:
    of_experts = " of experts" if unit.parameters[0].place.is_expert else ""
    for parameter in unit.parameters:
        first, values = unit.held_values(parameter)
        hashed = content_hash(values, first)
        yield HeldPart(f"values{of_experts}", parameter.place.name, hashed)
        if not of_experts and len(parameter.shape) == 1 and not parameter.place.sharded_over:
            yield HeldPart("norms", parameter.place.name, hashed)
    for on_host in (False, True):
        for i, tensor in enumerate(unit.masters.memory(on_host)):
            yield HeldPart(f"state{of_experts}", f"the optimizer's state {i} of {unit.name}", content_hash(tensor))


def totals(parts: Iterable[HeldPart], device: torch.device) -> Tensor:
    """The hash of each kind, int64. Each part has a factor of its own, but norms: their positions tell them apart, and
    so shards of them add up."""
    sums = {kind: torch.zeros((), dtype=torch.int64, device=device) for kind in KINDS}
    number: Counter[str] = Counter()
    for part in parts:
        number[part.kind] += 1
        factor = wrapped(2 * _mix(part.name if part.kind == "norms" else str(number[part.kind])) + 1)
        sums[part.kind] += part.hash.to(device) * factor
    return torch.stack([sums[kind] for kind in KINDS])


def _mix(text: str) -> int:
    """A number of 63 bits that hangs on a text, the same in every process (FNV-1a)."""
    mixed = 0xCBF29CE484222325
    for byte in text.encode():
        mixed = (mixed ^ byte) * 0x100000001B3 % (1 << 64)
    return mixed >> 1


def groups_alike(plan: PlanSpec) -> dict[str, list[list[list[int]]]]:
    """The groups of sets of ranks that hold state alike, by kind. The hashes of the ranks of a set, added up, are the
    same for all sets of a group; a set of one is a rank."""
    found: dict[str, list[list[list[int]]]] = {}
    for is_expert, suffix in ((False, ""), (True, " of experts")):
        shards, copies = (axis_groups(plan, kinds[is_expert]).lines() for kinds in (SHARDS, COPIES))
        zero = zero_stage(plan, is_expert)
        everywhere = [[[rank] for rank in line] for line in _joined(shards + copies)]
        same_shard = [[[rank] for rank in line] for line in copies]
        found[f"values{suffix}"] = same_shard if zero == 3 else everywhere
        found[f"state{suffix}"] = everywhere if zero == 0 else same_shard
    lines = axis_groups(plan, TP).lines()
    if zero_stage(plan) < 3:
        found["norms"] = [[[rank] for rank in line] for line in lines]
    else:
        of_rank = {rank: line for line in axis_groups(plan, SHARDS[False]).lines() for rank in line}
        sets = ([of_rank[rank] for rank in line] for line in lines)
        found["norms"] = list({str(group): group for group in sets}.values())
    return {kind: [group for group in groups if len(group) > 1] for kind, groups in found.items()}


def _joined(lines: list[list[int]]) -> list[list[int]]:
    """Sets of ranks that lines connect, each ascending."""
    sets: list[set[int]] = []
    for line in lines:
        touched = [held for held in sets if held & set(line)]
        sets = [held for held in sets if not held & set(line)] + [set(line).union(*touched)]
    return [sorted(held) for held in sets]


def odd_ranks(hashes: list[list[int]], alike: Mapping[str, list[list[list[int]]]]) -> list[OddRanks]:
    """Who holds something else than others. `hashes` are by rank and kind."""
    found = []
    for kind, groups in alike.items():
        at = KINDS.index(kind)
        for group in groups:
            of_sets = [wrapped(sum(hashes[rank][at] for rank in ranks)) for ranks in group]
            (most, count), *others = Counter(of_sets).most_common()
            if not others:
                continue
            is_sure = 2 * count > len(group)
            odd = [ranks for ranks, its in zip(group, of_sets, strict=True) if not is_sure or its != most]
            named, compared = (tuple(rank for ranks in sets for rank in ranks) for sets in (odd, group))
            found.append(OddRanks(kind, named, compared, is_sure, by_rank=len(compared) == len(group)))
    return found


class ReplicaComparison:
    """Compares what ranks hold alike, every so many steps."""

    def __init__(self, job: JobSpec) -> None:
        self._every = job.health.compare_replicas_every
        self._alike = groups_alike(job.plan) if self._every else {}
        # Where tp cuts the vocabulary unevenly, norms lie in other shards of ZeRO's on one rank of tp than on another,
        # and there the gradients of more than two replicas are added up in another order.
        if zero_stage(job.plan) and job.model.vocab % job.plan.tp and num_replicas(job.plan) > 2:
            self._alike.pop("norms", None)
        self._last = -1  # steps done when they were compared
        self.num_compared = 0

    def is_due(self, steps_done: int, is_saved: bool) -> bool:
        """True if to compare after so many steps, or before they are saved; once."""
        is_on = self._every > 0 and any(self._alike.values()) and steps_done != self._last
        return is_on and (is_saved or steps_done % self._every == 0)

    def compare(self, replica: Replica, mesh: Mesh, steps_done: int) -> None:
        """Raise ReplicasDifferError, on every rank with the same sentence, if a rank holds something else. Moves one
        all-gather of 5 numbers a rank over the world, and more only where some differ."""
        self.num_compared += 1
        self._last = steps_done
        parts = list(parts_of(replica))
        gathered = all_gather(totals(parts, mesh.device)[None], mesh.world).tolist()
        if found := odd_ranks(gathered, self._alike):
            raise ReplicasDifferError(_sentence(found, parts, mesh, steps_done))


def _sentence(found: list[OddRanks], parts: list[HeldPart], mesh: Mesh, steps_done: int) -> str:
    told = []
    for odd in found[:_MOST_NAMED]:
        names = _first_other(odd, parts, mesh) if odd.by_rank else ""
        ranks = ", ".join(mesh.shape.describe(rank) for rank in odd.ranks[:_MOST_NAMED])
        where = f", first in {names}" if names else ""
        others = [rank for rank in odd.compared if rank not in odd.ranks]
        holds = "holds" if len(odd.ranks) == 1 else "hold"
        if odd.are_sure:
            told.append(f"{ranks} {holds} other {odd.kind} than {counted(len(others), 'other rank')}{where}")
        else:
            told.append(f"{ranks} hold different {odd.kind}, and no majority says which is right{where}")
    more = f", and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return (
        f"ranks that should hold the same do not after step {steps_done}: {'; '.join(told)}{more}. A bit has flipped, "
        f"or a device computes wrongly: go on from a checkpoint before it, and without that device"
    )


def _first_other(odd: OddRanks, parts: list[HeldPart], mesh: Mesh) -> str:
    """The name of the first part of a kind in which the compared ranks differ. Every rank calls this; moves two
    all-gathers and an all-reduce over the world."""
    mine = [part for part in parts if part.kind == odd.kind]
    most = torch.tensor([len(mine)], dtype=torch.int64, device=mesh.device)
    length = int(all_reduce_max(most, mesh.world))
    hashes = torch.zeros(length, dtype=torch.int64, device=mesh.device)
    for i, part in enumerate(mine):
        hashes[i] = part.hash
    table = all_gather(hashes[None], mesh.world).cpu()
    others = [rank for rank in odd.compared if rank not in odd.ranks] or [odd.compared[0]]
    differs = (table[odd.ranks[-1]] != table[others[0]]).nonzero().flatten().tolist()
    names = gather_texts(mine[differs[0]].name if differs and differs[0] < len(mine) else "", mesh)
    return names[odd.ranks[-1]]
