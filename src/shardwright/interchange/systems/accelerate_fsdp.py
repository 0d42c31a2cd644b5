"""FSDP as Accelerate's configuration and transformers' options --fsdp and --fsdp_config say it."""

import json
from typing import Any

from shardwright.config import largest
from shardwright.config.base import shortened
from shardwright.config.phrase import say
from shardwright.interchange.reading.setting_notes import none_of
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.systems.accelerate_launcher import FSDP
from shardwright.interchange.systems.training_arguments import SHARD_SIZES

# FSDP strategies in the order of their numbers, which begin at 1 -> (ZeRO stage, each machine has a full copy).
STRATEGIES = {
    "FULL_SHARD": (3, False),
    "SHARD_GRAD_OP": (2, False),
    "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True),
    "HYBRID_SHARD_ZERO2": (2, True),
}
# Keys of the file that --fsdp_config names.
FILE_KEYS = (
    "reshard_after_forward", "fsdp_reshard_after_forward", "activation_checkpointing", "auto_wrap_policy",
    "transformer_layer_cls_to_wrap", "fsdp_transformer_layer_cls_to_wrap", "min_num_params", "version",
    "backward_prefetch", "fsdp_backward_prefetch", "forward_prefetch", "fsdp_forward_prefetch", "cpu_offload",
    "use_orig_params", "fsdp_use_orig_params", "state_dict_type", "limit_all_gathers", "xla",
    "cpu_ram_efficient_loading", "sync_module_states",
)  # fmt: skip


def put_fsdp_options(settings: Settings) -> None:
    """Put the program's options --fsdp and --fsdp_config under Accelerate's names for them."""
    words = [word.strip("'\"") for word in settings.words("--fsdp")]
    if not words and settings.given.get("--fsdp") is not True:
        return
    settings.given["distributed_type"] = "FSDP"
    options: dict[str, Any] = {}
    for word in words:
        if word.upper() in STRATEGIES:
            options["sharding_strategy"] = word
        elif word == "offload":
            options["offload_params"] = True
        elif word.lower() not in ("auto_wrap", "true"):
            settings.faults.append(none_of(f"--fsdp {shortened(word)}", map(str.lower, STRATEGIES)))
    text = settings.text("--fsdp_config")
    try:
        file_options = json.loads(text) if text.lstrip().startswith("{") else {}
    except (ValueError, RecursionError):
        expected = say("JSON, or the name of a file of it")
        settings.faults.append(settings.fault_text("--fsdp_config", text, expected))
        file_options = {}
    file_options |= {name: settings.given.pop(name) for name in FILE_KEYS if name in settings.given}
    options |= {str(name).removeprefix("fsdp_"): value for name, value in file_options.items()}
    settings.spelled = dict(settings.spelled) | {
        FSDP + str(name).removeprefix("fsdp_"): f"fsdp_config.{name}" for name in file_options
    }
    names = {"cpu_offload": "offload_params", "fsdp_version": "version"}
    settings.given |= {FSDP + names.get(name, name): value for name, value in options.items()}


def shard_sizes(settings: Settings, fields: Flat) -> tuple[int, int]:
    """The ranks that FSDP cuts the model over, 0 if nothing says how many, and the copies of what it cuts. A fault
    where they are not the ranks with samples of their own: Accelerate stops there. Source: its ParallelismConfig, and
    axolotl's settings of the same names."""
    num_shards, num_copies = settings.count(SHARD_SIZES[0], 0), settings.count(SHARD_SIZES[1], 1, largest.RANKS, 1)
    wanted, dp = num_shards * num_copies, fields["plan.dp"]
    if num_shards > 1 and wanted != dp:
        settings.faults.append(
            say(
                "{setting} x {copies} copies is {wanted} ranks, and {dp} ranks have samples of their own; say "
                "--devices {devices}, or change one of them",
                setting=settings.setting_text(SHARD_SIZES[0]),
                copies=num_copies,
                wanted=wanted,
                dp=dp,
                devices=wanted * fields["plan.tp"] * fields["plan.cp"],
            )
        )
    elif dp % num_copies:
        settings.faults.append(
            say(
                "{setting} does not divide {dp}, the ranks with samples of their own ({dp} / {copies} = "
                "{quotient:.2f}); say another number, or other --devices",
                setting=settings.setting_text(SHARD_SIZES[1]),
                copies=num_copies,
                dp=dp,
                quotient=dp / num_copies,
            )
        )
    return num_shards, num_copies
