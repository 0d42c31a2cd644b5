"""The checked job of a user's module: its plan, optimizer and precision."""

from collections.abc import Mapping
from typing import Any

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.optimizer_facts import OPTIMIZERS
from shardwright.config.phrase import say
from shardwright.config.plain_values import GivenOptions
from shardwright.config.plan import PlanSpec
from shardwright.train.launch.rank_life import were_started

SUBJECT = "shard"
# Fields of a plan that apply to any module: how replicas share its state and reduce its gradients.
# Other fields need a model with known layers.
FIELDS = (
    "dp", "zero", "zero_ranks", "offload_optimizer", "offload_parameters", "bucket_mib", "compress", "compress_rank",
    "compress_share", "compress_least",
)  # fmt: skip
_CUTS = {"tp": "matrices", "pp": "layers", "cp": "sequences", "ep": "experts"}

Fields = Mapping[str, Any]


def module_job(
    plan: "Fields | PlanSpec | None", optimizer: Fields | None, precision: Fields | None, world: int
) -> JobSpec:
    """A job with this plan, optimizer and precision on `world` ranks. Its model is a placeholder. Raises PlanError with
    every fault.

    Without `steps` in `optimizer`, the learning rate is constant and has no warm-up.
    """
    options = GivenOptions()
    if isinstance(plan, PlanSpec):
        plan = plan.model_dump(exclude_defaults=True)
    plan_fields = options.fields("plan", plan, '{"zero": 3}')
    optimizer_fields = options.fields("optimizer", optimizer, '{"learning_rate": 1e-3}')
    precision_fields = options.fields("precision", precision, '{"compute": "bf16"}')
    options.check(SUBJECT)
    used_fields, faults = _used_fields(plan_fields)
    faults += _unfit(optimizer_fields.get("name", "adamw"), precision_fields)
    dp = used_fields.setdefault("dp", world)
    default_rate = {"schedule": "constant", "warmup_steps": 0} if "steps" not in optimizer_fields else {}
    job_fields = {
        "plan": used_fields,
        "optimizer": default_rate | optimizer_fields,
        "precision": precision_fields,
        "batch": {"global_batch_size": dp if isinstance(dp, int) and dp > 0 else 1},
    }
    try:
        job = make_job(job_fields, SUBJECT)
    except PlanError as error:
        raise PlanError(SUBJECT, faults + error.faults) from None
    if job.plan.world != world:
        faults.append(
            say(
                "plan.dp is {dp}, and {started}; leave plan.dp out, or start {dp} with torchrun",
                dp=job.plan.dp,
                started=were_started(world),
            )
        )
    if faults:
        raise PlanError(SUBJECT, faults)
    return job


def _used_fields(plan: Fields) -> tuple[dict[str, Any], list[str]]:
    """The fields of a plan that apply to any module, and the faults of the others, which must have their defaults."""
    faults: list[str] = [
        say(
            "plan.{axis} {value} cuts the {parts} of a model, and those of a module of your own are not known; use "
            "data parallel and ZeRO: plan.{axis} = 1",
            axis=axis,
            value=plan[axis],
            parts=parts,
        )
        for axis, parts in _CUTS.items()
        if plan.get(axis, 1) != 1
    ]
    default = PlanSpec().model_dump()
    unused = [name for name in plan if name in default and name not in (*FIELDS, *_CUTS)]
    faults += [
        say(
            "plan.{name} is {value}, and says nothing of a module of your own; leave it out",
            name=name,
            value=repr(plan[name]),
        )
        for name in unused
        if plan[name] != default[name]
    ]
    return {name: value for name, value in plan.items() if name not in (*_CUTS, *unused)}, faults


def _unfit(optimizer: Any, precision: Fields) -> list[str]:
    """Faults of an optimizer's name and of precision fields that work for Shardwright's own models alone."""
    faults = list[str]()
    # Optimizers that update matrices must know which parameters are matrices.
    fitting = [facts.name for facts in OPTIMIZERS.values() if facts.matrix_update == "none"]
    if optimizer in OPTIMIZERS and optimizer not in fitting:
        faults.append(
            say(
                "optimizer.name {optimizer} updates whole matrices, and which those of a module of your own are is "
                "not known; use {fitting}",
                optimizer=repr(optimizer),
                fitting=tuple(fitting),
            )
        )
    if precision.get("compute") == "fp16":
        faults.append(say("precision.compute 'fp16' needs a scaled loss; use 'bf16', which needs none, or 'float32'"))
    if (float8 := precision.get("float8", "none")) != "none":
        faults.append(say("precision.float8 {float8} is of our linear layers; leave it out", float8=repr(float8)))
    return faults
