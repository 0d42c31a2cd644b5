"""How a rank starts: with the same weights under every plan, computing no more of them than it keeps.

No processes: a rank is built with nobody on its axes, as in a dry run, but in real memory.
"""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fuzz.draw import draw
from fuzz.plans import accepted
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.measure.memory_trace import MemoryTrace
from shardwright.parallel.comm.process_groups import StandIns
from shardwright.parallel.comm.transport import DryTransport
from shardwright.parallel.tensor import initial_values
from shardwright.parallel.tensor.initial_values import initial_box
from shardwright.parallel.zero.unit_setting import dtype_of
from shardwright.precision.nf4 import quantise
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.train.build import Replica, build, job_mesh
from support.cases import small_job

CPU = torch.device("cpu")


def built(job: JobSpec, rank: int) -> Replica:
    """A rank of a job with its initial weights, and nobody else."""
    return build(job, job_mesh(job, rank, CPU, stand_ins=StandIns(lambda lines: DryTransport(is_gloo=True))))


def whole(place: ParameterShard, seed: int) -> Tensor:
    return initial_box(replace(place, box=tuple((0, size) for size in place.full_shape)), seed, CPU)


def words_of(place: ParameterShard, tensor: Tensor) -> Tensor:
    """The words in NF4 of a box of a whole tensor: scales that are quantised together take whole rows."""
    row = place.nf4_row
    assert row is not None
    columns = slice(0, row.full) if row.is_double else place.slices[-1]
    return quantise(tensor[(*place.slices[:-1], columns)].flatten(0, -2), row).view(-1)


def check_start(job: JobSpec) -> None:
    """Each rank holds a part of the one tensor of each name, and all ranks hold all of it."""
    tensors: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = defaultdict(lambda: torch.zeros(0))
    for rank in range(job.plan.world):
        for shards in built(job, rank).shards.values():
            for unit in shards.units:
                for parameter in unit.parameters:
                    place = parameter.place
                    if place.name not in tensors:
                        tensors[place.name] = whole(place, job.run.seed)
                        seen[place.name] = torch.zeros(place.full_shape)
                    first, values = unit.held_values(parameter)
                    if place.row_format:
                        words = words_of(place, tensors[place.name])
                        assert torch.equal(values, words[first : first + len(values)]), place
                        held = seen.setdefault(f"{place.name} {place.box}", torch.zeros(len(words)))
                        held[first : first + len(values)] += 1
                        seen.pop(place.name, None)  # its words are counted instead
                        continue
                    box = tensors[place.name][place.slices].reshape(-1)
                    assert torch.equal(values, box[first : first + len(values)].to(values.dtype)), place
                    number = torch.zeros(place.shape).view(-1)
                    number[first : first + len(values)] = 1
                    seen[place.name][place.slices] += number.view(place.shape)
                    if place.is_frozen:  # no optimizer has a copy of it
                        continue
                    row, end_row, at = unit.rows_held(parameter)
                    width = place.shape[-1] if len(place.shape) > 1 else 1
                    exact = unit.masters.copy_out("weights", at, at + (end_row - row) * width)
                    assert torch.equal(exact, box[row * width : end_row * width].to(exact.dtype)), place
                    assert exact.dtype == (torch.bfloat16 if job.precision.master_number == "bf16" else torch.float32)
    assert all((held > 0).all() for held in seen.values())


PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("llama-tied", {}),
    "zero1": ("gpt", {"dp": 3, "zero": 1, "batch": 6}),
    "zero2 offloaded": ("llama", {"dp": 2, "zero": 2, "offload_optimizer": 0.37, "batch": 8}),
    "zero3": ("gpt", {"dp": 4, "zero": 3, "batch": 8}),
    "zero3 offloaded": (
        "llama", {"dp": 2, "zero": 3, "offload_optimizer": 0.5, "offload_parameters": True, "batch": 8},
    ),
    "hybrid": ("gpt", {"dp": 4, "zero": 3, "zero_ranks": 2, "batch": 8}),
    "tp with zero3": ("llama", {"tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True}),
    "tied over pp": ("gpt-tied", {"pp": 2, "dp": 2, "zero": 1, "order": "pp-dp", "batch": 8}),
    "cp": ("latent", {"cp": 2, "zero": 2}),
    "layout": ("llama", {"pp": 2, "layout": [1, 2], "batch": 8}),
    "dualpipev": ("llama", {"pp": 2, "schedule": "dualpipev", "zero": 1, "dp": 2, "batch": 8}),
    "pipedream": ("llama", {"pp": 2, "schedule": "pipedream", "batch": 8}),
    "experts": ("deepseek", {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True, "zero": 3}),
    "whole experts": ("mixtral", {"ep": 2, "tp": 2, "expert_tp": 1, "sequence_parallel": True}),
    "cut experts": ("qwen-moe", {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True, "zero": 1}),
}  # fmt: skip


@pytest.mark.parametrize("compute", ["float32", "bf16"])
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_starts_from_the_same_weights(name: str, compute: str) -> None:
    kind, plan = PLANS[name]
    job = small_job(kind, **plan)
    if name == "pipedream":
        job = make_job(job.model_dump() | {"optimizer": {"clip_grad_norm": 0.0}})
    check_start(make_job(job.model_dump() | {"precision": {"compute": compute}}))


def test_plans_drawn_at_random_start_from_the_same_weights() -> None:
    num_checked, num_ranks = 0, 0
    for number in range(60):
        try:
            job = accepted(draw(77, number))
        except PlanError:
            continue
        check_start(job)
        num_checked, num_ranks = num_checked + 1, num_ranks + job.plan.world
    assert num_checked > 20 and num_ranks > 60


def large_job(zero: int, dp: int, compute: str) -> JobSpec:
    """Tables and matrices of 12 and 3 MiB, many times as large as a block."""
    return make_job(
        {
            "model": {"layers": 2, "hidden": 256, "heads": 4, "ffn": 3072, "vocab": 12288, "sequence": 16},
            "plan": {"zero": zero, "dp": dp}, "batch": {"global_batch_size": dp}, "precision": {"compute": compute},
        }
    )  # fmt: skip


class RealMemory(MemoryTrace):
    """Leaves out the tensors that layers are made with, which have no memory."""

    def _follow(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "meta":
            super()._follow(storage)


@pytest.mark.parametrize("compute", ["float32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_nothing_is_computed_that_is_not_kept(zero: int, compute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each element of a parameter one number is asked for; under ZeRO 3 of the rank's own alone. The most memory
    while a rank starts is what it keeps, and some blocks."""
    asked = []
    write = initial_values.write_initial

    def noted(seed: int, place: ParameterShard, start: int, out: Tensor) -> None:
        asked.append((place.name, start, out.numel()))
        write(seed, place, start, out)

    monkeypatch.setattr(initial_values, "write_initial", noted)
    torch.set_num_threads(1)
    job, dp = large_job(zero, 8, compute), 8
    built(job, 5)  # whose tables of lines stay
    asked.clear()
    trace = RealMemory()
    with trace:
        replica = built(job, 5)
        kept_bytes = trace.now_bytes
    units = [unit for shards in replica.shards.values() for unit in shards.units]
    parameters = [(unit, parameter) for unit in units for parameter in unit.parameters]
    of_model = sum(parameter.numel() for _, parameter in parameters)
    held = sum(len(unit.held_values(parameter)[1]) for unit, parameter in parameters)
    assert sum(number for _, _, number in asked) == held
    assert held == of_model if zero < 3 else held < of_model / dp * 1.1
    largest = max(parameter.numel() for _, parameter in parameters)
    assert max(number for _, _, number in asked) <= (largest if zero < 3 else largest / dp * 1.1)
    # Three buffers of a block, tables of lines and what they are made in, keys of rows, columns.
    assert trace.peak_bytes - kept_bytes < 3.5 * 2**20 < 4 * largest
    assert replica.shards[0].units[0].value_shard.dtype == dtype_of(compute)
