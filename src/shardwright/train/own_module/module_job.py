"""The checked job of a module of the user's own: the plan, the optimizer and the numbers, as a job has them."""

from collections.abc import Mapping
from typing import Any

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.optimizer_facts import OPTIMIZERS
from shardwright.config.plain_values import GivenOptions
from shardwright.config.plan import PlanSpec
from shardwright.config.units import counted

SUBJECT = "shard"
# Fields of a plan that say how replicas share a model's state. All others cut a model whose insides are known.
FIELDS = (
    "dp", "zero", "zero_ranks", "offload_optimizer", "offload_parameters", "bucket_mib", "compress", "compress_rank",
    "compress_share", "compress_least",
)  # fmt: skip
_CUTS = {"tp": "matrices", "pp": "layers", "cp": "sequences", "ep": "experts"}

Asked = Mapping[str, Any]


def module_job(
    plan: "Asked | PlanSpec | None", optimizer: Asked | None, precision: Asked | None, world: int
) -> JobSpec:
    """A job with what is asked for; its model stands for none. Raises PlanError with every fault.

    The learning rate is constant and without warm-up where `optimizer` does not say another schedule.
    """
    given = GivenOptions()
    if isinstance(plan, PlanSpec):
        plan = plan.model_dump(exclude_defaults=True)
    fields = given.fields("plan", plan, '{"zero": 3}')
    rated = given.fields("optimizer", optimizer, '{"learning_rate": 1e-3}')
    numbers = given.fields("precision", precision, '{"compute": "bf16"}')
    given.check(SUBJECT)
    faults = [
        f"plan.{axis} {fields[axis]} cuts the {what} of a model, and those of a module of your own are not known; use "
        f"data parallel and ZeRO: plan.{axis} = 1"
        for axis, what in _CUTS.items()
        if fields.get(axis, 1) != 1
    ]
    default = PlanSpec().model_dump()
    others = [name for name in fields if name in default and name not in (*FIELDS, *_CUTS)]
    faults += [
        f"plan.{name} is {fields[name]!r}, and says nothing of a module of your own; leave it out"
        for name in others
        if fields[name] != default[name]
    ]
    faults += _unfit(rated.get("name", "adamw"), numbers)
    kept = {name: value for name, value in fields.items() if name not in (*_CUTS, *others)}
    dp = kept.setdefault("dp", world)
    rates = {"schedule": "constant", "warmup_steps": 0} if "steps" not in rated else {}
    whole = {
        "plan": kept, "optimizer": rates | rated, "precision": numbers,
        "batch": {"global_batch_size": dp if isinstance(dp, int) and dp > 0 else 1},
    }  # fmt: skip
    try:
        job = make_job(whole, SUBJECT)
    except PlanError as error:
        raise PlanError(SUBJECT, faults + error.faults) from None
    if job.plan.world != world:
        were = f"{counted(world, 'rank')} {'was' if world == 1 else 'were'} started"
        faults.append(f"plan.dp is {job.plan.dp}, and {were}; leave plan.dp out, or start {job.plan.dp} with torchrun")
    if faults:
        raise PlanError(SUBJECT, faults)
    return job


def _unfit(optimizer: Any, precision: Asked) -> list[str]:
    """Fields of an optimizer and of numbers that are for our own models alone."""
    faults = []
    # Those that look at matrices have to know which these are.
    fitting = [facts.name for facts in OPTIMIZERS.values() if facts.matrix_update == "none"]
    if optimizer in OPTIMIZERS and optimizer not in fitting:
        faults.append(
            f"optimizer.name {optimizer!r} updates whole matrices, and which those of a module of your own are is not "
            f"known; use {', '.join(fitting)}"
        )
    if precision.get("compute") == "fp16":
        faults.append("precision.compute 'fp16' needs a scaled loss; use 'bf16', which needs none, or 'float32'")
    if (float8 := precision.get("float8", "none")) != "none":
        faults.append(f"precision.float8 {float8!r} is of our linear layers; leave it out")
    return faults
