"""The beginning of a run: what one on several machines must state, checkpoints that nobody asked for, the cost."""

import glob
import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.config.base import PlanError
from shardwright.config.checkpoint import USUAL_EVERY_S
from shardwright.config.data import STDLIB
from shardwright.config.job import STATED, JobSpec
from shardwright.config.phrase import each, say
from shardwright.config.units import counted_phrase, seconds_text
from shardwright.interchange.run_places import is_address

if TYPE_CHECKING:
    from shardwright.planner.own_plan import Estimate

_LONG_S = 3600.0  # a run that takes longer writes checkpoints, if the job does not say otherwise
_LONG_STEPS = 10_000  # of a run whose first steps at the full learning rate are too early
_NUM_BYTES = 256


def refuse_unstated(job: JobSpec, num_nodes: int, or_long: bool = False) -> None:
    """Raise PlanError if a run on several nodes leaves its data, learning rate or checkpoints to defaults, which are
    made for a first try on one machine. With `or_long` also if it is predicted to take more than an hour on one."""
    if num_nodes == 1 and not (or_long and _run_s(job) > _LONG_S):
        return
    is_stated = {section: _states(job, section) for section in STATED}
    faults = list[str]()
    if not is_stated["data"]:
        faults.append(
            say(
                "data.path is not stated, and the default trains on {path}; --set data.path=PATH names your text or "
                "tokens, and --set data.path={path} takes the default",
                path=job.data.path,
            )
        )
    if not is_stated["optimizer"]:
        faults.append(
            say(
                "optimizer.learning_rate is not stated, and the default is {learning_rate:g}; large models usually "
                "take 3e-4 to 6e-5, less the larger they are: --set optimizer.learning_rate=1e-4",
                learning_rate=job.optimizer.learning_rate,
            )
        )
    if not is_stated["checkpoint"] and num_nodes == 1:
        faults.append(
            say(
                "checkpoint.every_s is not stated, so a failure would lose all; usual is --set "
                "checkpoint.every_s={every_s:g}, and --set checkpoint.every_steps=0 writes none",
                every_s=USUAL_EVERY_S,
            )
        )
    elif not is_stated["checkpoint"]:
        faults.append(
            say(
                "checkpoint.every_s is not stated, so a failure of one of {num_nodes:,} nodes would lose all; usual "
                "is --set checkpoint.every_s={every_s:g}, and --set checkpoint.every_steps=0 writes none",
                num_nodes=num_nodes,
                every_s=USUAL_EVERY_S,
            )
        )
    if faults:
        raise PlanError(say("job {name} on {nodes}", name=job.name, nodes=counted_phrase(num_nodes, "node")), faults)


def regretted_defaults(job: JobSpec) -> list[str]:
    """Sentences on defaults of a first try that a long run or a large model would regret, and that may be meant."""
    return [*_text_as_bytes(job), *regretted_warmup(job)]


def _text_as_bytes(job: JobSpec) -> list[str]:
    """A sentence on text that a large model would read as bytes, unless its data are tokens."""
    is_stated = "tokenizer" in job.data.model_fields_set or bool(job.model.weights)
    if is_stated or job.model.vocab <= 2 * _NUM_BYTES:
        return []
    return [
        say(
            "data.tokenizer is not stated, so text would be read as bytes, {num_bytes} of the model's {vocab:,} "
            "tokens; set data.tokenizer to a tokenizer's folder, unless data.path has tokens",
            num_bytes=_NUM_BYTES,
            vocab=job.model.vocab,
        )
    ]


def regretted_warmup(job: JobSpec) -> list[str]:
    """A sentence on a warm-up of a few steps, where a long run does not state its own."""
    optimizer = job.optimizer
    if "warmup_steps" in optimizer.model_fields_set or optimizer.steps < _LONG_STEPS:
        return []
    return [
        say(
            "optimizer.warmup_steps is not stated, so the learning rate rises within {warmup_steps} of {steps:,} "
            "steps; large models usually take 2,000: set optimizer.warmup_steps",
            warmup_steps=optimizer.warmup_steps,
            steps=optimizer.steps,
        )
    ]


_SUFFIXES = ("", ".bin", ".idx")  # of what a path names: itself, or tokens of Megatron by their prefix


def unseen_paths(job: JobSpec, folder: Path) -> list[str]:
    """A sentence on each path of a job that names nothing on this machine, as seen from a folder: the ranks look for it
    on theirs. Addresses are not looked for."""
    named = [("data.path", data.path) for data in (*job.data.each, *job.data.each_validation) if data.path != STDLIB]
    named += [("data.tokenizer", job.data.tokenizer)] if job.data.tokenizer != "bytes" else []
    named += [("model.weights", job.model.weights)] if job.model.weights else []
    return [
        say(
            "{field} is {path}, which names nothing on this machine; the ranks look for it on theirs",
            field=field,
            path=path,
        )
        for field, path in dict.fromkeys(named)
        if not is_address(path) and not _is_there(str(folder / os.path.expanduser(path)))
    ]


def _is_there(path: str) -> bool:
    """True if a path, or a pattern of paths, names something."""
    return any(os.path.exists(path + suffix) for suffix in _SUFFIXES) or next(glob.iglob(path), None) is not None


def _states(job: JobSpec, section: str) -> bool:
    """True if a job states one of the section's fields that a run on several machines must state."""
    return bool(getattr(job, section).model_fields_set.intersection(STATED[section]))


def with_checkpoints(job: JobSpec) -> JobSpec:
    """The job with checkpoints if it is predicted to train for more than an hour and does not say when to write
    them."""
    if _states(job, "checkpoint") or _run_s(job) <= _LONG_S:
        return job
    return job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"every_s": USUAL_EVERY_S})})


def cost_text(job: JobSpec) -> str:
    """A sentence on the predicted time and cost of a run, for its start; empty if the device is not known."""
    estimate = _predicted(job)
    if estimate is None:
        return ""
    from shardwright.config.units import number_text
    from shardwright.cost.money import price_words
    from shardwright.report.plans_text import usd_text

    money = estimate.cost_of_steps(estimate.num_steps_of_run)
    cost = say("{hours} device-hours", hours=number_text(float(money.device_hours)))
    if money.usd is not None:
        cost = say("{hours} and {usd}, {price}", hours=cost, usd=usd_text(money.usd), price=price_words(job.cluster))
    told = say(
        "predicted: {steps} of {step} take {run}, {cost}",
        steps=counted_phrase(job.optimizer.steps, "step"),
        step=seconds_text(float(estimate.step.total)),
        run=seconds_text(_run_s(job)),
        cost=cost,
    )
    if not job.checkpoint.every_s:
        return told
    return each([told, say("a checkpoint every {interval}", interval=seconds_text(job.checkpoint.every_s))])


def _predicted(job: JobSpec) -> "Estimate | None":
    """The prediction of a job; None if its device is not known, or its price needs a number that is not."""
    if job.cluster.device == "unknown":
        return None
    from shardwright.planner.own_plan import estimate

    try:
        return estimate(job)
    except (KeyError, ValueError):
        return None


def _run_s(job: JobSpec) -> float:
    """The predicted seconds of a run; 0 if unknown."""
    estimate = _predicted(job)
    return 0.0 if estimate is None else float(estimate.num_steps_of_run * estimate.effective_step_s)
