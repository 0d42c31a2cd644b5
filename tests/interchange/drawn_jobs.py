"""Jobs at random that a system has: drawn over all of ours, written and read back, which leaves what it knows."""

from collections.abc import Iterator

from fuzz.draw import draw
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import job_of_fields
from shardwright.interchange.exported import asked_of
from shardwright.interchange.foreign_job import job_of_texts
from shardwright.interchange.system import System

# Models that all systems have; Megatron-LM and NeMo also get drawn ones.
MODELS = ("llama3-8b", "llama3-70b", "qwen3-30b-a3b", "llama2-7b")
_OF_LAYERS = ("layout", "recompute_layers", "fallback", "memory_limit_gib")


def drawn_job(seed: int, number: int, model: str = "") -> JobSpec | None:
    """A legal job; None where the draw is not. A model of the catalog takes the place of the drawn one."""
    fields = draw(seed, number)
    if model:
        plan = {name: value for name, value in fields["plan"].items() if name not in _OF_LAYERS}
        plan["recompute"] = {"layers": "none", "budget": "full"}.get(plan["recompute"], plan["recompute"])
        fields |= {"model": {"name": model, "sequence": 4096}, "plan": plan}
        if "qwen" not in model:
            for name in ("ep", "dispatch", "expert_tp"):
                plan.pop(name, None)
            fields["precision"].pop("float8_dispatch", None)
    try:
        return job_of_fields(fields, [], "a draw")
    except PlanError:
        return None


def jobs_of(system: System, seed: int, count: int) -> Iterator[JobSpec]:
    """So many jobs that the system has, with all of their plans different."""
    seen: set[str] = set()
    takes_any = system.name in ("megatron", "nemo", "primus")
    # torchtitan had Llama 2 until 2024.
    models = [model for model in MODELS if system.name != "torchtitan" or model != "llama2-7b"]
    models = [model for model in models if system.name != "nanotron" or "qwen" not in model]
    number = 0
    while len(seen) < count:
        number += 1
        model = "" if takes_any and number % 2 else models[number % len(models)]
        job = drawn_job(seed, number, model)
        if job is None:
            continue
        back = job_of_texts(system, system.write(job), asked_of(job), "a draw").job
        key = back.plan.model_dump_json() + str(back.batch)
        if key not in seen:
            seen.add(key)
            yield back
