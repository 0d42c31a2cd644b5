"""Options of transformers' TrainingArguments for layers that are computed again; release 5.23 has other names."""

import json
from typing import Any

from shardwright.config import largest
from shardwright.config.fault_gathering_reader import is_whole
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.interchange.reading.setting_notes import wrong_value
from shardwright.interchange.reading.settings import Flat, Settings

# The new name counts where both are said; the third is of peft's examples, and the rest of people's programs.
RECOMPUTES = (
    *("--activation_checkpointing", "--gradient_checkpointing", "--use_gradient_checkpointing"),
    *("--grad_checkpoint", "--grad_checkpointing", "--gradient_checkpoint", "--grad_ckpt", "--activation_checkpoint"),
    *("--enable_gradient_checkpointing", "--enable_activation_checkpointing", "--use_activation_checkpointing"),
)
_KEYWORDS = ("--activation_checkpointing_kwargs", "--gradient_checkpointing_kwargs")
_INERT = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop", "context_fn")


def keyword_options(settings: Settings, *names: str) -> dict[str, Any]:
    """The keys and values of the first setting that is there, written as a mapping or as JSON."""
    value = settings.raw(*names)
    try:
        options = json.loads(str(value)) if value is not None and not isinstance(value, dict) else value
    except (ValueError, RecursionError):
        name = next(name for name in names if settings.given.get(name) is not None)
        settings.faults.append(settings.fault_text(name, value, say("JSON")))
        options = None
    return options if isinstance(options, dict) else {}


def read_recompute(settings: Settings, fields: Flat) -> None:
    """Read which layers are computed again, and if their inputs wait on the host."""
    options = keyword_options(settings, *_KEYWORDS)
    if not settings.flag(RECOMPUTES):
        return
    offload = settings.text("--activation_offloading", "false").lower() not in ("false", "none")
    fields |= {"plan.recompute": "full", "plan.offload_activations": offload or options.get("offload") is True}
    every = options.get("every_n_layers", 1)
    if is_whole(every) and 1 <= every <= largest.LAYERS:
        fields["plan.recompute_every"] = every
    else:
        expected = say("a whole number of layers, at least 1")
        settings.faults.append(wrong_value(f"every_n_layers = {every}", expected))
    if unknown := sorted(map(str, options.keys() - {*_INERT, "offload", "every_n_layers"})):
        settings.lost.append(say("{names} of the options of checkpointing: not known here", names=tuple(unknown[:4])))


def write_recompute(job: JobSpec, settings: dict[str, Any]) -> None:
    """Write the option under the name that all releases have."""
    if job.plan.recompute == "full" and job.plan.recompute_every == 1:
        settings["--gradient_checkpointing"] = True
