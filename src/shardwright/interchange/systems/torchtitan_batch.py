"""torchtitan's settings for the batch, under the names of its releases up to 0.2 and, in tokens, of later ones."""

from typing import Any

from shardwright.config.base import shortened
from shardwright.config.fault_gathering_reader import whole
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.interchange.reading.setting_notes import wrong_value
from shardwright.interchange.reading.settings import Flat, Settings

_P = "parallelism."
LENGTHS = ("training.seq_len", "training.max_context_length")
_TOKENS = "training.num_tokens_per_microbatch_per_dp_rank"


def number_or_all(text: str, name: str, settings: Settings) -> int | None:
    """The number in a text; None for -1, which means all that is left."""
    number = whole(text)
    if number is None and text != "-1":
        settings.faults.append(wrong_value(f"{name} = {shortened(text)}", say("a whole number, or -1")))
    return number


def read_batch(settings: Settings, fields: Flat) -> None:
    """Read the microbatch size and the batch of a step."""
    dp, pp = fields["plan.dp"], fields["plan.pp"]
    if settings.has(_TOKENS, LENGTHS[1], "training.num_tokens_per_train_step"):
        _read_tokens(settings, fields)
        return
    local = settings.count(("training.local_batch_size", "training.batch_size"), 8)
    microbatches = settings.count("experimental.pipeline_parallel_microbatches", 0)
    microbatch_size = settings.count(_P + "pipeline_parallel_microbatch_size", 1)
    if pp > 1 and microbatches:
        microbatch_size = max(1, local // microbatches)
    elif pp > 1 and not settings.has(_P + "pipeline_parallel_microbatch_size"):
        settings.note(
            say(
                "a microbatch has 1 sample, as since 2025; code of 2024 made as many microbatches as there are stages "
                "(--set plan.microbatch_size=N)"
            )
        )
    if pp == 1:
        local = settings.overridden("plan.microbatch_size") or local
    fields["plan.microbatch_size"] = microbatch_size if pp > 1 else local
    given_size = number_or_all(
        settings.text("training.global_batch_size", "-1"), "training.global_batch_size", settings
    )
    num_accumulated = settings.count("training.gradient_accumulation_steps", 1, least=1)  # of forks of 2024
    size = local * dp * num_accumulated if given_size is None else given_size
    fields["batch.global_batch_size"] = size
    if pp > 1 and size > local * dp:
        settings.lost.append(
            say("the pipeline drains {count} times in a step there, and once here", count=size // max(1, local * dp))
        )


def _read_tokens(settings: Settings, fields: Flat) -> None:
    """Read the batch of releases since August 2026, which count it in tokens."""
    length = max(1, settings.count(LENGTHS, 2048))
    tokens = settings.count(_TOKENS, 16384, least=1)
    if tokens % length:
        settings.lost.append(
            say(
                "{setting} is no multiple of {length}, and microbatches are whole samples here",
                setting=settings.setting_text(_TOKENS),
                length=length,
            )
        )
    microbatch_size = max(1, tokens // length)
    num_microbatches = settings.count(_P + "num_pp_microbatches", 1, least=1) if fields["plan.pp"] > 1 else 1
    per_rank = microbatch_size * num_microbatches
    total = number_or_all(
        settings.text("training.num_tokens_per_train_step", "-1"), "training.num_tokens_per_train_step", settings
    )
    fields["plan.microbatch_size"] = microbatch_size
    fields["batch.global_batch_size"] = per_rank * fields["plan.dp"] if total is None else max(1, total // length)


def write_batch(job: JobSpec, settings: dict[str, Any]) -> None:
    """Write the batch of a rank and of a step, and the microbatch size of a pipeline."""
    plan, size = job.plan, job.batch.global_batch_size
    settings["training.local_batch_size"] = size // plan.dp if plan.pp > 1 else plan.microbatch_size
    settings["training.global_batch_size"] = size
    if plan.pp > 1:
        settings[_P + "pipeline_parallel_microbatch_size"] = plan.microbatch_size


def read_groups(settings: Settings, _: Flat) -> None:
    """Refuse an outer optimizer over groups of replicas, and tell that one of several groups is counted."""
    settings.ignore(*(name for name in settings.given if name.startswith("fault_tolerance.")))
    if not settings.flag("fault_tolerance.enable"):
        return
    if method := settings.text("fault_tolerance.semi_sync_method"):
        settings.faults.append(
            say(
                "{setting}: groups of replicas that average their weights now and then are not counted here; one group "
                "is, without it",
                setting=f"fault_tolerance.semi_sync_method = {shortened(method, 40)}",
            )
        )
        return
    settings.lose("fault_tolerance.enable", say("one group of replicas is counted, and groups add up gradients there"))
