"""Messages of whole runs, from start-up through evaluations and saves to a restart, under NCCL's rules.

Ranks run over Gloo, with the collectives and the communicators that they have over NCCL, and note all that they ask
for. The suite has some schedules;

    python tests/measure/test_messages_of_runs.py | grep RESULT

has every one, on 4 x 2 ranks, or those that are named.
"""

import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
import torch.distributed as dist

from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.measure.checks.message_order import message_faults
from shardwright.measure.checks.message_record import MessageRecord
from shardwright.parallel.comm import process_groups
from shardwright.parallel.comm.process_groups import Mesh, StandIns
from shardwright.parallel.pipeline import executor
from shardwright.sharding import groups
from shardwright.train.build import job_mesh
from shardwright.train.trainer import train
from shardwright.train.training_run import RunStart
from support.cases import small_job
from support.ranks import run_ranks

pytestmark = pytest.mark.processes
IN_SUITE: dict[str, dict[str, Any]] = {
    "1f1b": {"pp": 2, "dp": 2, "zero": 1},
    "zb-v": {"pp": 2, "dp": 2, "zero": 3, "schedule": "zb-v"},
}


def job_of(plan: dict[str, Any], folder: Path, steps: int = 4) -> JobSpec:
    text = folder / "text.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 40)
    fields = small_job(batch=16, layers=8, **plan).model_dump(mode="json", exclude_unset=True)
    fields["model"] |= {"vocab": 256}
    fields["optimizer"] |= {"steps": steps}
    fields |= {
        "data": {"path": str(text)},
        "run": {"eval_every": 2, "eval_batches": 1, "log_every": 1, "sample_tokens": 2, "folder": str(folder / "run")},
        "checkpoint": {"every_steps": 2},
    }
    return make_job(fields)


def run_twice(rank: int, store: str, plan: dict[str, Any], folder: Path) -> list[MessageRecord]:
    """A run to its end, and what goes on from its last checkpoint."""
    first, later = job_of(plan, folder), job_of(plan, folder, steps=6)
    world = first.plan.world
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    records = []
    for job in (first, later):
        record = MessageRecord(rank)
        # On a CPU what a part of a pair makes is sent while the other computes; on CUDA behind both.
        with patch.object(executor, "sends_of_parts", lambda row: {}):
            train(job, mesh_as_over_nccl(job, rank, record), Path(job.run.folder), RunStart())
        records.append(record)
    dist.destroy_process_group()
    return records


def mesh_as_over_nccl(job: JobSpec, rank: int, record: MessageRecord) -> Mesh:
    """Communicators of their own for both directions, and all that they are asked for noted."""
    made = partial(process_groups._new_group, rank, process_groups.timedelta(seconds=300))
    connect = record.connecting(made)
    mesh = job_mesh(job, rank, torch.device("cpu"), stand_ins=StandIns(connect))
    maker = process_groups._AxisMaker(process_groups.MeshNeeds(job.plan), rank, mesh.ledger, None, mesh.turns, connect)
    return replace(mesh, forward=maker.along(groups.PP, number=1), backward=maker.along(groups.PP, number=2))


def faults_of(plan: dict[str, Any], folder: Path) -> list[str]:
    ranks = run_ranks(job_of(plan, folder).plan.world, run_twice, plan, folder)
    faults = []
    for of_run in zip(*ranks, strict=True):
        assert all(record.operations for record in of_run)
        faults += message_faults(of_run)
    return faults


@pytest.mark.parametrize("name", IN_SUITE)
def test_a_run_and_what_goes_on_from_it(name: str, tmp_path: Path) -> None:
    assert faults_of(IN_SUITE[name], tmp_path) == []


def plans_of(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Schedules on 4 x 2 ranks."""
    return {
        name: {"pp": 4, "dp": 2, "schedule": name, "virtual_stages": 1 if SCHEDULES[name].stages_per_rank else 2}
        for name in names
    }


def main() -> int:
    """Run every schedule. 1 if some messages do not come to their end."""
    num_wrong = 0
    for name, plan in plans_of(sys.argv[1:] or SCHEDULES).items():
        with tempfile.TemporaryDirectory() as folder:
            faults = faults_of(plan, Path(folder))
        num_wrong += bool(faults)
        print(f"RESULT {name}: {'; '.join(faults) or 'every message comes to its end'}", flush=True)
    return min(num_wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
