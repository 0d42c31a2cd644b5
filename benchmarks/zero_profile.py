"""The work of a data-parallel step beside its matrix products and attention, ours and DDP's: where the time goes.

    .venv/bin/python benchmarks/zero_profile.py
    .venv/bin/python benchmarks/zero_profile.py --systems "ours,DDP,FSDP2" --top 30

torch.profiler on the first of two ranks, several steps of each system in turn. Calls are grouped by operator, shapes
and the autograd node that made them. On a machine that others use too a call may be interrupted; every step makes the
same calls, so each counts with the least of its times over the steps, children not counted. *Operands* are the tensors
that go in, as float32; those in a list (of cat and of the optimizer) are not seen.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from alternate import run_two_ranks
from plain_model import by_plain_names
from torch.profiler import ProfilerActivity, profile
from zero import make_job_of, our_weights, random_tokens, size_arguments
from zero_systems import Setting, Step, make_system

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh

FLOOR_OPERATORS = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu")
WARMUP, PROFILED_STEPS = 2, 6
NODE = "autograd::engine::evaluate_function: "
Group = tuple[str, str, tuple[tuple[int, ...], ...]]  # where, operator, shapes


def main() -> None:
    """Profile what was asked for and print a table for each system."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size_arguments(parser)
    parser.add_argument("--systems", default="ours,DDP", help="names, separated by commas")
    parser.add_argument("--top", type=int, default=25, help="rows of each table")
    asked = parser.parse_args()
    run_two_ranks(partial(profile_all, names=asked.systems.split(","), top=asked.top), make_job_of(asked).model_dump())


def profile_all(mesh: Mesh, job: JobSpec, names: Sequence[str], top: int) -> None:
    """Profile the systems in turn; the first rank prints."""
    weights = by_plain_names(job.model, our_weights(job))
    steps = {name: make_system(name, Setting(job, mesh, weights)) for name in names}
    tokens_BS = random_tokens(job)
    result: dict[str, dict[Group, list[float]]] = {name: {} for name in names}
    for number in range(WARMUP + PROFILED_STEPS):
        for name, step in steps.items():
            dist.barrier()
            calls = calls_of(step, tokens_BS) if number >= WARMUP and mesh.rank == 0 else step(tokens_BS) and {}
            for group, times_us in calls.items():
                before = result[name].get(group, times_us)
                result[name][group] = [min(pair) for pair in zip(before, times_us, strict=False)]
    if mesh.rank == 0:
        for name in names:
            print_groups(name, result[name], top)


def calls_of(step: Step, tokens_BS: torch.Tensor) -> dict[Group, list[float]]:
    """Microseconds of each call of one step, by group."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        step(tokens_BS)
    calls: dict[Group, list[float]] = defaultdict(list)
    for event in profiled.events():
        shapes = tuple(tuple(shape) for shape in event.input_shapes or () if shape)
        calls[_where(event), event.name.removeprefix("aten::"), shapes].append(event.self_cpu_time_total)
    return calls


def _where(event: Any) -> str:
    """The autograd node that an operator belongs to, or the outermost range around it."""
    outermost = ""
    while (event := event.cpu_parent) is not None:
        outermost = event.name
        if outermost.startswith(NODE):
            return outermost.removeprefix(NODE)
    return "" if outermost.startswith("aten::") else outermost


def print_groups(name: str, calls: dict[Group, list[float]], top: int) -> None:
    """The dearest groups of one system, and the sums of the others and of the floor's operators."""
    steps_ms: dict[Group, float] = {}
    floor_ms = 0.0
    for group, times_us in calls.items():
        spent_ms = sum(times_us) / 1e3
        if group[1].removesuffix("_backward") in FLOOR_OPERATORS:
            floor_ms += spent_ms
        else:
            steps_ms[group] = spent_ms
    dearest = sorted(steps_ms, key=lambda group: -steps_ms[group])
    print(f"\n{name}: {sum(steps_ms.values()):.0f} ms a step beside {floor_ms:.0f} ms of products and attention\n")
    print("| where | operator | operands | calls | ms a step | MiB of operands |\n|" + " --- |" * 6)
    for group in dearest[:top]:
        where, operator, shapes = group
        count = len(calls[group])
        moved_mib = count * sum(torch.Size(s).numel() for s in shapes) * 4 / 2**20
        operands = " ".join(map(str, shapes))
        print(f"| {where} | {operator} | {operands} | {count} | {steps_ms[group]:.1f} | {moved_mib:.0f} |")
    print(f"| {len(dearest) - top} more | | | | {sum(steps_ms[group] for group in dearest[top:]):.1f} | |")


if __name__ == "__main__":
    main()
