"""Accesses to memory have an order on CUDA; and what takes one away is told."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.config.load import make_job
from shardwright.measure.checks import recorded_streams
from shardwright.measure.checks.access_order import Access, FreedMemory, MemoryBlock, Worker
from shardwright.measure.checks.host_waits import EXPERT_LINES, reading_faults, wait_faults
from shardwright.measure.checks.recorded_runs import RankAccesses, recorded_accesses
from shardwright.measure.checks.recorded_streams import OperatorAccesses, RecordedStreams
from shardwright.parallel.comm.collectives import Axis
from shardwright.parallel.device_streams import HostNumbers
from shardwright.parallel.expert import dispatch
from shardwright.parallel.pipeline.executor import PipelineExecutor
from shardwright.parallel.zero.host_link import HostLink
from shardwright.train.own_module.module_job import module_job
from support.cases import small_job
from support.module_accesses import module_accesses

pytestmark = pytest.mark.long

META = torch.device("meta")
JOBS = {
    "zero 1": small_job(batch=2, dp=2, zero=1),
    "zero 3": small_job(batch=2, dp=2, zero=3),
    "values on the host": small_job(batch=2, dp=2, zero=3, offload_optimizer=1.0, offload_parameters=True),
    "half of the optimizer on the host": small_job(batch=2, dp=2, zero=1, offload_optimizer=0.5),
    "offloaded inputs": small_job(batch=2, layers=4, recompute="full", offload_activations=True),
    "pipeline": small_job(batch=4, pp=2, dp=2, zero=2),
    "pairs": small_job(batch=4, pp=2, schedule="dualpipev", virtual_stages=2),
    "pairs under zero 3": small_job(batch=8, layers=4, pp=2, dp=2, zero=3, schedule="dualpipev", virtual_stages=2),
    "ring": small_job(batch=2, cp=2),
    "sequence parallel": small_job(batch=2, tp=2, sequence_parallel=True),
    "experts": small_job("mixtral", batch=2, dp=2, ep=2),
}
# Plans of a module of the user's own, with how many backwards a step has.
MODULES: dict[str, tuple[dict[str, Any], int]] = {
    "zero 1": ({"zero": 1}, 1),
    "zero 2, two backwards": ({"zero": 2}, 2),
    "zero 3": ({"zero": 3, "bucket_mib": 1.0}, 2),
    "optimizer on the host": ({"zero": 1, "offload_optimizer": 0.5}, 1),
    "values on the host": ({"zero": 3, "offload_optimizer": 1.0, "offload_parameters": True}, 1),
    "compressed": ({"zero": 0, "compress": "topk"}, 1),
}
# Orders that others make double. A transfer out to a buffer has waited for the stream that computes, which has waited
# for the transfer in from there; sums of gradients end before that of the loss, on the same communicator; and where all
# state is on the host, nothing of a checkpoint comes from the device. The last rank of a fold has stages in the middle,
# which read no tokens.
DOUBLE = {
    "offloaded inputs": [("wait_event", "send in send")],
    "ring": [("wait_event", "wait in _finish_reduce")],
    "experts": [("wait_event", "wait in _finish_reduce")],
    "values on the host": [("synchronize", "wait")],
    "pairs": [("wait_event", "batch in watched_span")],
    "pairs under zero 3": [("wait_event", "batch in watched_span")],
}
# The calls that give an order to accesses, by name: the class and its method.
ORDERS: dict[str, tuple[type, str]] = {
    "wait_stream": (recorded_streams.RecordedStream, "wait_stream"),
    "wait_event": (recorded_streams.RecordedStream, "wait_event"),
    "lend": (RecordedStreams, "lend"),
    "synchronize": (recorded_streams.RecordedEvent, "synchronize"),
}


def caller() -> str:
    """The two functions of the runtime that ask for an order."""
    frame: Any = sys._getframe(2)
    names: list[str] = []
    while len(names) < 2 and frame is not None:
        file = frame.f_code.co_filename
        if "/shardwright/" in file and "/checks/" not in file and not file.endswith("/device_streams.py"):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return " in ".join(names)


def without(monkeypatch: pytest.MonkeyPatch, name: str, place: str) -> set[str]:
    """Leave out what one function of the runtime asks for. Returns the functions that ask, as they come."""
    kind, method = ORDERS[name]
    ask: Callable[..., None] = getattr(kind, method)
    places = set[str]()

    def asked(self: Any, *given: Any) -> None:
        places.add(caller())
        if caller() != place:
            ask(self, *given)

    monkeypatch.setattr(kind, method, asked)
    return places


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", JOBS)
def test_a_plan_has_no_fault(name: str) -> None:
    job = JOBS[name]
    for rank in range(0, job.plan.world, job.plan.world // job.plan.pp):
        result = recorded_accesses(job, rank)
        assert result.num_accesses > 500 and result.faults == ()
        assert wait_faults(job, result.waits, result.num_steps, result.passes) == []


def own_module(name: str) -> RankAccesses:
    plan, accumulate = MODULES[name]
    with torch.device(META):
        module = nn.Sequential(nn.Embedding(50, 8), *(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    job = module_job(plan, None, {"compute": "bf16"}, 4)
    return module_accesses(job, module, lambda: torch.zeros(2, 6, dtype=torch.long, device=META), accumulate, rank=1)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_ones_own_has_no_fault(name: str) -> None:
    result = own_module(name)
    assert result.num_accesses > 300 and result.faults == ()
    assert len([line for line in result.waits if not line.startswith("parallel/zero/")]) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "moe",
    [{}, {"gate": "expert-choice"}, {"gate": "switch", "capacity_factor": 1.25}],
    ids=lambda of: of.get("gate", ""),
)
@pytest.mark.parametrize("has_documents", [False, True])
def test_waits_of_experts_are_those_that_their_gate_needs(moe: dict[str, Any], has_documents: bool) -> None:
    """One a pass for where tokens go, one for how many choices a token has, one a microbatch for what is real."""
    job = small_job("mixtral", batch=4, dp=2, ep=2, recompute="full")
    model = job.model.model_copy(update={"moe": job.model.moe.model_copy(update=moe)})
    data = job.data.model_copy(update={"separate_documents": has_documents})
    job = job.model_copy(update={"model": model, "data": data})
    result = recorded_accesses(job, 0)
    assert result.faults == () and wait_faults(job, result.waits, result.num_steps, result.passes) == []
    of_experts = [line for line in result.waits if line.startswith(EXPERT_LINES)]
    passes = job.num_microbatches * job.model.layers * 2
    needed = passes * (2 if moe.get("gate") == "expert-choice" else 1)
    assert len(of_experts) == needed + (job.num_microbatches if has_documents and moe else 0)


@pytest.mark.parametrize("plan", [{}, {"tp": 2, "pp": 2, "sequence_parallel": True}], ids=["dp 1", "tp 2 x pp 2"])
def test_the_host_waits_once_in_a_step_of_8b_widths(plan: dict[str, Any]) -> None:
    """Two dense layers of Llama 3 8B, in 16 microbatches. The vocabulary is small: its chunks are many operators."""
    model = {"hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "layers": 2, "sequence": 512, "vocab": 1024}
    job = make_job({"model": model, "plan": plan, "batch": {"global_batch_size": 16}, "precision": {"compute": "bf16"}})
    assert job.num_microbatches == 16
    for rank in range(0, job.plan.world, job.plan.world // job.plan.pp):
        ran = recorded_accesses(job, rank)
        assert ran.faults == () and ran.num_steps == 1
        assert [line.partition(":")[0] for line in ran.waits] == ["train/train_step.py"]
        assert reading_faults(job, ran.waits_to_read, ran.num_lines) == []


def test_scales_of_fp8_wait_for_nothing_more() -> None:
    job = small_job(batch=2, dp=2)
    precision = job.precision.model_copy(update={"float8": "delayed", "compute": "bf16"})
    job = job.model_copy(update={"precision": precision})
    assert len(recorded_accesses(job, 0).waits) == 1


def planted(run: Callable[[], RankAccesses]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(order, function that asks for it, faults of the rank without it), one after the other."""
    for name in ORDERS:
        with pytest.MonkeyPatch.context() as patch:
            places = without(patch, name, "")
            run()
        for place in sorted(places):
            with pytest.MonkeyPatch.context() as patch:
                without(patch, name, place)
                yield name, place, run().faults


def untold(accesses: dict[tuple[str, str], tuple[str, ...]]) -> list[tuple[str, str]]:
    """Orders without which nothing is told; but for buffers that come back to a pool, nearly always on the stream that
    they were made on."""
    return [key for key, faults in accesses.items() if not faults and not key[1].startswith("returned in")]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("of", JOBS)
def test_an_order_that_is_left_out_is_told(of: str) -> None:
    job = JOBS[of]
    results = {
        (name, place): faults for name, place, faults in planted(lambda: recorded_accesses(job, job.plan.world - 1))
    }
    assert (
        len(results) > 6
        and {("wait_event", "batch in watched_span"), ("lend", "batch in watched_span")} < results.keys()
    )
    # The host has read the numbers of the step before when a batch is asked for: its tokens are no longer looked at.
    double = [*DOUBLE.get(of, []), ("lend", "batch in watched_span")]
    assert sorted(untold(results)) == sorted(double)


@pytest.mark.parametrize("of", ["zero 3", "values on the host"])
def test_an_order_that_a_module_of_ones_own_is_left_without_is_told(of: str) -> None:
    results = {(name, place): faults for name, place, faults in planted(lambda: own_module(of))}
    assert len(results) > 2
    double = [("synchronize", "wait in held")] if of == "values on the host" else []
    assert untold(results) == double


@pytest.mark.parametrize("of", ["zero 1", "experts"])
def test_a_wait_that_is_put_in_is_told(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more in each microbatch of a dense model, and a second one in each layer with experts."""
    job = JOBS[of]
    if of == "experts":
        plan_dispatch, module = dispatch.plan_dispatch, dispatch

        def planned(counting: dispatch.Counting, ep: Axis, *given: Any) -> dispatch.DispatchPlan:
            HostNumbers(counting.counts_Pe.flatten(), ep.streams).read([])
            return plan_dispatch(counting, ep, *given)

        monkeypatch.setattr(module, "plan_dispatch", planned)
    else:
        forward = PipelineExecutor._forward

        def waiting(self: PipelineExecutor, key: tuple[int, int], run: Any) -> None:
            forward(self, key, run)
            self._mesh.to_host(run.losses[key[1]])

        monkeypatch.setattr(PipelineExecutor, "_forward", waiting)
    result = recorded_accesses(job, 0)
    faults = wait_faults(job, result.waits, result.num_steps, result.passes)
    where = {"experts": "parallel/expert/", "zero 1": "parallel/pipeline/executor.py"}[of]
    assert len(faults) == 1 and where in faults[0] and "would do" in faults[0]


def worker(number: int, **clock: int) -> Worker:
    return Worker(number, f"stream {number}", {int(name[1:]): count for name, count in clock.items()})


def test_two_accesses_are_a_fault_where_one_writes_and_neither_comes_first() -> None:
    first, second = worker(1), worker(2)
    for writes in ((True, True), (True, False), (False, True), (False, False)):
        block = MemoryBlock(100, "a line", first)
        assert not list(block.access(Access(first, first.works(), 0, 50, writes[0], "one")))
        assert not list(block.access(Access(second, second.works(), 50, 100, writes[1], "beside it")))
        late = Access(second, second.works(), 40, 60, writes[1], "two")
        assert len(list(block.access(late))) == any(writes)
        second.wait_for(first.clock)
        assert not list(block.access(Access(second, second.works(), 0, 100, True, "in order")))
        first.wait_for(second.clock)


def test_memory_that_is_let_go_is_not_used_again_before_its_streams() -> None:
    """Where it was made it may be at once; unless another stream that it was not lent to has still to come to it."""
    for is_lent, is_waited in ((False, False), (True, False), (False, True)):
        maker, other, memory = worker(1), worker(2), FreedMemory()
        block = MemoryBlock(100, "a line", maker)
        list(block.access(Access(maker, maker.works(), 0, 100, True, "made")))
        other.wait_for(maker.clock)
        assert not list(block.access(Access(other, other.works(), 0, 100, False, "read")))
        if is_lent:
            block.lent[other.number] = other
        memory.let_go(block)
        if is_waited:
            maker.wait_for(other.clock)
        faults = list(memory.handed_out(MemoryBlock(10, "another line", maker), maker))
        assert len(faults) == (not is_lent and not is_waited)
        assert not list(memory.handed_out(MemoryBlock(10, "another line", other), other))


def test_the_host_reads_what_came_once_it_is_there() -> None:
    """Of a link to the host, by hand."""
    for waits in (True, False):
        streams = RecordedStreams()
        with OperatorAccesses(streams):
            link = HostLink(streams)
            into, values = link.empty((5,), torch.float32), torch.zeros(5, device=META)
            sent = link.send(into, values)
            if waits:
                sent.synchronize()
            into.mul_(2)
            link.bring(values, into)
            values.mul_(2)
        assert bool(streams.faults) != waits
