"""Part equal of gpu.py: what one device computes against float32 on the CPU.

A case of a whole job builds it on both, does two steps from the same weights on the same tokens, and compares losses,
gradient norms and parameters (measure/verdict.py). In float32 limits are those of the tests. In narrower numbers they
follow from arithmetic: r is half a unit in the last place times the root of how many roundings lie on the way forth and
back. Losses may differ by r times the spread of a logit, for each expert of a token again, as its choice may hang on a
rounding; gradient norms by r; parameters by the root of r, for Adam turns the share of gradients whose sign is noise
into whole steps.

Two runs of one job on CUDA need not have the same bits: the backward of attention adds the shares of blocks of keys to
a query's gradient in the order in which they come. Where they differ, limits follow from the additions whose order is
free: r is half a unit times the root of their number.
"""

import math
from dataclasses import dataclass
from functools import lru_cache, partial

import gpu_prepared
import torch
from gpu_bench import CPU, Bench, Case, Row, judged
from gpu_operators import operator_cases
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.load import load_job
from shardwright.measure.rounding import HALF_UNIT
from shardwright.measure.verdict import Record, Verdict, compare
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.train.build import build, job_mesh
from shardwright.train.dry_steps import DrySteps
from shardwright.train.train_step import evaluate, train_step

STEPS = 2
_NAMES = ("loss", "gradient norm", "parameters")
_FLOAT32_LIMITS = {"loss": 1e-5, "gradient norm": 1e-5, "parameters": 1e-4}
_ROUNDINGS, _BESIDE = 20, 8  # of a layer, forth and back, and of what lies before and behind the layers
_FLOAT8_ERROR = 2.0**-4 / math.sqrt(3)  # e4m3: errors lie evenly between half a unit more and half a unit less
_UNORDERED = "attention's backward: it adds to the gradients of queries by atomics"
_EXACT = {"compute": "float32", "float8": "none", "gradients": "float32", "master": "float32"}
_SMALL_GRADIENTS = 10  # of Adam: how much more steps differ than gradients, the root of a usual gradient over epsilon
_FLOAT8_CASTS = 8  # of a layer: both operands of four products

_DROPOUT = ("model.name=tiny-llama", "model.dropout=0.1")
_GPT = ("model.name=tiny-gpt",)
_LLAMA = ("model.name=tiny-llama",)
_NF4 = ("model.ffn=384", 'model.adapter={rank=4, base="nf4", double_quantization=true}')
_KINDS: dict[str, tuple[str, ...]] = {
    "llama": _LLAMA,
    "llama tied": (*_LLAMA, "model.tied_embeddings=true"),
    "gpt": _GPT,
    "gpt of 509 tokens": (*_GPT, "model.vocab=509"),
    "gemma-like": (*_LLAMA, "model.head_dim=32", "model.activation=gelu-tanh", "model.tied_embeddings=true"),
    "head norms": (*_LLAMA, "model.qk_norm='head'"),
    "norms of all heads, clipped": (*_LLAMA, "model.qk_norm='full'", "model.clip_qkv=1.0", "model.rotary_dim=8"),
    "windows and caps": (
        *_LLAMA, "model.window={size=40, full_every=2, rotary_base=100.0}", "model.attention_softcap=2.0",
    ),
    "windows and sinks": (*_LLAMA, "model.window={size=40}", "model.sinks=true", "model.qkv_bias=true"),
    "chunks, and layers without positions": (
        *_LLAMA, "model.window={size=40, full_every=2, chunked=true}", "model.no_rotary_every=2", "model.qk_norm='l2'",
        "model.temperature_tuning={scale=0.3, floor=16}",
    ),
    "adapters": (*_LLAMA, "model.adapter.rank=4"),
    "adapters over NF4": (*_LLAMA, *_NF4),
    "alibi": (*_GPT, "model.positions='alibi'"),
    "latent attention": ("model.name=tiny-deepseek", "model.moe={}"),
    "separate documents": (*_LLAMA, "data.separate_documents=true"),
    "experts, softmax": ("model.name=tiny-mixtral",),
    "experts, sigmoid": ("model.name=tiny-deepseek",),
    "experts, with head norms": ("model.name=tiny-qwen-moe",),
    "experts, switch": ("model.name=tiny-switch",),
    "experts, gshard": ("model.name=tiny-gshard",),
    "experts, expert-choice": (*_LLAMA, 'model.moe={experts=4, gate="expert-choice"}'),
    "experts, correlation": (
        *_LLAMA, 'model.moe={experts=8, gate="correlation", top_k=3, partners=3, ffn=64, capacity_factor=1.2, '
        'overflow="reroute"}',
    ),
}  # fmt: skip
_PLANS: dict[str, str] = {
    "recompute, full": 'recompute="full"',
    "recompute, every second layer": 'recompute="full", recompute_every=2',
    "recompute, stage": 'recompute="stage"',
    "recompute, selective": 'recompute="selective", recompute_operators=["norm", "attention", "activation"]',
    "loss, in small chunks": "loss_chunk_mib=0.05",
    "zero, 1": "zero=1",
    "zero, 2": "zero=2",
    "zero, 3": "zero=3",
    "offload, optimizer": "zero=1, offload_optimizer=1.0",
    "offload, half the optimizer": "zero=2, offload_optimizer=0.5",
    "offload, parameters": "zero=3, offload_parameters=true, offload_optimizer=1.0",
    "offload, activations": 'recompute="full", offload_activations=true',
    "schedule, weight gradients put off": 'schedule="zb-h1"',
    "schedule, two stages on one rank": 'schedule="interleaved-1f1b", virtual_stages=2',
    "schedule, pairs of passes": 'schedule="dualpipev"',
}
_NUMBERS: dict[str, tuple[str, ...]] = {
    "numbers, bf16": ("precision.compute=bf16",),
    "numbers, bf16 with gradients in bf16": ("precision.compute=bf16", "precision.gradients=compute"),
    "numbers, bf16 without masters": (
        "precision.compute=bf16",
        "precision.gradients=compute",
        "precision.master=none",
    ),
    "numbers, bf16 adapters over NF4": (*_LLAMA, "precision.compute=bf16", *_NF4),
    "numbers, fp16": ("precision.compute=fp16",),
    "numbers, bf16 with 509 tokens": ("precision.compute=bf16", *_GPT, "model.vocab=509"),
    "numbers, bf16 experts": ("precision.compute=bf16", "model.name=tiny-mixtral"),
    **{
        f"fp8, {recipe}": ("precision.compute=bf16", f"precision.float8={recipe}")
        for recipe in ("tensorwise", "delayed", "rowwise", "blockwise")
    },
}


def cases(bench: Bench) -> list[Case]:
    """All that one device admits. Operators come first: a second each, and whole jobs are made of them."""
    torch.backends.cuda.matmul.allow_tf32 = False
    results: list[Case] = operator_cases(bench)
    results += [(name, partial(_model_case, bench, fields)) for name, fields in (_NUMBERS | _KINDS).items()]
    results += [(name, partial(_plan_case, bench, plan)) for name, plan in _PLANS.items()]
    results.append(("dropout, with recomputation", partial(_dropout_case, bench)))
    return bench.fewer(results)


def small_job(fields: tuple[str, ...] = _LLAMA, plan: str = "") -> JobSpec:
    """A tiny model of the catalog. A norm that clips, a rate that moves the weights visibly, and an epsilon that keeps
    Adam from turning rounding into whole steps."""
    batch = ["batch.global_batch_size=4", f"plan={{microbatch_size=2{', ' if plan else ''}{plan}}}"]
    optimizer = ("learning_rate=3e-3", "warmup_steps=2", "steps=10", "clip_grad_norm=0.5", "epsilon=1e-5")
    model = [] if any(field.startswith("model.name") for field in fields) else list(_LLAMA)
    return load_job("quickstart", [*batch, *model, *fields, *(f"optimizer.{field}" for field in optimizer)])


@dataclass(frozen=True)
class Limits:
    """How far a job's numbers let it be from float32."""

    job: JobSpec

    def by_name(self) -> dict[str, float]:
        """Of losses, gradient norms and parameters."""
        number, model = self.job.precision.compute, self.job.model
        if number == "float32":
            return dict(_FLOAT32_LIMITS)
        r = HALF_UNIT[number] * math.sqrt(_ROUNDINGS * model.layers + _BESIDE)
        if self.job.precision.float8 != "none":
            r += _FLOAT8_ERROR * math.sqrt(_FLOAT8_CASTS * model.layers)
        spread = model.init_std * math.sqrt(model.hidden)
        experts = model.moe.num_chosen if model.moe.experts else 0
        return {"loss": r * spread * (1 + experts), "gradient norm": r, "parameters": math.sqrt(r)}


def made_up_tokens(job: JobSpec, step: int) -> Tensor:
    """The global batch of a step, [B, S + 1]: small tokens more often than large ones; documents may begin anywhere."""
    generator = torch.Generator().manual_seed(step)
    shape = job.batch.global_batch_size, job.model.sequence + 1
    tokens = (torch.rand(shape, generator=generator).square() * job.model.vocab).long()
    begins = torch.rand(shape, generator=generator) < 0.05
    return torch.where(begins, -1 - tokens, tokens) if job.data.separate_documents else tokens


def record_on(device: torch.device, job: JobSpec) -> Record:
    """Some steps of a job of one rank and an evaluation, on a device."""
    mesh = job_mesh(job, 0, device)
    replica = build(job, mesh)
    steps = [train_step(replica, i, made_up_tokens(job, i).to(device)) for i in range(STEPS)]
    with replica.gathered():
        held = [p for stage in replica.stages.values() for p in placed_parameters(stage).values()]
        boxes = [(p.place, p.detach().float().cpu().clone()) for p in held]
    return Record(steps, boxes, evaluate(replica, made_up_tokens(job, STEPS).to(device)))


@lru_cache(maxsize=64)
def _on_cpu(job_json: str) -> Record:
    job = JobSpec.model_validate_json(job_json)
    return gpu_prepared.HERE.record(reference_key(job), partial(record_on, CPU, job))


def reference_key(exact: JobSpec) -> str:
    """The name of what a job gives that others are compared with."""
    return gpu_prepared.key_of(exact, b"".join(made_up_tokens(exact, i).numpy().tobytes() for i in range(STEPS + 1)))


def reference(job: JobSpec) -> Record:
    """The same in float32 on the CPU."""
    return _on_cpu(exactly(job).model_dump_json())


def referred_jobs() -> list[JobSpec]:
    """The jobs of this part whose references it needs."""
    jobs = [small_job(fields) for fields in (*_KINDS.values(), *_NUMBERS.values(), _DROPOUT)]
    return jobs + [small_job(plan=plan) for plan in _PLANS.values()]


def exactly(job: JobSpec) -> JobSpec:
    """The job in float32, as one rank without anything away or computed again."""
    exact = job.precision.model_copy(update=_EXACT)
    return job.as_one_rank().model_copy(update={"precision": exact})


def against_cpu(bench: Bench, job: JobSpec) -> Row:
    """A job on the device beside the same in float32 on the CPU."""
    if bench.is_dry:
        _dry(job)
        return judged(bench, {}, Limits(job).by_name())
    result = compare([record_on(bench.device, job)], reference(job))
    return judged(bench, dict(zip(_NAMES, result.differences, strict=True)), Limits(job).by_name()) | {
        "bitwise": result.bitwise
    }


def _dry(job: JobSpec) -> None:
    dry = DrySteps(job, 0, "cuda")
    dry.run()
    tokens = torch.zeros_like(made_up_tokens(job, 0), device="meta")
    evaluate(dry.replica, tokens)


def _model_case(bench: Bench, fields: tuple[str, ...]) -> Row:
    return against_cpu(bench, small_job(fields))


def _plan_case(bench: Bench, plan: str) -> Row:
    return against_cpu(bench, small_job(plan=plan))


def _dropout_case(bench: Bench) -> Row:
    """The same elements as on the CPU are dropped, and dropped again by a recomputation."""
    row = against_cpu(bench, small_job(_DROPOUT))
    away = 'recompute="full", offload_activations=true'
    if bench.is_dry:
        _dry(small_job(_DROPOUT, away))
        return row
    again, once = (record_on(bench.device, small_job(_DROPOUT, plan)) for plan in (away, ""))
    return run_twice(bench, row, compare([again], once))


def run_twice(bench: Bench, row: Row, found: Verdict) -> Row:
    """A row, and how far two runs of its job on the device are from each other: nothing on a CPU."""
    row |= {"bits of two runs": found.bitwise}
    if bench.kind != "cuda":
        return row | {"ok": row["ok"] and found.bitwise}
    job = small_job(_DROPOUT)
    r = HALF_UNIT["float32"] * math.sqrt(job.model.sequence * job.model.layers)
    names = [f"two runs, {name}" for name in _NAMES]
    limits = dict(zip(names, (r, r, _SMALL_GRADIENTS * r), strict=True))
    twice = judged(bench, dict(zip(names, found.differences, strict=True)), limits)
    return row | {
        "differences": row["differences"] | twice["differences"], "limits": row["limits"] | limits,
        "ok": row["ok"] and twice["ok"], "no fixed order": [_UNORDERED],
    }  # fmt: skip
