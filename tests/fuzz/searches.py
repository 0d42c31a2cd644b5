"""Searches that must agree with each other: of a drawn model, cluster, software and what is kept.

More memory, faster devices, links and networks never make the answer slower; what is kept more never makes it faster,
unless the software lacks it, nor does keeping the answer itself change it; and no plan of the list has one beside it,
of the same degrees, that is faster by the numbers of `estimate` and fits as surely.

python tests/fuzz/searches.py --seed 1 --count 300
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).parents[1])

from shardwright.config import catalog
from shardwright.config.base import PlanError, Spec
from shardwright.config.job import JobSpec
from shardwright.config.load import job_to_plan
from shardwright.config.schedule_facts import searched
from shardwright.config.software import SoftwareSpec
from shardwright.config.toml_text import toml_text
from shardwright.config.zero_facts import ZeroFactsSpec
from shardwright.cost.calibration import shipped
from shardwright.memory.job_memories import fullest
from shardwright.planner.advice.neighbours import neighbours
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.known_strategies import within_known
from shardwright.planner.search.plan_price import fits, plan_room_bytes
from shardwright.planner.search.results import SimulatedPlan
from shardwright.planner.search.search import search
from shardwright.simulate.full_step import simulated_step

DEVICES = ("h100-sxm", "a100-sxm-40g", "a100-sxm-80g", "v100-sxm-32g", "h200-sxm", "rtx-4090", "l40s")
SOFTWARE = (
    "shardwright",
    "shardwright",
    "megatron-core",
    "megatron-2022",
    "megatron-deepspeed",
    "llama3",
    "deepspeed-2025",
)
SHOWN = 4
_ROUNDING = 1e-5  # of a step: what is faster by less is not looked for


@dataclass(frozen=True)
class Drawn:
    """Fields of a job without a plan, the fields of its device, and what is kept."""

    fields: dict[str, Any]
    device: dict[str, Any]
    keep: dict[str, Any]

    def job(self, folder: Path) -> JobSpec:
        """The job, with its device in a file of the folder, and software of its own in another."""
        cluster = self.fields["cluster"] | {"device": _written(self.device, folder)}
        if isinstance(cluster["software"], dict):
            cluster["software"] = _written(cluster["software"], folder)
        return job_to_plan(self.fields | {"cluster": cluster}, "a drawn job")


def _written(entry: dict[str, Any], folder: Path) -> str:
    text = toml_text(entry)
    file = folder / f"{abs(hash(text)):x}.toml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def drawn(seed: int, number: int) -> Drawn:
    """A draw, which is a function of seed and number."""
    rng = random.Random(f"searches {seed} {number}")
    heads = rng.choice([16, 32, 40])
    layers = rng.choice([6, 13, 24, 32, 48])
    hidden = heads * rng.choice([64, 128])
    model: dict[str, Any] = {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": rng.choice([4, 8]),
        "ffn": 256 * rng.randint(hidden // 128, hidden // 64), "vocab": rng.choice([32000, 50304, 128256, 151936]),
        "sequence": rng.choice([2048, 4096, 8192]),
    }  # fmt: skip
    if rng.random() < 0.3:
        model["moe"] = {"experts": rng.choice([8, 16]), "ffn": 256 * rng.randint(2, 12)}
    device = dict(catalog.read("devices", rng.choice(DEVICES)))
    device["memory_gib"] = round(device["memory_gib"] * rng.uniform(0.5, 1.3), 2)
    for name in ("aliases", "cuda_names"):
        device.pop(name, None)
    nodes = rng.choice([1, 2, 4])
    links = {
        "intra_node": {"bandwidth_gb_per_s": rng.choice([30.0, 150.0, 450.0])},
        "inter_node": {"bandwidth_gb_per_s": rng.choice([3.0, 25.0, 50.0])},
    }
    cluster = {"name": "drawn", "devices_per_node": rng.choice([4, 8]), "nodes": nodes} | links
    fields = {
        "model": model, "cluster": cluster | {"software": rng.choice(SOFTWARE)},
        "batch": {"global_batch_size": rng.choice([16, 64, 96, 256])},
        "precision": {"compute": "bf16" if "bfloat16" in device["peak_tflops"] else "fp16"},
    }  # fmt: skip
    keep = rng.choice([{}, {}, {}, {"tp": 2}, {"pp": 2}, {"zero": 1}, {"schedule": "1f1b"}, {"recompute": "none"}])
    return Drawn(fields, device, keep)


# Numbers of software, as bytes by element or launches; and those of its fields that say what it is, or what it can.
_AMOUNTS = (0.0, 1.0, 2.0, 4.0, 14.0, 60.0)
_NOT_DRAWN = {
    "is_own",
    "is_usual",
    "compiled",
    "sequence_parallel",
    "context_parallel",
    "hybrid_sharding",
    "uneven_stages",
}


def with_own_software(given: Drawn, rng: random.Random) -> Drawn:
    """The same under software like its own, some of whose fields have other values. Fields are read from what describes
    software, so that one that is added is drawn, too."""
    base = given.fields["cluster"]["software"]
    like = base if base != "shardwright" else "fsdp-2024"
    fields = own_fields(SoftwareSpec, rng, rng.choice([1, 2, 5]))
    if rng.random() < 0.3:
        fields["zero"] = own_fields(ZeroFactsSpec, rng, 2)
    software = {"source": "drawn", "like": like} | fields
    cluster = given.fields["cluster"] | {"software": software}
    model = given.fields["model"] | ({"vocab": 50257} if rng.random() < 0.3 else {})
    return Drawn(given.fields | {"cluster": cluster, "model": model}, given.device, given.keep)


def own_fields(spec: type[Spec], rng: random.Random, count: int) -> dict[str, Any]:
    """So many fields that are amounts, pairs of these, or may be true or one of a few."""
    values = {
        name: value for name, field in spec.model_fields.items() if (value := _value(field.annotation, rng)) is not None
    }
    return {name: values[name] for name in rng.sample(sorted(values.keys() - _NOT_DRAWN), count)}


def _value(kind: Any, rng: random.Random) -> Any:
    kinds = get_args(kind)
    if kind is bool:
        return rng.choice([True, False])
    if kind is int:
        return rng.choice([1, 2])
    if kind is float:
        return rng.choice(_AMOUNTS)
    if get_origin(kind) is Literal:
        return rng.choice(kinds)
    if get_origin(kind) is tuple and len(kinds) == 2 and all(get_args(each)[:1] == (float,) for each in kinds):
        return [rng.choice(_AMOUNTS), rng.choice(_AMOUNTS)]
    return None


def answer(given: Drawn, folder: Path, keep: dict[str, Any] | None = None) -> list[SimulatedPlan] | None:
    """The plans that are found; None where nothing is legal."""
    try:
        job = given.job(folder)
        return search(job, Constraints(given.keep if keep is None else keep), shipped(), SHOWN).candidates
    except PlanError:
        return None


def step_s(plans: list[SimulatedPlan] | None) -> float:
    """Seconds of a step under the first plan; endless where there is none."""
    return float(plans[0].time.total) if plans else float("inf")


def more_memory(given: Drawn, factor: float) -> Drawn:
    """The same with more memory of a device."""
    device = given.device | {"memory_gib": round(given.device["memory_gib"] * factor, 3)}
    return Drawn(given.fields, device, given.keep)


def faster_device(given: Drawn, factor: float) -> Drawn:
    """The same with devices that compute faster."""
    peaks = {name: rate * factor for name, rate in given.device["peak_tflops"].items()}
    return Drawn(given.fields, given.device | {"peak_tflops": peaks}, given.keep)


def faster_memory(given: Drawn, factor: float) -> Drawn:
    """The same with a higher bandwidth of the devices' memory."""
    device = given.device | {"memory_gb_per_s": given.device["memory_gb_per_s"] * factor}
    return Drawn(given.fields, device, given.keep)


def _faster_links(name: str) -> Callable[[Drawn, float], Drawn]:
    def faster(given: Drawn, factor: float) -> Drawn:
        cluster = given.fields["cluster"]
        links = cluster[name] | {"bandwidth_gb_per_s": cluster[name]["bandwidth_gb_per_s"] * factor}
        return Drawn(given.fields | {"cluster": cluster | {name: links}}, given.device, given.keep)

    return faster


MORE: dict[str, Callable[[Drawn, float], Drawn]] = {
    "memory": more_memory, "rate": faster_device, "bandwidth of memory": faster_memory,
    "links of a node": _faster_links("intra_node"), "network": _faster_links("inter_node"),
}  # fmt: skip


def faults_of(seed: int, number: int, folder: Path) -> tuple[str, list[str]]:
    """(what was compared, what is wrong with it) of one draw; empty where it has no plans."""
    rng = random.Random(f"relations {seed} {number}")
    given = drawn(seed, number)
    if number % 3 == 0:
        given = with_own_software(given, rng)
    plans = answer(given, folder)
    name = rng.choice([*MORE, "memory", "keep", "beside"])
    if name in MORE:
        factor = rng.choice([1.003, 1.01, 1.05, 1.2, 1.5])
        before, after = step_s(plans), step_s(answer(MORE[name](given, factor), folder))
        slower = [f"{factor:g} times the {name}: {before:.6f} s became {after:.6f} s"]
        return ("" if before == float("inf") else name), (slower if after > before * (1 + _ROUNDING) else [])
    if not plans:
        return "", []
    if name == "keep":
        field = rng.choice(["tp", "pp", "zero", "microbatch_size", "schedule", "recompute"])
        words = {"schedule": ["zb-h1", "gpipe"], "recompute": ["full", "selective"]}
        return name, kept_faults(given, plans, folder, field, rng.choice(words.get(field, [0, 1, 2, 4])))
    return name, list(beside_faults(given, plans))


def kept_faults(given: Drawn, plans: list[SimulatedPlan], folder: Path, field: str, other: Any) -> list[str]:
    """The answer's own value of a field, kept, leaves the answer; another one makes it no faster."""
    own = given.keep | {field: getattr(plans[0].job.plan, field)}
    before, same = step_s(plans), step_s(answer(given, folder, own))
    faults = []
    if abs(same - before) > _ROUNDING * before:
        faults.append(f"keeping the answer's {field} {own[field]}: {before:.6f} s became {same:.6f} s")
    # A kept value is searched though the software lacks it, and is then no part of the space of a search without it.
    constraints, _ = within_known(given.job(folder), Constraints(given.keep))
    kept = given.keep | {field: other}
    if constraints.allows(field, other) and step_s(answer(given, folder, kept)) < before * (1 - _ROUNDING):
        faults.append(f"keeping {kept} makes it faster than {before:.6f} s")
    return faults


def beside_faults(given: Drawn, plans: list[SimulatedPlan]) -> list[str]:
    """Plans beside those of the list that are faster and fit."""
    results = []
    for plan in plans:
        job, plan_s = plan.job, float(plan.time.total)
        constraints, _ = within_known(job, Constraints(given.keep))
        schedules = tuple(name for name in searched() if constraints.allows("schedule", name))
        room = plan_room_bytes(job, fullest(job, shipped()))
        for near in neighbours(job, schedules):
            if any(getattr(near.job.plan, name) != getattr(job.plan, name) for name in ("tp", "pp", "cp", "ep")):
                continue  # of another kind, which has a line of its own
            values = near.job.plan.model_dump()
            if not all(constraints.allows(name, values[name]) for name in given.keep):
                continue
            near_s = float(simulated_step(near.job, shipped()).total)
            if near_s < plan_s * (1 - _ROUNDING) and fits(job, fullest(near.job, shipped()), room):
                results.append(f"{near.field} {near.value} takes {near_s:.6f} s, not {plan_s:.6f}: {job.plan}")
    return results


def main() -> int:
    """Compare so many draws. 1 if some do not agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    counts: dict[str, int] = {}
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.first, options.first + options.count):
            name, faults = faults_of(options.seed, number, Path(folder))
            print(f"{number}: {name or 'no plans'}", file=sys.stderr, flush=True)
            counts[name or "without plans"] = counts.get(name or "without plans", 0) + 1
            for fault in faults:
                wrong += 1
                print(f"--seed {options.seed} --first {number} --count 1: {fault}", flush=True)
    message = ", ".join(f"{count} of {name}" for name, count in sorted(counts.items()))
    print(f"{options.count} searches, {wrong} that do not agree ({message})")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
