"""A data-parallel training step of ours against torch's DDP, FSDP2 and ZeroRedundancyOptimizer, and DeepSpeed.

    .venv/bin/python benchmarks/zero.py                           # about 5 minutes
    .venv/bin/python benchmarks/zero.py --layers 2 --hidden 128 --ffn 384 --vocab 512 --sequence 128 --rounds 4
    .venv/bin/python benchmarks/zero.py --systems "ours,DDP,FSDP2"

Two Gloo ranks of one thread each hold all systems at once and do one step of each in turn; who begins changes from
round to round. A step takes as long as its slower rank; its processor seconds are summed over the ranks. Each round
gives a ratio to DDP and one to the floor (see floor.py), and the table has their medians, quartiles in brackets.

Before anything is timed the plain model's logits are compared with ours, and the losses and gradient norms of the first
steps of all systems with one another. Peak memory is measured for each system in two fresh processes of its own.
"""

import argparse
import gc
import importlib
import json
import math
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from alternate import WORLD, check_close, plain_stage, ratio_text, run_two_ranks
from floor import Floor
from peak_memory import MIB, peak_bytes, reset_peak, resident_bytes
from plain_model import by_plain_names, plain_decoder
from torch import Tensor
from zero_systems import BASELINES, OURS, REFERENCE, Setting, make_system, why_not

from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.parameter import placed_parameters

FLOOR = "floor"
CHECKED_STEPS = 2  # they are the warm-up too
STEPS_BEFORE_PEAK, STEPS_AT_PEAK = 1, 2  # the first makes the optimizer's state
UNASKED = ("DDP compiled", "FSDP2 compiled")  # only where --systems names them: they take minutes to begin
Timed = dict[str, dict[str, list[float]]]  # wall_s and cpu_s of each round, by system


def main() -> None:
    """Measure what was asked for and print the table."""
    asked = _arguments()
    warnings.simplefilter("ignore", FutureWarning)  # names of collectives that baselines still use
    names = _runnable(asked.systems.split(",") if asked.systems else None)
    job = make_job_of(asked)
    timed: Timed = {}
    if asked.rounds:
        timed = _collect(partial(time_all, names=names, rounds=asked.rounds, most_s=asked.seconds), job)
    peaks: dict[str, dict[str, float]] = {}
    for name in names if asked.memory else ():
        peaks[name] = _collect(partial(measure_peak, name=name), job)
        _say(f"peak of {name}: {peaks[name]['whole']:.0f} MiB")
    _print_table(names, timed, peaks, job)


def time_all(mesh: Mesh, job: JobSpec, names: Sequence[str], rounds: int, most_s: float) -> Timed:
    """Check all systems on this rank, then time them in turn."""
    weights = by_plain_names(job.model, our_weights(job))
    tokens_BS = random_tokens(job)
    _check_logits(job, weights, tokens_BS)
    steps = {name: make_system(name, Setting(job, mesh, weights)) for name in names}
    _check_steps(steps, tokens_BS)
    floor = Floor(job.model, job.plan.microbatch_size, job.num_microbatches)
    floor()
    calls: dict[str, Callable[[], object]] = {name: partial(step, tokens_BS) for name, step in steps.items()}
    return take_turns(calls | {FLOOR: floor}, rounds, most_s)


def take_turns(calls: dict[str, Callable[[], object]], most_rounds: int, most_s: float) -> Timed:
    """Seconds of each call in each round. Every rank calls this, and each call begins on all ranks together."""
    names = list(calls)
    seconds = torch.zeros(2, most_rounds, len(names), dtype=torch.float64)
    gc.collect()
    gc.disable()  # a collection would hit the one or the other by chance
    begin_s, done = time.perf_counter(), 0
    while done < most_rounds and _agree(done == 0 or (time.perf_counter() - begin_s) * (done + 1) / done < most_s):
        for place in range(len(names)):
            which = (done + place) % len(names)
            dist.barrier()
            cpu_start_s, start_s = time.process_time(), time.perf_counter()
            calls[names[which]]()
            seconds[0, done, which] = time.perf_counter() - start_s
            seconds[1, done, which] = time.process_time() - cpu_start_s
        done += 1
        if dist.get_rank() == 0:
            _say(f"round {done} at {time.perf_counter() - begin_s:.0f} s")
        gc.enable()
        gc.collect()
        gc.disable()
    gc.enable()
    dist.all_reduce(seconds[0], dist.ReduceOp.MAX)
    dist.all_reduce(seconds[1])
    wall_s, cpu_s = seconds[:, :done].transpose(1, 2).tolist()
    return {name: {"wall_s": wall_s[i], "cpu_s": cpu_s[i]} for i, name in enumerate(names)}


def measure_peak(mesh: Mesh, job: JobSpec, name: str) -> dict[str, float]:
    """Peak memory of one system, of the rank with the larger one: whole, and above what imports had taken."""
    if name.startswith("DeepSpeed"):
        importlib.import_module("deepspeed")
    imported = resident_bytes()
    step, tokens_BS = make_system(name, Setting(job, mesh)), random_tokens(job)
    for _ in range(STEPS_BEFORE_PEAK):
        step(tokens_BS)
    reset_peak()
    for _ in range(STEPS_AT_PEAK):
        step(tokens_BS)
    result = torch.tensor([peak_bytes(), peak_bytes() - imported], dtype=torch.float64)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return {"whole": result[0].item() / MIB, "above": result[1].item() / MIB}


def _collect(work: Callable[[Mesh, JobSpec], Any], job: JobSpec) -> Any:
    """The result of `work` on the first of two new ranks."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        file = Path(folder, "found.json")

        def work_and_write(mesh: Mesh, job: JobSpec) -> None:
            result = work(mesh, job)
            if mesh.rank == 0:
                file.write_text(json.dumps(result))

        run_two_ranks(work_and_write, job.model_dump())
        return json.loads(file.read_text())


def our_weights(job: JobSpec) -> dict[str, Tensor]:
    """The initial weights of the whole model by our names."""
    return {name: parameter.detach() for name, parameter in placed_parameters(plain_stage(job)).items()}


def _check_logits(job: JobSpec, weights: dict[str, Tensor], tokens_BS: Tensor) -> None:
    own, plain = plain_stage(job), plain_decoder(job.model, weights)
    with torch.no_grad():
        logits_BSV = own.logits(own(tokens_BS[:, :-1])).transpose(0, 1)
        check_close("logits", logits_BSV, plain.logits(tokens_BS[:, :-1]))


def _check_steps(steps: dict[str, Callable[[Tensor], tuple[float, float]]], tokens_BS: Tensor) -> None:
    """Fail unless losses and gradient norms of the first steps agree with the reference's."""
    expected = [steps[REFERENCE](tokens_BS) for _ in range(CHECKED_STEPS)]
    for name, step in steps.items():
        if name == REFERENCE:
            continue
        for number, (loss, norm) in enumerate(expected):
            its_loss, its_norm = step(tokens_BS)
            assert math.isclose(its_loss, loss, rel_tol=1e-4), f"{name}: loss {its_loss} at step {number}, not {loss}"
            agrees = math.isnan(its_norm) or math.isnan(norm) or math.isclose(its_norm, norm, rel_tol=1e-3)
            assert agrees, f"{name}: gradient norm {its_norm} at step {number}, not {norm}"


def random_tokens(job: JobSpec) -> Tensor:
    """The samples of one step of both ranks, [2 B, S + 1]."""
    generator = torch.Generator().manual_seed(0)
    shape = (job.batch.global_batch_size, job.model.sequence + 1)
    return torch.randint(job.model.vocab, shape, generator=generator)


def _say(line: str) -> None:
    """How far it is; the table alone goes to the output."""
    print(line, file=sys.stderr, flush=True)


def _agree(goes_on: bool) -> bool:
    """True if all ranks go on."""
    goes = torch.tensor(int(goes_on))
    dist.all_reduce(goes, dist.ReduceOp.MIN)
    return bool(goes)


def _print_table(names: Sequence[str], timed: Timed, peaks: dict[str, dict[str, float]], job: JobSpec) -> None:
    header = ["system", "time / DDP's [quartiles]", "processor time / DDP's [quartiles]", "tokens/s", "x floor"]
    header += ["x floor, processor", "peak MiB", "above imports"]
    print("| " + " | ".join(header) + " |\n|" + " --- |" * len(header))
    for name in [*names, FLOOR]:
        cells = [name] + [""] * (len(header) - 1)
        if timed:
            wall_s = timed[name]["wall_s"]
            cells[1] = ratio_text(wall_s, timed[REFERENCE]["wall_s"])
            cells[2] = ratio_text(timed[name]["cpu_s"], timed[REFERENCE]["cpu_s"])
            cells[3] = f"{job.tokens_per_step / statistics.median(wall_s):.0f}"
            cells[4:6] = [
                f"{statistics.median(a / b for a, b in zip(timed[name][of], timed[FLOOR][of], strict=True)):.3f}"
                for of in ("wall_s", "cpu_s")
            ]
        if name in peaks:
            cells[6:] = [f"{peaks[name]['whole']:.0f}", f"{peaks[name]['above']:.0f}"]
        print("| " + " | ".join(cells) + " |")
    if timed:
        floor_s = statistics.median(timed[FLOOR]["wall_s"])
        rate = Floor(job.model, job.plan.microbatch_size, job.num_microbatches).flops / floor_s / 1e9
        print(
            f"\n{len(timed[FLOOR]['wall_s'])} rounds; the floor is {floor_s * 1e3:.0f} ms, {rate:.0f} GFLOP/s a rank."
        )


def _runnable(asked: list[str] | None) -> list[str]:
    """The systems to measure, the reference among them. Says which are left out, and why."""
    known = [REFERENCE, *OURS, *(name for name in BASELINES if name != REFERENCE)]
    wanted = [name for name in known if name not in UNASKED]
    if asked is not None:
        unknown = set(asked) - set(known)
        if unknown:
            raise SystemExit(f"no system is called {', '.join(sorted(unknown))}; there are: {'; '.join(known)}")
        wanted = [name for name in known if name in asked or name == REFERENCE]
    for name in wanted:
        if reason := why_not(name):
            print(f"left out: {name} ({reason})")
    return [name for name in wanted if not why_not(name)]


def make_job_of(asked: argparse.Namespace) -> JobSpec:
    """The job of our side, at the sizes that were asked for."""
    shape = ("layers", "hidden", "heads", "ffn", "vocab", "sequence")
    return make_job({
        "model": {field: getattr(asked, field) for field in shape},
        "plan": {"dp": WORLD, "microbatch_size": asked.batch, "bucket_mib": asked.bucket_mib},
        "batch": {"global_batch_size": WORLD * asked.batch * asked.microbatches},
        "optimizer": {
            "clip_grad_norm": asked.clip, "warmup_steps": 0, "min_learning_rate_ratio": 1.0, "learning_rate": 3e-4,
        },
    })  # fmt: skip


def size_arguments(parser: argparse.ArgumentParser) -> None:
    """Options for the size of the job."""
    sizes = {
        "layers": 8, "hidden": 512, "heads": 8, "ffn": 1536, "vocab": 8192, "sequence": 512, "batch": 2,
        "microbatches": 1,
    }  # fmt: skip
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm; 0 is no clipping")
    parser.add_argument("--bucket-mib", type=float, default=25.0, help="size of a gradient bucket, ours and DDP's")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size_arguments(parser)
    parser.add_argument("--rounds", type=int, default=30, help="most rounds; 0 measures memory alone")
    parser.add_argument("--seconds", type=float, default=150.0, help="begin no round that would end later than this")
    parser.add_argument("--systems", default="", help="names, separated by commas")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="measure times alone")
    return parser.parse_args()


if __name__ == "__main__":
    main()
