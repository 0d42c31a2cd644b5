"""Megatron-LM's flags for experts and for multi-token prediction (MTP)."""

import re
from typing import Any

from shardwright.config.fault_gathering_reader import whole
from shardwright.config.job import JobSpec
from shardwright.config.moe import is_routed
from shardwright.config.phrase import say
from shardwright.interchange.reading.setting_notes import none_of
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.rows import Rule, Table, count, number, word

# Words of --moe-router-load-balancing-type -> (aux_loss, aux_scope).
_AUX = {
    "aux_loss": ("switch", "microbatch"),
    "seq_aux_loss": ("switch", "sequence"),
    "global_aux_loss": ("switch", "global"),
    "none": ("none", "microbatch"),
}
_DROPS = {"probs": "drop-probability", "position": "drop-position"}
_DISPATCHERS = {"alltoall": "direct", "allgather": "direct", "alltoall_seq": "direct", "flex": "node-aware"}


def _read_layers(settings: Settings, fields: Flat) -> None:
    """Read which layers have experts, as the rule (first_dense, every) of the model."""
    name = "moe-layer-freq" if settings.has("moe-layer-freq") else "expert-interval"
    text = settings.text(name, "1").replace(" ", "")
    layers = fields["model.layers"]
    # The interval of Megatron-DeepSpeed ends with a layer with experts, and NVIDIA's begins with one.
    pattern = _pattern(text, layers, int(name == "expert-interval"))
    if pattern is None:
        settings.faults.append(
            say("{setting} is neither a number nor a list such as ([0]*3+[1]*58)", setting=f"--{name} {text[:60]}")
        )
        return
    if len(pattern) != layers:
        settings.faults.append(
            say(
                "{setting} is for {count} layers, and there are {layers}",
                setting=f"--{name} {text[:60]}",
                count=len(pattern),
                layers=layers,
            )
        )
        return
    dense = pattern.index(True) if True in pattern else 0
    for every in range(1, layers + 1):
        for first in range(max(0, dense - every + 1), dense + 1):
            if all(is_routed(layer, first, every) == routed for layer, routed in enumerate(pattern)):
                fields |= {"model.moe.first_dense": first, "model.moe.every": every}
                return
        if every > 64:
            break
    settings.faults.append(
        say(
            "{setting}: layers with experts follow no rule of ours (first_dense, every)",
            setting=f"--{name} {text[:60]}",
        )
    )


def _pattern(text: str, layers: int, offset: int) -> list[bool] | None:
    """True for each layer with experts; None if the text says none. `offset` is added to the number of a layer."""
    if (period := whole(text)) is not None:
        every = max(1, period)
        return [(layer + offset) % every == 0 for layer in range(layers)]
    pattern: list[bool] = []
    for part in text.strip("()").split("+"):
        piece = re.fullmatch(r"\(?\[([01](?:,[01])*)\]\)?(?:\*([0-9]{1,4}))?", part)
        if not piece or len(pattern) > 1 << 16:
            return None
        pattern += [digit == "1" for digit in piece[1].split(",")] * int(piece[2] or 1)
    return pattern


def _write_layers(job: JobSpec, settings: dict[str, Any]) -> None:
    routed = [job.model.moe.has_experts(layer) for layer in range(job.model.layers)]
    if all(routed):
        return
    runs: list[tuple[int, int]] = []
    for kind in routed:
        runs = [*runs[:-1], (int(kind), runs[-1][1] + 1)] if runs and runs[-1][0] == kind else [*runs, (int(kind), 1)]
    settings["moe-layer-freq"] = "+".join(f"[{kind}]*{length}" for kind, length in runs)


def _read_router(settings: Settings, fields: Flat) -> None:
    score = settings.one_of("moe-router-score-function", {"softmax": "softmax", "sigmoid": "sigmoid"}, "softmax")
    top_k, softmax_first = fields["model.moe.top_k"], settings.flag("moe-router-pre-softmax")
    fields["model.moe.gate"] = score
    if settings.is_open("moe-router-topk", "topk"):
        settings.note(
            say(
                "nothing says how many experts a token has; {top_k} are taken, as since Megatron-LM of 2024, and "
                "earlier ones have 1 (--set model.moe.top_k=N)",
                top_k=top_k,
            )
        )
    if score == "softmax":
        fields |= {
            "model.moe.normalise": not softmax_first,
            "model.moe.softmax_over": "all" if softmax_first else "chosen",
        }
    else:
        fields["model.moe.normalise"] = top_k > 1
        rate = settings.number("moe-router-bias-update-rate", 1e-3)
        fields["model.moe.bias_update"] = rate if settings.flag("moe-router-enable-expert-bias") else 0.0
    settings.ignore("moe-router-bias-update-rate", "moe-router-enable-expert-bias")
    fields["model.moe.weigh"] = "input" if settings.flag("moe-apply-probs-on-input") else "output"
    groups, groups_kept = settings.count("moe-router-num-groups", 1), settings.count("moe-router-group-topk", 1)
    if groups > 1:
        chosen_per_group = top_k // max(1, groups_kept)
        fields |= {
            "model.moe.num_groups": groups,
            "model.moe.groups_kept": groups_kept,
            "model.moe.group_score": "max" if chosen_per_group == 1 else "top2",
        }
        if chosen_per_group not in (1, 2):
            settings.lost.append(
                say(
                    "groups of experts are compared by their {chosen_per_group} best there, and by 2 here",
                    chosen_per_group=chosen_per_group,
                )
            )


def _write_router(job: JobSpec, settings: dict[str, Any]) -> None:
    moe = job.model.moe
    settings |= {"moe-router-score-function": "sigmoid"} if moe.gate == "sigmoid" else {}
    if moe.gate != "sigmoid" and (not moe.normalise or moe.num_chosen == 1):
        settings["moe-router-pre-softmax"] = True
    if moe.gate == "sigmoid" and moe.bias_update:
        settings |= {"moe-router-enable-expert-bias": True, "moe-router-bias-update-rate": moe.bias_update}
        settings["moe-router-dtype"] = "fp32"
    settings |= {"moe-apply-probs-on-input": True} if moe.weigh == "input" else {}
    if moe.num_groups > 1 and moe.gate in ("softmax", "sigmoid"):
        settings |= {"moe-router-num-groups": moe.num_groups, "moe-router-group-topk": moe.groups_kept}


def _read_balance(settings: Settings, fields: Flat) -> None:
    words = settings.words("moe-router-load-balancing-type") or ["aux_loss"]
    weights = settings.words("moe-aux-loss-coeff") or ["0"]
    if len(words) > 1:
        settings.lost.append(
            say(
                "{setting}: one loss can be said here, the first",
                setting=settings.setting_text("moe-router-load-balancing-type"),
            )
        )
    if words[0] not in _AUX:
        settings.faults.append(none_of(f"--moe-router-load-balancing-type {words[0][:60]}", _AUX))
        return
    try:
        weight = float(weights[0])
    except ValueError:
        settings.faults.append(settings.fault_text("moe-aux-loss-coeff", weights, say("a number")))
        return
    if weight > 0 and _AUX[words[0]][0] != "none":
        fields |= dict(zip(("model.moe.aux_loss", "model.moe.aux_scope"), _AUX[words[0]], strict=True))
        fields["model.moe.aux_coefficient"] = weight


def _write_balance(job: JobSpec, settings: dict[str, Any]) -> None:
    moe = job.model.moe
    word = next((name for name, pair in _AUX.items() if pair == (moe.aux_loss, moe.aux_scope)), None)
    if word and moe.aux_loss != "none":
        settings |= {"moe-router-load-balancing-type": word, "moe-aux-loss-coeff": moe.aux_coefficient}
    elif moe.aux_loss == "none":
        settings["moe-router-load-balancing-type"] = "none"


def _read_shared(settings: Settings, fields: Flat) -> None:
    width = settings.count("moe-shared-expert-intermediate-size", 0)
    if width:
        fields |= {"model.moe.shared_experts": 1, "model.moe.shared_ffn": width}
        fields["model.moe.shared_gate"] = settings.flag("moe-shared-expert-gate")


def _write_shared(job: JobSpec, settings: dict[str, Any]) -> None:
    moe = job.model.moe
    if moe.shared_experts:
        settings["moe-shared-expert-intermediate-size"] = moe.shared_size(job.model.ffn_size)
        settings |= {"moe-shared-expert-gate": True} if moe.shared_gate else {}


def _read_capacity(settings: Settings, fields: Flat) -> None:
    factor = settings.number("moe-expert-capacity-factor", 0.0)
    policy = settings.one_of("moe-token-drop-policy", _DROPS, "probs")
    if factor > 0:
        fields |= {"model.moe.capacity_factor": factor, "model.moe.overflow": policy}


def _write_capacity(job: JobSpec, settings: dict[str, Any]) -> None:
    moe = job.model.moe
    if moe.capacity_factor and moe.gate != "expert-choice":
        settings["moe-expert-capacity-factor"] = moe.capacity_factor
        policy = next((word for word, overflow in _DROPS.items() if overflow == moe.overflow), "probs")
        settings["moe-token-drop-policy"] = policy


def _read_widths(settings: Settings, fields: Flat) -> None:
    width = settings.count("moe-ffn-hidden-size", 0)
    fields["model.moe.ffn"] = 0 if width == fields.get("model.ffn") else width


def _write_widths(job: JobSpec, settings: dict[str, Any]) -> None:
    settings["moe-ffn-hidden-size"] = job.model.moe.ffn_size(job.model.ffn_size)


def _read_unsupported(settings: Settings, fields: Flat) -> None:
    settings.lose("moe-latent-size", say("experts work on the whole width here"))
    settings.lose("moe-input-jitter-eps", say("inputs of the router are not jittered here"))
    if settings.text("moe-token-dispatcher-type") == "allgather":
        settings.lost.append(
            say("{setting}: tokens travel all-to-all here", setting="--moe-token-dispatcher-type allgather")
        )


# Settings that the rules read beside those in their names.
FURTHER = (
    "moe-router-pre-softmax",
    "moe-router-bias-update-rate",
    "moe-router-enable-expert-bias",
    "topk",
    "expert-interval",
    "moe-apply-probs-on-input",
    "moe-router-num-groups",
    "moe-router-group-topk",
    "moe-shared-expert-gate",
    "moe-token-drop-policy",
    "moe-latent-size",
    "moe-input-jitter-eps",
    "moe-router-dtype",
)
EXPERTS: Table = (
    count("num-experts", "model.moe.experts", 0, always=True),
    count("moe-router-topk topk", "model.moe.top_k", 2, always=True),
    Rule(("moe-ffn-hidden-size",), _read_widths, _write_widths),
    Rule(("moe-layer-freq",), _read_layers, _write_layers),
    Rule(("moe-router-score-function",), _read_router, _write_router),
    number("moe-router-topk-scaling-factor", "model.moe.routed_scaling", 1.0),
    Rule(("moe-router-load-balancing-type", "moe-aux-loss-coeff"), _read_balance, _write_balance),
    number("moe-z-loss-coeff", "model.moe.z_coefficient", 0.0),
    Rule(("moe-shared-expert-intermediate-size",), _read_shared, _write_shared),
    Rule(("moe-expert-capacity-factor",), _read_capacity, _write_capacity),
    word("moe-token-dispatcher-type", "plan.dispatch", _DISPATCHERS, "allgather", always=True),
    Rule((), _read_unsupported),
)

# Rows that hold for a model that flags do not describe, too.
OVER_EXPERTS: Table = (
    Rule(("moe-router-load-balancing-type", "moe-aux-loss-coeff"), _read_balance),
    number("moe-z-loss-coeff", "model.moe.z_coefficient", 0.0),
    Rule(("moe-expert-capacity-factor",), _read_capacity),
    word("moe-token-dispatcher-type", "plan.dispatch", _DISPATCHERS, "alltoall"),
    Rule((), _read_unsupported),
)

MTP: Table = (
    count("mtp-num-layers", "model.mtp_layers", 0, always=True),
    number("mtp-loss-scaling-factor", "model.mtp_weight", 0.1, always=True),
)
