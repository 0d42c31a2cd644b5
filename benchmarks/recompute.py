"""Savings and costs of recomputation: measured bytes and time of a step, by policy, on one rank and one thread.

    python benchmarks/recompute.py

Prints the tables of docs/recompute.md. All variants of a table run in turn in one process, and a figure is the median
of the ratios to the first variant in the same round: what slows the machine for a while slows all of them.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.recompute_policy import KEEP_ALL, OPERATORS, WHOLE_LAYER, Policy
from shardwright.config.units import GIB
from shardwright.layers.recompute_cost import Again
from shardwright.measure.saved_tensors import LiveBytes, saved_bytes
from shardwright.memory.activation_peak import job_stages, moments, peak
from shardwright.memory.activations import layer_of
from shardwright.memory.budget import meet_budget
from shardwright.memory.recompute_budget import choices
from shardwright.model.activation import activate_gated
from shardwright.model.dropout import LEVELS, Mask
from shardwright.parallel.pipeline.pipeline_stage import Microbatch
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.schedule.job_program import job_program
from shardwright.train.build import Replica, build, job_mesh
from shardwright.train.train_step import train_step

ROUNDS = 20
MODEL = {"layers": 8, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 704, "sequence": 256, "vocab": 256}
BATCH = 4
POLICIES: dict[str, Policy] = {
    "none": KEEP_ALL,
    "norm": frozenset({"norm"}),
    "attention": frozenset({"attention"}),
    "activation": frozenset({"activation"}),
    "norm, attention, activation": frozenset({"norm", "attention", "activation"}),
    "all five operators": frozenset(OPERATORS),
    "full": WHOLE_LAYER,
}


def ratios(variants: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median time of each variant over that of the first one in the same round."""
    for function in variants.values():
        function()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    gc.collect()
    gc.disable()
    for turn in range(rounds):
        order = list(variants) if turn % 2 == 0 else list(reversed(variants))
        for name in order:
            start_s = time.perf_counter()
            variants[name]()
            seconds[name].append(time.perf_counter() - start_s)
    gc.enable()
    first = seconds[next(iter(variants))]
    return {name: statistics.median(s / f for s, f in zip(own, first, strict=True)) for name, own in seconds.items()}


def job_with(**plan: object) -> JobSpec:
    """The job of the tables; one microbatch of all samples."""
    return make_job({"model": MODEL, "batch": {"global_batch_size": BATCH}, "plan": {"microbatch_size": BATCH, **plan}})


def fields_of(policy: Policy) -> dict[str, object]:
    """The plan's fields that ask for a policy."""
    if policy in (KEEP_ALL, WHOLE_LAYER):
        return {"recompute": "full" if policy else "none"}
    return {"recompute": "selective", "recompute_operators": sorted(policy)}


class Step:
    """A job on one rank, whose step can be run."""

    def __init__(self, job: JobSpec) -> None:
        self.asked, self.job = job, meet_budget(job)
        self.mesh = job_mesh(job, 0, torch.device("cpu"))
        self.replica: Replica = build(self.job, self.mesh)
        generator = torch.Generator().manual_seed(0)
        shape = (BATCH, job.model.sequence + 1)
        self.tokens_BS = torch.randint(job.model.vocab, shape, generator=generator)

    def __call__(self) -> float:
        return train_step(self.replica, 0, self.tokens_BS).loss

    def constants(self) -> list[Tensor]:
        """The tensors that are there anyway: parameters, tables and tokens."""
        stage = self.replica.stages[0]
        return [p.detach() for p in placed_parameters(stage).values()] + stage.tables.tensors + [self.tokens_BS]

    def layer_bytes(self) -> int:
        """The bytes that one layer keeps, measured."""
        stage = self.replica.stages[0]
        x = stage.empty_hidden(BATCH).normal_().requires_grad_()
        run = stage.forward_pass(Microbatch(0, 0, 0))
        return saved_bytes(lambda: stage.layers["0"](x, run), self.constants())

    def live_peak(self) -> int:
        """The most that saved tensors hold in a step."""
        with LiveBytes(self.constants()) as live:
            self()
        return live.peak_bytes


def checkpointed() -> Step:
    """Full recomputation by torch.utils.checkpoint, around layers that keep all."""
    step = Step(job_with())
    stage = step.replica.stages[0]
    straight = stage.through

    def through(region: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if region not in stage.layers:
            return straight(region, function, x)
        result: Tensor = checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
        return result

    stage.through = through
    return step


def policy_table() -> Iterator[str]:
    """Bytes and time by policy."""
    layer, work = layer_of(job_with()), Again.of(job_with())
    steps = {name: Step(job_with(**fields_of(policy))) for name, policy in POLICIES.items()}
    steps["full by torch.utils.checkpoint"] = checkpointed()
    times = ratios(steps)
    forward = sum(operator.flops for operator in work.chain)
    yield "| recomputed | kept a layer, measured | predicted | FLOPs of a forward, again | step time |"
    yield "| --- | --- | --- | --- | --- |"
    for name, step in steps.items():
        policy = POLICIES.get(name, WHOLE_LAYER)
        again = work.flops(policy) / forward if name in POLICIES else 1.0
        measured = f"{step.layer_bytes():,}" if name in POLICIES else ""
        predicted = f"{layer.kept_bytes(policy):,}" if name in POLICIES else ""
        yield f"| {name} | {measured} | {predicted} | {again:.0%} | {times[name]:.2f} |"


def budget_table() -> Iterator[str]:
    """Limits, and what was chosen for them."""
    job, layers = job_with(), MODEL["layers"]
    program = job_program(job)
    least, most = (
        peak(moments(program, 0), job_stages(job, program, 0, [policy] * layers))[0]
        for policy in (WHOLE_LAYER, KEEP_ALL)
    )
    full = Step(job_with(recompute="full"))
    variants: dict[str, Step] = {"full": full}
    for share in (0.1, 0.2, 0.35, 0.5, 0.65, 0.8):
        limit = least + share * (most - least)
        variants[f"{limit / 2**20:.1f} MiB"] = Step(job_with(recompute="budget", memory_limit_gib=limit / GIB))
    times = ratios(variants)
    of_full = layers * Again.of(job).flops(WHOLE_LAYER)
    yield f"Without recomputation {most / 2**20:.1f} MiB, with full {least / 2**20:.1f} MiB.\n"
    yield "| limit | predicted peak, MiB | measured peak, MiB | FLOPs again, of full's | step time, of full's |"
    yield "| --- | --- | --- | --- | --- |"
    for name, step in variants.items():
        choice = None if name == "full" else choices(step.asked)[0]
        predicted = least if choice is None else choice.peak_bytes
        share = 1.0 if choice is None else choice.flops / of_full
        yield (
            f"| {name} | {predicted / 2**20:.2f} | {step.live_peak() / 2**20:.2f} | {share:.0%} | {times[name]:.2f} |"
        )


def operator_table() -> Iterator[str]:
    """Our operators against torch's: forward and backward of one."""
    generator = torch.Generator().manual_seed(0)
    tokens, hidden, inner = 1024, 256, 704
    fused, dy = (torch.randn(tokens, 1, n, generator=generator) for n in (2 * inner, inner))
    x, w, dx = (
        torch.randn(*shape, generator=generator) for shape in ((tokens, 1, hidden), (hidden,), (tokens, 1, hidden))
    )
    norm = build(job_with(), job_mesh(job_with(), 0, torch.device("cpu"))).stages[0].layers["0"].attention_norm
    mask = Mask(
        key=1, num_dropped_levels=round(0.1 * LEVELS), positions=(range(tokens),), first_sample=0, sequence=tokens
    )

    def torch_gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def backward(of: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Callable[[], object]:
        leaf = x.clone().requires_grad_()

        def run() -> None:
            leaf.grad = None
            of(leaf).backward(dy)

        return run

    pairs = {
        "silu(gate) x up": (torch_gated, lambda x: activate_gated(x, "silu"), fused, dy),
        "RMSNorm": (lambda x: functional.rms_norm(x, (hidden,), w.requires_grad_(), 1e-5), norm, x, dx),
    }
    yield "| forward and backward | kept by torch | kept by ours | time, ours / torch's |"
    yield "| --- | --- | --- | --- |"
    for name, (reference, own, of, gradient) in pairs.items():
        times = ratios({"theirs": backward(reference, of, gradient), "ours": backward(own, of, gradient)}, 60)
        leaf = of.clone().requires_grad_()
        kept = [
            saved_bytes(lambda f=f, leaf=leaf: f(leaf), [norm.weight.detach(), w.detach()]) for f in (reference, own)
        ]
        yield f"| {name} | {kept[0]:,} | {kept[1]:,} | {times['ours']:.2f} |"
    both = ratios({"theirs": lambda: functional.dropout(x, 0.1), "ours": lambda: mask.apply(x)}, 60)
    kept_mask = saved_bytes(lambda: functional.dropout(x.clone().requires_grad_(), 0.1))
    yield f"| dropout (time of the forward alone) | {kept_mask:,} | 0 | {both['ours']:.2f} |"


def main() -> None:
    """All tables."""
    torch.set_num_threads(1)
    for table in (operator_table, policy_table, budget_table):
        print("\n".join(table()), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
