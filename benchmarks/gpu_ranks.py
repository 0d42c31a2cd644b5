"""Part ranks of gpu.py: two ranks on one device, against one rank in float32 on the CPU.

NCCL refuses two ranks of one device since 2.5 (github.com/NVIDIA/nccl, issue 418): that is asked for and written down,
with what it says; where some version allows it, the strategies run over it. Else each of two processes computes on the
device with the kernels and streams of CUDA, and what crosses between them goes through host memory and Gloo: all but
the transport is what a node of two devices runs. The control is the same over Gloo with tensors of the CPU.

    gpu_ranks.py RANK VIA STORE OUT PLAN...    is what this starts, twice; VIA is nccl, host or cpu
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_bench import CPU, Bench, Case, Row, TimeIsOverError, judged, read_part, write_json
from gpu_equal import STEPS, Limits, made_up_tokens, reference, small_job
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.measure.verdict import Record, compare
from shardwright.parallel.comm.process_groups import Mesh, StandIns
from shardwright.parallel.comm.transport import GroupTransport, Transport, WorkHandle
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.train.build import build, job_mesh
from shardwright.train.dry_steps import DrySteps
from shardwright.train.train_step import evaluate, train_step

_TIMEOUT_S = 60.0  # of a pair of processes that says nothing new
_NCCL = "NCCL, two ranks on one device"
_MOE = ("model.name=tiny-mixtral",)
PLANS: dict[str, tuple[tuple[str, ...], str]] = {
    "data parallel": ((), "dp=2"),
    "ZeRO 1": ((), "dp=2, zero=1"),
    "ZeRO 2": ((), "dp=2, zero=2"),
    "ZeRO 3": ((), "dp=2, zero=3"),
    "tensor": ((), "tp=2"),
    "tensor, sequence parallel": ((), "tp=2, sequence_parallel=true"),
    "pipeline, 1f1b": ((), 'pp=2, schedule="1f1b"'),
    "pipeline, zb-h1": ((), 'pp=2, schedule="zb-h1"'),
    "pipeline, dualpipev": ((), 'pp=2, schedule="dualpipev"'),
    "pipeline, tied": (("model.name=tiny-gpt",), 'pp=2, schedule="interleaved-1f1b", virtual_stages=2'),
    "context, ring": ((), "cp=2"),
    "context, all-gather": ((), 'cp=2, cp_method="all-gather"'),
    "context, ulysses": ((), 'cp=2, cp_method="ulysses"'),
    "experts": (_MOE, "dp=2, ep=2"),
    "experts over tensor ranks": (_MOE, "tp=2, ep=2, expert_tp=1, sequence_parallel=true"),
}


def two_rank_job(name: str) -> JobSpec:
    """A tiny job under one of the plans, with microbatches of one sample so that pipelines have four or more."""
    fields, plan = PLANS[name]
    job = small_job(fields or ("model.name=tiny-llama",), plan)
    return job.model_copy(update={"plan": job.plan.model_copy(update={"microbatch_size": 1})})


def referred_jobs() -> list[JobSpec]:
    """The jobs of this part whose references it needs, by each of two ranks."""
    return [two_rank_job(name) for name in PLANS] * 2


def cases(bench: Bench) -> list[Case]:
    """The case of NCCL's own answer, then those of all strategies of two ranks."""
    names = list(PLANS)[::4] if bench.is_quick else list(PLANS)
    pairs = {"Gloo on the CPU, the control": "cpu", "Gloo through copies of tensors": "host"}
    if bench.kind == "cuda":
        pairs = {"CUDA, two ranks that meet in host memory": "host", "Gloo on the CPU, the control": "cpu"}
    result: list[Case] = [(case, partial(_strategies, bench, case, via, names)) for case, via in pairs.items()]
    of_nccl: Case = (_NCCL, partial(_ask_nccl, bench, names))
    return [of_nccl, *result] if bench.kind == "cuda" else result


def _ask_nccl(bench: Bench, names: list[str]) -> Row:
    if bench.is_dry:
        return {"ok": None, "skipped": "a dry run has no NCCL"}
    asked = _run_pair(bench, "nccl", [])
    if "error" in asked:
        return {"ok": None, "accepted": False, "said": asked["error"], "trace": asked.get("trace", "")}
    return _strategies(bench, _NCCL, "nccl", names) | {"accepted": True, "said": asked["said"]}


def _strategies(bench: Bench, case: str, via: str, names: list[str]) -> Row:
    """All plans, in pairs of processes: one that fails ends its pair, and the next goes on behind it. Another call has
    what one had no time for."""
    if bench.is_dry:
        for name in names:
            for rank in range(2):
                DrySteps(two_rank_job(name), rank, "cpu" if via == "cpu" else "cuda").run()
        return {"ok": None, "plans": dict.fromkeys(names)}
    plans: dict[str, Any] = read_part(bench.file("ranks")).get("half", {}).get(case, {})
    while left := [name for name in names if name not in plans]:
        if time.monotonic() > bench.ends_s:
            raise TimeIsOverError(plans)
        result = _run_pair(bench, via, left)
        plans |= result["plans"]
        if (
            time.monotonic() < bench.ends_s
            and "error" in result
            and (first := next((name for name in left if name not in plans), None))
        ):
            plans[first] = {"error": result["error"], "trace": result.get("trace", ""), "ok": False}
    return {"ok": all(plan.get("ok") for plan in plans.values()), "plans": plans}


def _run_pair(bench: Bench, via: str, names: list[str]) -> dict[str, Any]:
    """The measurements of both ranks: the larger difference of each plan; and an error, if one of them had one."""
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, f"rank{rank}.json") for rank in range(2)]
        device = "cpu" if bench.kind != "cuda" or via == "cpu" else "cuda"
        command = [sys.executable, __file__]
        pair = [
            subprocess.Popen(
                [*command, str(rank), via, device, str(Path(folder, "store")), str(outs[rank]), *names],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
            )
            for rank in range(2)
        ]  # fmt: skip
        result = _await(bench, pair, outs)
        printed = [json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"plans": {}} for out in outs]
    plans = {
        name: _larger(printed[0]["plans"][name], printed[1]["plans"][name])
        for name in printed[0]["plans"] if name in printed[1]["plans"]
    }  # fmt: skip
    errors = {key: one[key] for one in printed for key in ("error", "trace") if key in one}
    return {"said": [one.get("said") for one in printed]} | result | errors | {"plans": plans}


def _await(bench: Bench, pair: Sequence["subprocess.Popen[str]"], outs: Sequence[Path]) -> dict[str, Any]:
    """Wait until both have ended; end them where one failed, or nothing new came for long."""
    heard_s, known = time.monotonic(), 0.0
    printed = ""
    while any(process.poll() is None for process in pair):
        time.sleep(0.1)
        newest = max((out.stat().st_mtime for out in outs if out.exists()), default=0.0)
        if newest > known:
            heard_s, known = time.monotonic(), newest
        failed = any(process.poll() not in (None, 0) for process in pair)
        if failed or time.monotonic() > min(heard_s + _TIMEOUT_S, bench.ends_s):
            printed = "a rank ended" if failed else f"nothing new for {_TIMEOUT_S:.0f} s, or the time was over"
            time.sleep(2.0)  # the other may have something to say, too
            for process in pair:
                process.kill()
            break
    errors = [process.communicate()[1] for process in pair]
    failed = any(process.returncode != 0 for process in pair)
    return {"error": printed or "a rank ended", "trace": "\n".join(e[-1500:] for e in errors)} if failed else {}


def _larger(a: Row, b: Row) -> Row:
    """The row of both ranks."""
    return a | {
        "differences": {name: max(value, b["differences"][name]) for name, value in a["differences"].items()},
        "ok": a["ok"] and b["ok"],
    }


class HostTransport:
    """A transport whose messages go through host memory. A wait for one ends with a copy on the stream that waits."""

    is_gloo = False  # callers ask for what they would ask of NCCL

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._inner, self._sent = GroupTransport(group), list[Any]()

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> WorkHandle:
        """Reduce `x` in place."""
        host = x.cpu()
        return _Copied(self._inner.all_reduce(host, op), x, host)

    def all_gather(self, out: Tensor, x: Tensor) -> WorkHandle:
        """Put each rank's `x` into `out`."""
        host = torch.empty(out.shape, dtype=out.dtype)
        return _Copied(self._inner.all_gather(host, x.cpu()), out, host)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> WorkHandle:
        """Put this rank's share of the sum into `out`."""
        host = torch.empty(out.shape, dtype=out.dtype)
        return _Copied(self._inner.reduce_scatter(host, x.cpu()), out, host)

    def all_to_all(
        self, out: Tensor, x: Tensor, out_splits: Sequence[int] | None = None, in_splits: Sequence[int] | None = None
    ) -> WorkHandle:
        """Give each rank its share."""
        host = torch.empty(out.shape, dtype=out.dtype)
        return _Copied(self._inner.all_to_all(host, x.cpu(), out_splits, in_splits), out, host)

    def broadcast(self, x: Tensor, source: int) -> WorkHandle:
        """Overwrite `x` with that of a rank."""
        host = x.cpu()
        return _Copied(self._inner.broadcast(host, source), x, host)

    def reduce(self, x: Tensor, target: int, op: dist.ReduceOp.RedOpType) -> WorkHandle:
        """Reduce into the `x` of a rank."""
        host = x.cpu()
        return _Copied(self._inner.reduce(host, target, op), x, host)

    def scatter(self, out: Tensor, shares: list[Tensor] | None, source: int) -> WorkHandle:
        """Give each rank its share of those of a rank."""
        host = torch.empty(out.shape, dtype=out.dtype)
        host_shares = None if shares is None else [share.cpu() for share in shares]
        return _Copied(self._inner.scatter(host, host_shares, source), out, host)

    def gather(self, parts: list[Tensor] | None, x: Tensor, target: int) -> WorkHandle:
        """Put each rank's `x` into the parts of a rank, which lie one behind the other in one tensor."""
        if parts is None:
            return _Copied(self._inner.gather(None, x.cpu(), target), None, None)
        host = torch.empty(len(parts), *x.shape, dtype=x.dtype)
        whole = parts[0].as_strided(host.shape, host.stride(), parts[0].storage_offset())
        return _Copied(self._inner.gather(list(host), x.cpu(), target), whole, host)

    def send(self, x: Tensor, to: int, tag: int = 0) -> WorkHandle:
        """Send to a rank. The tensor is kept until it has arrived, whoever forgets it."""
        work = self._inner.send(x.detach().cpu().contiguous(), to, tag)
        self._sent = [*(one for one in self._sent if not one.is_completed()), work]
        return _Copied(work, None, None)

    def recv(self, out: Tensor, source: int, tag: int = 0) -> WorkHandle:
        """Receive from a rank."""
        host = torch.empty(out.shape, dtype=out.dtype)
        return _Copied(self._inner.recv(host, source, tag), out, host)

    def exchange(self, out: Tensor, x: Tensor, to: int, source: int) -> list[WorkHandle]:
        """Send and receive."""
        return [self.recv(out, source), self.send(x, to)]


class _Copied:
    """WorkHandle on host memory, and the copy of its result to where it belongs."""

    def __init__(self, work: Any, out: Tensor | None, host: Tensor | None) -> None:
        self._work, self._out, self._host, self._is_over = work, out, host, False

    def is_completed(self) -> bool:
        """True if it is over, its copy issued."""
        if not self._is_over and self._work.is_completed():
            self.wait()
        return self._is_over

    def wait(self) -> None:
        """Block until the host has it, and issue the copy."""
        if self._is_over:
            return
        self._is_over = True
        self._work.wait()
        if self._out is not None and self._host is not None and self._host.data_ptr() != self._out.data_ptr():
            self._out.detach().copy_(self._host)


def _through_host(rank: int, lines: list[list[int]]) -> Transport | None:
    """The communicator of this rank's line; every rank takes part in making each."""
    own: Transport | None = None
    for ranks in lines:
        if len(ranks) > 1:
            made = dist.new_group(ranks, timeout=timedelta(seconds=_TIMEOUT_S), backend="gloo")
            own = HostTransport(made) if rank in ranks else own
    return own


def _record(job: JobSpec, mesh: Mesh) -> Record:
    """The record of this rank: its steps, and its boxes of the parameters."""
    replica, share = build(job, mesh), job.batch.global_batch_size // job.plan.dp

    def mine(step: int) -> Tensor:
        return made_up_tokens(job, step)[mesh.dp.index * share :][:share].to(mesh.device)

    steps = [train_step(replica, i, mine(i)) for i in range(STEPS)]
    with replica.gathered():
        held = [p for stage in replica.stages.values() for p in placed_parameters(stage).values()]
        boxes = [(p.place, p.detach().float().cpu().clone()) for p in held]
    return Record(steps, boxes, evaluate(replica, mine(STEPS)))


def _work(rank: int, via: str, kind: str, store: str, out: Path, names: list[str]) -> None:
    """One rank: join, then plan by plan."""
    device = torch.device("cuda", 0) if kind == "cuda" else CPU
    torch.set_num_threads(1 if kind == "cpu" else 4)
    torch.backends.cuda.matmul.allow_tf32 = False
    result: dict[str, Any] = {"plans": {}}
    try:
        if kind == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if via == "nccl" else "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2,
            timeout=timedelta(seconds=_TIMEOUT_S),
        )  # fmt: skip
        ones = torch.ones(1024, device=device if via == "nccl" else CPU)
        dist.all_reduce(ones)
        result["said"] = f"a sum of two ones is {ones[0].item():g}"
        bench = Bench(kind, False, False, out.parent, 0.0)
        stand_ins = StandIns(partial(_through_host, rank)) if via == "host" else None
        for name in names:
            job = two_rank_job(name)
            record = _record(job, job_mesh(job, rank, device, stand_ins=stand_ins))
            verdict = compare([record], reference(job))
            differences = dict(zip(("loss", "gradient norm", "parameters"), verdict.differences, strict=True))
            result["plans"][name] = judged(bench, differences, Limits(job).by_name())
            write_json(out, result)
        write_json(out, result)
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        write_json(out, result | {"error": f"{type(error).__name__}: {error}"[:800]})
        raise


if __name__ == "__main__":
    _work(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], Path(sys.argv[5]), sys.argv[6:])
