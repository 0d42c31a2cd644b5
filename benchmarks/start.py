"""How fast a rank starts: initial weights, a rank of a large plan up to its first step, and batches read ahead.

    .venv/bin/python benchmarks/start.py                                    # all three, about a minute
    .venv/bin/python benchmarks/start.py --parts rank --model llama3-70b --set plan.dp=512 --rank 511

`weights` times initial weights on one thread and on all, in turn with torch's own normal numbers, which are other ones
on other threads and devices. `rank` builds one rank of a plan in real memory, with the values of its own shard and
nobody else there, and then does its first step dry, as `shardwright dryrun` does. `batches` trains quickstart
with batches that are read at the beginning of each step and while the step before computes, in turn; once as they are
and once from a corpus that takes `--delay-ms` for each.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray
from peak_memory import MIB, peak_bytes, reset_peak, resident_bytes

from shardwright.config.job import JobSpec
from shardwright.config.load import load_job
from shardwright.parallel.comm.process_groups import Mesh, StandIns
from shardwright.parallel.comm.transport import DryTransport
from shardwright.parallel.tensor.initial_values import seeded
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.train.build import Replica, build, job_mesh
from shardwright.train.data.batch_reader import BatchReader, my_share
from shardwright.train.data.prepare import prepare_tokens
from shardwright.train.data.samples import Samples
from shardwright.train.dry_steps import DrySteps
from shardwright.train.train_step import train_step

CPU = torch.device("cpu")


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="weights,rank,batches", help="some of these, with commas")
    parser.add_argument("--rounds", type=int, default=9, help="of each alternation")
    parser.add_argument("--model", default="llama3-8b", help="of the catalog, for rank")
    parser.add_argument("--rank", type=int, default=17, help="which one is built")
    parser.add_argument("--set", action="append", default=[], help="fields of its plan, such as plan.dp=512")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="that a batch of the slow corpus takes")
    asked = parser.parse_args()
    threads = torch.get_num_threads()
    for part in asked.parts.split(","):
        if part == "weights":
            for number in sorted({1, threads}):
                torch.set_num_threads(number)
                time_weights(asked.rounds)
        elif part == "rank":
            torch.set_num_threads(1)
            start_rank(rank_job(asked.model, asked.set), asked.rank)
        elif part == "batches":
            torch.set_num_threads(1)
            for delay_s in (0.0, asked.delay_ms / 1000):
                time_batches(delay_s, asked.rounds)


def per_second(work: Callable[[], object], number: int) -> tuple[float, float]:
    """How many a second, and how many a second of one core."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    work()
    return number / (time.perf_counter() - start_s), number / (time.process_time() - start_cpu_s)


def time_weights(rounds: int) -> None:
    """Millions of elements a second of a matrix of 4,096 x 14,336, and of the part of it that a rank of tp 8 holds."""
    boxes = {"whole": ((0, 4096), (0, 14336)), "columns of tp 8": ((0, 4096), (1792, 3584))}
    places = {name: ParameterShard((4096, 14336), box, "normal", 0.02, "w") for name, box in boxes.items()}
    out = {name: torch.empty(place.num_elements) for name, place in places.items()}
    write = seeded(1)
    works: dict[str, Callable[[], object]] = {
        name: lambda name=name: write(places[name], 0, out[name])  # type: ignore[misc]
        for name in places
    }
    works["torch's normal_"] = lambda: out["whole"].normal_()
    sizes = {name: out.get(name, out["whole"]).numel() for name in works}
    for work in works.values():
        work()
    result: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            result[name].append(per_second(work, sizes[name]))
    print(f"initial weights, threads: {torch.get_num_threads()}; millions of elements over {rounds} rounds:")
    for name, speeds in result.items():
        for kind, of_rounds in zip(("a second", "a second of a core"), zip(*speeds, strict=True), strict=True):
            low, middle, high = (speed / 1e6 for speed in statistics.quantiles(of_rounds, n=4))
            print(f"  {name}, {kind}: best {max(of_rounds) / 1e6:.0f}, median {middle:.0f} [{low:.0f}, {high:.0f}]")


def rank_job(model: str, overrides: list[str]) -> JobSpec:
    """A model over 64 ranks of data parallelism under ZeRO 3, or as the overrides have it."""
    plan = ["plan.dp=64", "plan.tp=1", "plan.pp=1", "plan.zero=3", "plan.microbatch_size=1", "plan.recompute=full"]
    fields = [f"model.name={model}", *plan, "batch.global_batch_size=64", "precision.compute=bf16"]
    return load_job("quickstart", [*fields, *overrides])


def start_rank(job: JobSpec, rank: int) -> None:
    """Build a rank in real memory, and do its first step dry."""
    torch.zeros(1).add_(1)
    reset_peak()
    before_bytes, start_s, start_cpu_s = resident_bytes(), time.perf_counter(), time.process_time()
    mesh = job_mesh(job, rank, CPU, stand_ins=StandIns(lambda lines: DryTransport(is_gloo=True)))
    replica = build(job, mesh)
    built_s, built_cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    state_bytes = replica.memory().state_bytes  # the optimizer's moments are made in its first step
    peak = peak_bytes() - before_bytes
    kept = resident_bytes() - before_bytes
    values = sum(unit.value_shard.numel() for shards in replica.shards.values() for unit in shards.units)
    del replica
    DrySteps(job, rank, "cpu").run()
    stepped_s, stepped_cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    print(f"{job.model.name}, {job.plan.degrees}, ZeRO {job.plan.zero}, rank {rank}: {values / 1e6:.1f} million values")
    print(f"  built with the real values of its shard in {built_s:.2f} s, of the processor {built_cpu_s:.2f}")
    print(f"  with its first step, dry, in {stepped_s:.2f} s, of the processor {stepped_cpu_s:.2f}")
    print(f"  {state_bytes / MIB:.0f} MiB of state, {kept / MIB:.0f} MiB resident, {peak / MIB:.0f} MiB at the peak")


class SlowSamples(Samples):
    """Samples that take a while, as from a disk or a network."""

    delay_s = 0.0

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Samples, after a while."""
        if self.delay_s:
            time.sleep(self.delay_s)
        return super().batch(first, count)


def time_batches(delay_s: float, rounds: int, steps: int = 6) -> None:
    """Milliseconds of a step and of the processor in it, one way and the other."""
    job = load_job("quickstart", ["batch.global_batch_size=8", "optimizer.steps=1000000"]).as_one_rank()
    with TemporaryDirectory() as folder:
        tokens = prepare_tokens(job.data, job.model, job.run.seed, Path(folder))
        samples = SlowSamples(tokens.train, tokens.sequence, tokens.seed)
        samples.delay_s = delay_s
        mesh = job_mesh(job, 0, CPU)
        replica = build(job, mesh)
        results: dict[str, list[tuple[float, float]]] = {"read at its beginning": [], "read ahead": []}
        for done in range(0, (rounds + 1) * steps, steps):
            for name, times in results.items():
                times.append(_time_steps(job, mesh, replica, samples, range(done, done + steps), name == "read ahead"))
    print(f"quickstart on one rank, {rounds} rounds of {steps} steps, {1000 * delay_s:.0f} ms more to read a batch:")
    for i, kind in enumerate(("wall", "processor")):
        plain, ahead = ([times[i] for times in both[1:]] for both in results.values())
        for name, of_rounds in zip(results, (plain, ahead), strict=True):
            low, middle, high = statistics.quantiles(of_rounds, n=4)
            print(f"  {name}: {1000 * middle:.1f} ms of the {kind} a step [{1000 * low:.1f}, {1000 * high:.1f}]")
        low, middle, high = statistics.quantiles([a / b for a, b in zip(ahead, plain, strict=True)], n=4)
        print(f"  read ahead over at its beginning: {middle:.3f} [{low:.3f}, {high:.3f}]")


def _time_steps(
    job: JobSpec, mesh: Mesh, replica: Replica, samples: Samples, steps: range, is_ahead: bool
) -> tuple[float, float]:
    """Seconds of a step and of the processor in it, after one step that nobody times."""
    size = job.batch.global_batch_size
    with BatchReader(samples, job, mesh, steps.stop) as batches:
        for step in steps:
            if step == steps.start + 1:
                start_s, start_cpu_s = time.perf_counter(), time.process_time()
            consumed = step * size
            tokens_BS = batches.batch(step, consumed) if is_ahead else my_share(samples, consumed, job, mesh)
            train_step(replica, step, tokens_BS)
        took_s, took_cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return took_s / (len(steps) - 1), took_cpu_s / (len(steps) - 1)


if __name__ == "__main__":
    main()
