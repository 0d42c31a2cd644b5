"""The type of numbers in which a program over transformers' Trainer loads the weights that it trains.

Without an engine the optimizer changes the weights as they are loaded: in bfloat16 there is no copy in float32, and
gradients and AdamW's moments, which torch makes like the weights, have 16 bits too. DeepSpeed keeps its own copy in
float32, and Accelerate turns weights to float32 before FSDP shards them if it is of a release that does, so nothing is
read there.
"""

from shardwright.config.checks.check_precision import MOST_BETA
from shardwright.config.phrase import say
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.rows import Rule

_OPTIONS = ("--torch_dtype", "--dtype")
_BF16 = ("bfloat16", "bf16", "torch.bfloat16")
_LIKE_WEIGHTS = ("adamw", "adam")  # optimizers whose moments torch makes like the weights
_WITHOUT_ENGINE = ("NO", "MULTI_GPU")


def _read(settings: Settings, fields: Flat) -> None:
    """Read that all weights are loaded and trained in bfloat16."""
    kind = settings.text("distributed_type", "NO").upper()
    if kind == "DEEPSPEED":  # whose configuration says the numbers of all copies
        settings.ignore(*_OPTIONS)
    is_narrow = any(str(settings.given.get(name)).lower() in _BF16 for name in _OPTIONS)
    if kind not in _WITHOUT_ENGINE or not is_narrow or "model.adapter.rank" in fields:
        return
    if fields.get("precision.compute") not in ("bf16", "float32") or fields.get("precision.float8"):
        return
    setting = settings.setting_text(next(name for name in _OPTIONS if settings.has(name)))
    settings.ignore(*_OPTIONS)
    settings.note(
        say("{setting}: all weights are bfloat16, without a copy (--set precision.master=float32)", setting=setting)
    )
    fields |= {"precision.compute": "bf16", "precision.master": "none", "precision.gradients": "compute"}
    if fields.get("optimizer.name") not in _LIKE_WEIGHTS:
        return
    if fields["optimizer.beta2"] <= MOST_BETA:
        fields["precision.moments"] = "bf16"
    else:
        settings.lost.append(
            say(
                "{setting}: moments of AdamW are bfloat16 there, where they stand still, and float32 here",
                setting=setting,
            )
        )


TYPE_OF_WEIGHTS = Rule(_OPTIONS, _read)
