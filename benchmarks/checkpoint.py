"""The cost of saving beside a run, against torch.distributed.checkpoint's own `async_save`; and how fast we read.

    .venv/bin/python benchmarks/checkpoint.py save       # about 5 minutes
    .venv/bin/python benchmarks/checkpoint.py read       # about 3 minutes, and 2 GB of disk

`save`: two Gloo ranks of one thread each train in blocks of 20 steps: without a checkpoint, with one of ours begun
after the first step, and with `async_save` of tensors of the same sizes begun there; in turn, the order changing. A
block takes as long as its slower rank; ours over that without gives the overhead. *Blocking* is how long the call takes
that the run waits for, *durable* from that call to the last rank's last byte, *memory* what was resident more than
before the call at the worst moment of the block, of the larger rank.

`read`: a checkpoint written under ZeRO 1 over two ranks is read under tp 2, from a cold cache; in turn with it the same
files are read from the first byte to the last, by as many ranks, and nothing else is done. *Memory* is what was
resident more than the boxes that the rank was to have, at the worst moment.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from alternate import run_two_ranks
from peak_memory import MIB, peak_bytes, reset_peak, resident_bytes
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.build import Replica, build
from shardwright.train.checkpoint.boxes import full_shapes
from shardwright.train.checkpoint.kept import indices_of, manifest_of
from shardwright.train.checkpoint.manifest import folder_name
from shardwright.train.checkpoint.saved_state import SavedState
from shardwright.train.checkpoint.state_part import StoredState
from shardwright.train.checkpoint.storage import LocalStorage
from shardwright.train.checkpoint.writing import CheckpointWriter
from shardwright.train.train_step import train_step

STEPS = 20
SLAB_BYTES = 32 * MIB


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["save", "read"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=0)
    parser.add_argument("--folder", default=None, help="where the checkpoints lie; a temporary folder")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=asked.folder) as folder:
        if asked.what == "save":
            job = make_job_of(asked.layers or 4, asked.hidden or 384, sequence=256, dp=2, zero=1)
            run_two_ranks(partial(_save_on_a_rank, rounds=asked.rounds, folder=Path(folder)), job.model_dump())
            _print_saves(_found(folder), asked.rounds)
        else:
            size = {"layers": asked.layers or 12, "hidden": asked.hidden or 1024, "sequence": 16}
            written, read = make_job_of(**size, dp=2, zero=1), make_job_of(**size, tp=2)
            run_two_ranks(partial(_write_on_a_rank, folder=Path(folder)), written.model_dump())
            run_two_ranks(partial(_read_on_a_rank, rounds=asked.rounds, folder=Path(folder)), read.model_dump())
            print_reads(_found(folder), "under the other plan")


def make_job_of(layers: int, hidden: int, sequence: int, **plan: Any) -> JobSpec:
    """A Llama of some size, 8 sequences a step."""
    return make_job(
        {
            "model": {
                "layers": layers, "hidden": hidden, "heads": hidden // 64, "kv_heads": hidden // 64,
                "ffn": hidden * 8 // 3 // 64 * 64, "vocab": 4096, "sequence": sequence,
            },
            "batch": {"global_batch_size": 8}, "plan": {"microbatch_size": 2} | plan,
        }
    )  # fmt: skip


def _tokens(job: JobSpec, mesh: Mesh, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + mesh.dp.index)
    shape = (job.batch.global_batch_size // job.plan.dp, job.model.sequence + 1)
    return torch.randint(job.model.vocab, shape, generator=generator)


# --- saving ---


def _save_on_a_rank(mesh: Mesh, job: JobSpec, rounds: int, folder: Path) -> None:
    """Train in blocks, and leave what was measured in found.json."""
    replica = build(job, mesh)
    writer = CheckpointWriter(job, replica, mesh, folder / "ours")
    group = dist.new_group(backend="gloo")
    train_step(replica, 0, _tokens(job, mesh, 0))
    # Live tensors of the sizes that ours copies, for theirs to copy.
    reference = {f"rank {mesh.rank}, {i}": box.values.clone() for i, box in enumerate(SavedState(replica, mesh).held())}
    num_bytes = sum(values.nbytes for values in reference.values())
    blocks: dict[str, Callable[[], list[float]]] = {
        "without": partial(_block, job, replica, mesh),
        "ours": partial(_block_of_ours, job, replica, mesh, writer),
        "async_save": partial(_block_of_theirs, job, replica, mesh, reference, group, folder),
    }
    result: dict[str, list[list[float]]] = {name: [] for name in blocks}
    for number in range(rounds + 1):
        for place in range(len(blocks)):
            name = list(blocks)[(number + place) % len(blocks)]
            gc.collect()
            dist.barrier()
            measured = torch.tensor([*blocks[name](), float(num_bytes)], dtype=torch.float64)
            dist.all_reduce(measured, dist.ReduceOp.MAX)
            if number:  # the first round loads what each of them imports
                result[name].append(measured.tolist())
    if mesh.rank == 0:
        (folder / "found.json").write_text(json.dumps(result))


def _block(
    job: JobSpec, replica: Replica, mesh: Mesh, save: Callable[[], None] | None = None,
    after_step: Callable[[int], None] | None = None,
) -> list[float]:  # fmt: skip
    """20 steps. Returns their seconds, those of the save that the run waited for, and bytes more than before."""
    reset_peak()
    before_bytes, start_s, blocking_s = resident_bytes(), time.perf_counter(), 0.0
    for step in range(STEPS):
        train_step(replica, step, _tokens(job, mesh, step))
        if step == 0 and save is not None:
            save_start_s = time.perf_counter()
            save()
            blocking_s = time.perf_counter() - save_start_s
        elif after_step is not None:
            after_step(step)
    return [time.perf_counter() - start_s, blocking_s, float(peak_bytes() - before_bytes)]


def _block_of_ours(job: JobSpec, replica: Replica, mesh: Mesh, writer: CheckpointWriter) -> list[float]:
    durable_s: list[float] = []

    def look(step: int) -> None:
        saved = writer.agree(step).saved
        durable_s.extend([saved.durable_s] if saved is not None else [])

    def save() -> None:
        writer.save(STEPS, 0, 0, {})

    measured = _block(job, replica, mesh, save, look)
    left_s = time.perf_counter()
    saved = writer.wait()
    durable_s += [saved.durable_s] if saved is not None else []
    return [*measured, durable_s[0], time.perf_counter() - left_s if saved is not None else 0.0]


def _block_of_theirs(
    job: JobSpec, replica: Replica, mesh: Mesh, state: dict[str, Tensor], group: Any, folder: Path
) -> list[float]:
    under_way: list[Any] = []
    ended_s: list[float] = []
    begun_s: list[float] = []

    def save() -> None:
        begun_s.append(time.perf_counter())
        saving = dcp.async_save(state, checkpoint_id=folder / "theirs", process_group=group)
        saving.add_done_callback(lambda _: ended_s.append(time.perf_counter()))
        under_way.append(saving)

    measured = _block(job, replica, mesh, save)
    left_s = time.perf_counter()
    under_way[0].result()
    left_s = time.perf_counter() - left_s
    time.sleep(0.01)  # for the callback
    return [*measured, ended_s[0] - begun_s[0], left_s]


def _print_saves(found: dict[str, list[list[float]]], rounds: int) -> None:
    plain = [block[0] for block in found["without"]]
    num_mib = found["ours"][0][-1] / MIB
    print(f"{STEPS} steps take {statistics.median(plain):.2f} s; {num_mib:.0f} MiB a rank; {rounds} rounds")
    print("| system | overhead [quartiles] | blocking, s | durable after, s | left at the end, s | memory, MiB |")
    print("|" + " --- |" * 6)
    for name in ("ours", "async_save"):
        overhead = [block[0] / base - 1 for block, base in zip(found[name], plain, strict=True)]
        low, middle, high = statistics.quantiles(overhead, n=4) if rounds > 1 else overhead * 3
        _, blocking_s, more_bytes, durable_s, left_s, _ = (statistics.median(column) for column in zip(*found[name]))  # noqa: B905
        print(
            f"| {name} | {middle:.1%} [{low:.1%}, {high:.1%}] | {blocking_s:.3f} | {durable_s:.2f} | {left_s:.2f} | "
            f"{more_bytes / MIB:.0f} |"
        )


# --- reading ---


def _write_on_a_rank(mesh: Mesh, job: JobSpec, folder: Path) -> None:
    replica = build(job, mesh)
    train_step(replica, 0, _tokens(job, mesh, 0))
    writer = CheckpointWriter(job, replica, mesh, folder)
    writer.save(1, 0, 0, {})
    assert writer.wait() is not None


def _read_on_a_rank(mesh: Mesh, job: JobSpec, rounds: int, folder: Path) -> None:
    """Read the files and the checkpoint in turn, and leave what was measured in found.json."""
    replica = build(job, mesh)
    train_step(replica, 0, _tokens(job, mesh, 0))  # the optimizer has its state
    storage = LocalStorage(folder / "checkpoints")
    files = sorted((folder / "checkpoints" / folder_name(1)).glob("*.safetensors"))
    reads = {
        "files": partial(read_bytes, files[mesh.rank :: mesh.world.size]),
        "boxes": partial(_load, replica, mesh, storage),
    }
    read_in_turn(mesh, reads, files, rounds, folder)


def read_in_turn(
    mesh: Mesh, reads: dict[str, Callable[[], None]], files: list[Path], rounds: int, folder: Path
) -> None:
    """Time `reads`, of which one is "files" and the other "boxes", from a cold cache of the files, and leave seconds
    and the memory that was taken in found.json; both of the rank that has more."""
    result: dict[str, Any] = {"bytes": sum(file.stat().st_size for file in files), "files": [], "boxes": []}
    for number in range(rounds + 1):
        for name in list(reads) if number % 2 else list(reads)[::-1]:
            _forget_files(files)
            gc.collect()
            dist.barrier()
            reset_peak()
            before_bytes, start_s = resident_bytes(), time.perf_counter()
            reads[name]()
            measured = torch.tensor([time.perf_counter() - start_s, peak_bytes() - before_bytes], dtype=torch.float64)
            dist.all_reduce(measured, dist.ReduceOp.MAX)
            if number:  # a disk may give the first bytes after a rest faster
                result[name].append(measured.tolist())
    if mesh.rank == 0:
        (folder / "found.json").write_text(json.dumps(result))


def _forget_files(files: list[Path]) -> None:
    """Let the kernel drop what it has of the files in memory."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_bytes(files: list[Path]) -> None:
    into = memoryview(bytearray(SLAB_BYTES))
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(into):
                pass


def _load(replica: Replica, mesh: Mesh, storage: LocalStorage) -> None:
    """The boxes of this rank, into the memory that is there for them."""
    indices = indices_of(storage, manifest_of(storage, 1))
    SavedState(replica, mesh).load(StoredState(full_shapes(indices), 1), storage, folder_name(1), indices)


def print_reads(found: dict[str, Any], boxes: str) -> None:
    """A row of what `read_in_turn` has found; `boxes` is the heading of what they are."""
    ratios = [plain[0] / load[0] for plain, load in zip(found["files"], found["boxes"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    plain_s, load_s = (statistics.median(of[0] for of in found[name]) for name in ("files", "boxes"))
    more_bytes = max(of[1] for of in found["boxes"])
    size = found["bytes"] / 1e9
    print(f"| bytes | files, GB/s | {boxes}, GB/s | of the files' rate [quartiles] | memory, MiB |")
    print("|" + " --- |" * 5)
    print(
        f"| {size:.2f} GB | {size / plain_s:.2f} | {size / load_s:.2f} | {middle:.2f} [{low:.2f}, {high:.2f}] | "
        f"{more_bytes / MIB:.0f} |"
    )


def _found(folder: str) -> Any:
    return json.loads(Path(folder, "found.json").read_text())


if __name__ == "__main__":
    main()
