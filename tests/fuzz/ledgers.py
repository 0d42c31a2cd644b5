"""A rank's ledger against what was foretold of it: by its account, and by its dry run."""

from collections.abc import Mapping

from shardwright.config.job import JobSpec
from shardwright.measure.memory_trace import MemoryTrace
from shardwright.memory.step_collectives import ledger_table, step_ledger
from shardwright.schedule.schedule import Program
from shardwright.train.dry_steps import DrySteps

Table = Mapping[str, Mapping[str, int]]


def account_of(job: JobSpec, program: Program, rank: int) -> Table:
    """The account of a rank that runs a program."""
    return ledger_table(step_ledger(job, program, rank))


def dry_ledger(job: JobSpec, rank: int, device: str) -> tuple[Table, Program]:
    """The ledger of a rank's dry run, and the program that it ran."""
    steps = DrySteps(job, rank, device)
    with MemoryTrace():  # under which operators are asked once for each set of shapes
        for _ in range(1 + (job.precision.float8 == "delayed")):  # whose scales come from the step before
            steps.run()
    return steps.mesh.ledger.table(), steps.program


def differences(one: Table, other: Table, not_bytes: frozenset[str] = frozenset()) -> list[str]:
    """Differences of two ledgers; of some entries only calls are compared."""
    results = []
    for name in sorted({*one, *other}):
        own, reference = (dict(table.get(name, {"count": 0, "bytes": 0})) for table in (one, other))
        if name in not_bytes:
            del own["bytes"], reference["bytes"]
        if own != reference:
            results.append(f"{name}: {own} and {reference}")
    return results


def told_by_values(job: JobSpec) -> frozenset[str]:
    """Entries whose bytes hang on what gates choose: rows to experts; where experts choose, how many have one token."""
    if not job.model.moe.experts:
        return frozenset()
    by_choice = {"all_to_all_v ep"}
    if job.precision.float8 == "rowwise" and job.plan.expert_tp_size > 1:
        by_choice |= {"all_reduce tp"}  # a scale for each row
    if job.model.moe.gate == "expert-choice" and job.plan.expert_tp_size > 1:
        by_choice |= {f"{kind} tp" for kind in ("all_gather", "reduce_scatter", "all_reduce")}
    return frozenset(by_choice)


def _has_gradients_of_nothing(job: JobSpec) -> bool:
    """A module of further tokens with one target a sample, whose token sees no key but its own: queries and keys have
    gradients of zero, from which no scale follows, so that each step looks for one anew."""
    model = job.model
    return job.precision.float8 == "delayed" and model.mtp_layers > 0 and model.sequence <= 1 + model.mtp_layers


def foretold_otherwise(job: JobSpec, program: Program, ledgers: list[Table]) -> list[str]:
    """Differences of ranks' traffic from their accounts and, where a step stands by itself, from their dry runs."""
    results = []
    for rank, table in enumerate(ledgers):
        foretold = {"account": account_of(job, program, rank)}
        if program.weights == "current":
            foretold["dry run"] = dry_ledger(job, rank, "cpu")[0]
        for who, other in foretold.items():
            results += [
                f"rank {rank}, {who}: {what}"
                for what in differences(other, table, told_by_values(job))
                if not (what.startswith("all_reduce tp: ") and _has_gradients_of_nothing(job))
            ]
    return results
