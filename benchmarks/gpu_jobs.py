"""The jobs that gpu.py trains and measures, as they fit one device, and what is predicted for them."""

from dataclasses import asdict
from functools import lru_cache
from typing import Any

from gpu_bench import Bench

from shardwright.config.job import JobSpec
from shardwright.config.load import load_job
from shardwright.cost.calibration import Rates, rates_of, shipped, software_under
from shardwright.cost.from_job import run_of
from shardwright.cost.kernels import KernelTime, operator_s
from shardwright.layers.chains import chains
from shardwright.simulate.full_step import simulated_step

# One model of about a billion parameters, some layers of Llama 3 8B, and a small one with experts.
MODELS: dict[str, tuple[str, ...]] = {
    "dense 1B": (
        "model.layers=16", "model.hidden=2048", "model.heads=32", "model.kv_heads=8", "model.ffn=8192",
        "model.vocab=128256", "model.tied_embeddings=true",
    ),
    "8B, 4 layers": ("model.name=llama3-8b", "model.layers=4"),
    "experts, 8 of 64": (
        "model.layers=8", "model.hidden=2048", "model.heads=16", "model.kv_heads=4", "model.head_dim=128",
        "model.vocab=32000", "model.ffn=8192", "model.moe={experts=64, top_k=8, ffn=768, aux_loss=\"switch\"}",
    ),
}  # fmt: skip
# Models that a device's rates do not limit as much as the host and small shapes do, whole released ones, and adapters.
MORE_MODELS: dict[str, tuple[str, ...]] = {
    "512 wide": (
        "model.layers=8",
        "model.hidden=512",
        "model.heads=8",
        "model.kv_heads=8",
        "model.ffn=1536",
        "model.vocab=32000",
    ),
    "GPT-2": ("model.name=gpt2",),
    "GPT-2 medium": ("model.name=gpt2-medium",),
    "Qwen3 0.6B": ("model.name=qwen3-0.6b",),
    "Llama 3.2 3B": ("model.name=llama3.2-3b",),
    "Llama 3 8B, adapters": ("model.name=llama3-8b", "model.adapter.rank=16"),
    "Llama 3 8B, adapters over NF4": (
        "model.name=llama3-8b",
        'model.adapter={rank=16, base="nf4", double_quantization=true}',
    ),
}
TOKENS_OF_MICROBATCH = 16384  # at once, whatever the sequence


def job_of(
    bench: Bench, model: str, sequence: int, float8: str = "none", plan: str = "zero=1", microbatches: int = 1,
    tokens: int = TOKENS_OF_MICROBATCH,
) -> JobSpec:  # fmt: skip
    """A job in bf16 on one device, with microbatches of so many tokens; a quick one is of few layers and short
    sequences."""
    tokens = 1024 if bench.is_quick else tokens
    sequence = min(sequence, tokens)
    size = tokens // sequence
    fields = [
        *(MODELS | MORE_MODELS)[model],
        f"model.sequence={sequence}",
        "precision.compute=bf16",
        f"precision.float8={float8}",
    ]
    fields += ["model.layers=2"] * bench.is_quick
    fields += [f"plan={{microbatch_size={size}, {plan}}}", f"batch.global_batch_size={size * microbatches}"]
    fields += ["cluster.nodes=1", "cluster.devices_per_node=1", "cluster.software=shardwright"]
    fields += [f"cluster.device={bench.catalog_name}"] if bench.catalog_name else []
    return load_job("quickstart", fields)


def predicted(bench: Bench, job: JobSpec) -> dict[str, Any] | None:
    """Seconds of a step and by cause, MFU, and the range; None where the catalog does not know what it takes."""
    if not bench.catalog_name:
        return None
    try:
        return {name: float(value) for name, value in asdict(simulated_step(job, shipped())).items()}
    except KeyError:
        return None


@lru_cache(maxsize=64)
def _prices(job_json: str) -> tuple[Rates | None, dict[str, KernelTime]]:
    job = JobSpec.model_validate_json(job_json)
    run, constants = run_of(job), shipped()
    try:
        rates, software = rates_of(run, constants), software_under(run)
    except KeyError:  # a device without a rate for these numbers
        return None, {}
    chain = chains(run.shape, run.grid, software)["experts" if run.shape.experts else "dense"]
    narrow = job.precision.float8 != "none"
    return rates, {operator.layer_operator.name: operator_s(rates, software, operator, narrow) for operator in chain}


def operator_prices(bench: Bench, job: JobSpec) -> dict[str, KernelTime]:
    """The cost model's time of each operator of a layer, by its name; nothing where the device is not known."""
    return _prices(job.model_dump_json())[1] if bench.catalog_name else {}


def rates(bench: Bench, job: JobSpec) -> Rates | None:
    """The rates of the device under this runtime, if it is in the catalog."""
    return _prices(job.model_dump_json())[0] if bench.catalog_name else None
