"""The plan of each job of the catalog under this runtime and under its published run's software: memory and seconds.

    .venv/bin/python benchmarks/beside_software.py     # a minute or two; no ranks, predictions alone
    .venv/bin/python benchmarks/beside_software.py --best

Memory is that of the fullest process of each, without the libraries of the process, and which kinds make the
difference. The step is as `estimate` prices it. A job's comment names its software. `--best` searches the best plan
under each in place of the job's own, with the features that each software has.
"""

import argparse
import re
from pathlib import Path

import shardwright
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import load_job
from shardwright.config.software import software_of
from shardwright.config.software_support import missing_features
from shardwright.config.units import seconds_text
from shardwright.cost.calibration import shipped
from shardwright.memory.job_memories import fullest
from shardwright.planner.advice.recommendation import plans_of
from shardwright.planner.search.constraints import Constraints
from shardwright.report.plans_text import plan_words
from shardwright.simulate.full_step import simulated_step

JOBS = Path(shardwright.__file__).parent / "config/catalog/jobs"
GIB = 2**30
LEAST_SHARE = 0.01  # of memory, of a kind that is named
KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "working")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--best", action="store_true", help="compare the best plans")
    if parser.parse_args().best:
        _print_best()
        return
    header = ["job", "its software", "memory, GiB, ours / its", "ratio", "GiB more with ours"]
    header += ["step, ours / its", "ratio"]
    print("| " + " | ".join(header) + " |\n|" + " --- |" * len(header))
    for file in sorted(JOBS.glob("*.toml")):
        named = re.search(r"`--as ([\w-]+)` predicts", file.read_text())
        if named is not None:
            print("| " + " | ".join(_row(load_job(file.stem), named[1])) + " |", flush=True)


def _print_best() -> None:
    """A row for each job: the best plan under this runtime beside the best under each other software."""
    print("| job | ours | its software | best, ours / its | ratio | its best plan |\n|" + " --- |" * 6)
    for file in sorted(JOBS.glob("*.toml")):
        named = re.search(r"`--as ([\w-]+)` predicts", file.read_text())
        if named is not None:
            job = load_job(file.stem)
            (own, our_plan), (its, its_plan) = (_best(job, name) for name in (job.cluster.software, named[1]))
            cells = [job.name, our_plan, named[1], f"{seconds_text(own)} / {seconds_text(its)}", f"{own / its:.3f}"]
            print("| " + " | ".join([*cells, its_plan]) + " |", flush=True)


def _best(job: JobSpec, software: str) -> tuple[float, str]:
    """Seconds of a step under the fastest plan that a software has, and that plan."""
    job = _under(job, software)
    try:
        constraints = Constraints().as_software(software_of(software))
    except PlanError:  # its entry does not say what it has
        constraints = Constraints()
    plans = plans_of(job, constraints, shipped(), num_shown=1).plans
    if not plans:
        return float("nan"), "none fits"
    best = min(plans, key=lambda plan: float(plan.time.total) / plan.job.tokens_per_step)
    return float(best.time.total) * job.tokens_per_step / best.job.tokens_per_step, plan_words(best.job.plan)


def _row(job: JobSpec, name: str) -> list[str]:
    own, other = (_under(job, software) for software in (job.cluster.software, name))
    (result, our_step), (its, its_step) = (
        (fullest(of, shipped()), simulated_step(of, shipped())) for of in (own, other)
    )
    more = {kind: (float(getattr(result, kind)) - float(getattr(its, kind))) / GIB for kind in KINDS}
    least = LEAST_SHARE * float(its.total) / GIB
    named = ", ".join(f"{kind} {size:+.1f}" for kind, size in more.items() if abs(size) >= least)
    lacking = missing_features(software_of(name), job)
    return [
        job.name,
        name + (f" (lacks {', '.join(lacking)})" if lacking else ""),
        f"{result.total / GIB:.1f} / {its.total / GIB:.1f}",
        f"{result.total / its.total:.2f}",
        named,
        f"{seconds_text(our_step.total)} / {seconds_text(its_step.total)}",
        f"{our_step.total / its_step.total:.3f}",
    ]


def _under(job: JobSpec, software: str) -> JobSpec:
    return job.model_copy(update={"cluster": job.cluster.model_copy(update={"software": software})})


if __name__ == "__main__":
    main()
