"""Megatron-LM's flags for experts and for further tokens."""

import re
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.moe import is_routed
from shardwright.config.other_systems.rows import Rule, Table, count, number, word
from shardwright.config.other_systems.settings import Flat, Settings
from shardwright.config.other_systems.whole_text import whole

_AUX = {
    "aux_loss": ("switch", "microbatch"), "seq_aux_loss": ("switch", "sequence"),
    "global_aux_loss": ("switch", "global"), "none": ("none", "microbatch"),
}  # fmt: skip
_DROPS = {"probs": "drop-probability", "position": "drop-position"}
_TO_EXPERTS = {"alltoall": "direct", "allgather": "direct", "alltoall_seq": "direct", "flex": "node-aware"}


def _read_layers(theirs: Settings, ours: Flat) -> None:
    """Which layers have experts, as a rule of ours."""
    text = theirs.text(("moe-layer-freq", "expert-interval"), "1").replace(" ", "")
    layers = ours["model.layers"]
    pattern = _pattern(text, layers)
    if pattern is None:
        theirs.faults.append(f"--moe-layer-freq {text[:60]} is neither a number nor a list such as ([0]*3+[1]*58)")
        return
    if len(pattern) != layers:
        theirs.faults.append(f"--moe-layer-freq {text[:60]} is for {len(pattern)} layers, and there are {layers}")
        return
    dense = pattern.index(True) if True in pattern else 0
    for every in range(1, layers + 1):
        for first in range(max(0, dense - every + 1), dense + 1):
            if all(is_routed(layer, first, every) == routed for layer, routed in enumerate(pattern)):
                ours |= {"model.moe.first_dense": first, "model.moe.every": every}
                return
        if every > 64:
            break
    theirs.faults.append(
        f"--moe-layer-freq {text[:60]}: layers with experts follow no rule of ours (first_dense, every)"
    )


def _pattern(text: str, layers: int) -> list[bool] | None:
    if (said := whole(text)) is not None:
        every = max(1, said)
        return [layer % every == 0 for layer in range(layers)]
    found: list[bool] = []
    for part in text.strip("()").split("+"):
        piece = re.fullmatch(r"\(?\[([01](?:,[01])*)\]\)?(?:\*([0-9]{1,4}))?", part)
        if not piece or len(found) > 1 << 16:
            return None
        found += [digit == "1" for digit in piece[1].split(",")] * int(piece[2] or 1)
    return found


def _write_layers(job: JobSpec, theirs: dict[str, Any]) -> None:
    routed = [job.model.moe.has_experts(layer) for layer in range(job.model.layers)]
    if all(routed):
        return
    runs: list[tuple[int, int]] = []
    for one in routed:
        runs = [*runs[:-1], (int(one), runs[-1][1] + 1)] if runs and runs[-1][0] == one else [*runs, (int(one), 1)]
    theirs["moe-layer-freq"] = "+".join(f"[{one}]*{number}" for one, number in runs)


def _read_router(theirs: Settings, ours: Flat) -> None:
    score = theirs.one_of("moe-router-score-function", {"softmax": "softmax", "sigmoid": "sigmoid"}, "softmax")
    top_k, before = ours["model.moe.top_k"], theirs.flag("moe-router-pre-softmax")
    ours["model.moe.gate"] = score
    if score == "softmax":
        ours |= {"model.moe.normalise": not before, "model.moe.softmax_over": "all" if before else "chosen"}
    else:
        ours["model.moe.normalise"] = top_k > 1
        rate = theirs.number("moe-router-bias-update-rate", 1e-3)
        ours["model.moe.bias_update"] = rate if theirs.flag("moe-router-enable-expert-bias") else 0.0
    theirs.ignore("moe-router-bias-update-rate", "moe-router-enable-expert-bias")
    ours["model.moe.weigh"] = "input" if theirs.flag("moe-apply-probs-on-input") else "output"
    groups, kept = theirs.count("moe-router-num-groups", 1), theirs.count("moe-router-group-topk", 1)
    if groups > 1:
        each = top_k // max(1, kept)
        ours |= {"model.moe.num_groups": groups, "model.moe.groups_kept": kept,
                 "model.moe.group_score": "max" if each == 1 else "top2"}  # fmt: skip
        if each not in (1, 2):
            theirs.lost.append(f"groups of experts are compared by their {each} best there, and by 2 here")


def _write_router(job: JobSpec, theirs: dict[str, Any]) -> None:
    moe = job.model.moe
    if moe.gate in ("sigmoid", "softmax"):
        theirs |= {"moe-router-score-function": "sigmoid"} if moe.gate == "sigmoid" else {}
    if moe.gate != "sigmoid" and (not moe.normalise or moe.num_chosen == 1):
        theirs["moe-router-pre-softmax"] = True
    if moe.gate == "sigmoid" and moe.bias_update:
        theirs |= {"moe-router-enable-expert-bias": True, "moe-router-bias-update-rate": moe.bias_update}
        theirs["moe-router-dtype"] = "fp32"
    theirs |= {"moe-apply-probs-on-input": True} if moe.weigh == "input" else {}
    if moe.num_groups > 1 and moe.gate in ("softmax", "sigmoid"):
        theirs |= {"moe-router-num-groups": moe.num_groups, "moe-router-group-topk": moe.groups_kept}


def _read_balance(theirs: Settings, ours: Flat) -> None:
    words = theirs.words("moe-router-load-balancing-type") or ["aux_loss"]
    weights = theirs.words("moe-aux-loss-coeff") or ["0"]
    if len(words) > 1:
        theirs.lost.append(f"{theirs.said('moe-router-load-balancing-type')}: one loss can be said here, the first")
    if words[0] not in _AUX:
        theirs.faults.append(
            f"--moe-router-load-balancing-type {words[0][:60]} can't be said here; use one of {', '.join(_AUX)}"
        )
        return
    try:
        weight = float(weights[0])
    except ValueError:
        theirs.faults.append(f"{theirs.said('moe-aux-loss-coeff')}: it should be a number")
        return
    if weight > 0 and _AUX[words[0]][0] != "none":
        ours |= dict(zip(("model.moe.aux_loss", "model.moe.aux_scope"), _AUX[words[0]], strict=True))
        ours["model.moe.aux_coefficient"] = weight


def _write_balance(job: JobSpec, theirs: dict[str, Any]) -> None:
    moe = job.model.moe
    found = next((name for name, pair in _AUX.items() if pair == (moe.aux_loss, moe.aux_scope)), None)
    if found and moe.aux_loss != "none":
        theirs |= {"moe-router-load-balancing-type": found, "moe-aux-loss-coeff": moe.aux_coefficient}
    elif moe.aux_loss == "none":
        theirs["moe-router-load-balancing-type"] = "none"


def _read_shared(theirs: Settings, ours: Flat) -> None:
    width = theirs.count("moe-shared-expert-intermediate-size", 0)
    if width:
        ours |= {"model.moe.shared_experts": 1, "model.moe.shared_ffn": width}
        ours["model.moe.shared_gate"] = theirs.flag("moe-shared-expert-gate")


def _write_shared(job: JobSpec, theirs: dict[str, Any]) -> None:
    moe = job.model.moe
    if moe.shared_experts:
        theirs["moe-shared-expert-intermediate-size"] = moe.shared_size(job.model.ffn_size)
        theirs |= {"moe-shared-expert-gate": True} if moe.shared_gate else {}


def _read_room(theirs: Settings, ours: Flat) -> None:
    factor = theirs.number("moe-expert-capacity-factor", 0.0)
    policy = theirs.one_of("moe-token-drop-policy", _DROPS, "probs")
    if factor > 0:
        ours |= {"model.moe.capacity_factor": factor, "model.moe.overflow": policy}


def _write_room(job: JobSpec, theirs: dict[str, Any]) -> None:
    moe = job.model.moe
    if moe.capacity_factor and moe.gate != "expert-choice":
        theirs["moe-expert-capacity-factor"] = moe.capacity_factor
        policy = next((word for word, ours in _DROPS.items() if ours == moe.overflow), "probs")
        theirs["moe-token-drop-policy"] = policy


def _read_widths(theirs: Settings, ours: Flat) -> None:
    width = theirs.count("moe-ffn-hidden-size", 0)
    ours["model.moe.ffn"] = 0 if width == ours.get("model.ffn") else width


def _write_widths(job: JobSpec, theirs: dict[str, Any]) -> None:
    theirs["moe-ffn-hidden-size"] = job.model.moe.ffn_size(job.model.ffn_size)


def _tell_what_has_no_field(theirs: Settings, ours: Flat) -> None:
    theirs.lose("moe-latent-size", "experts work on the whole width here")
    theirs.lose("moe-input-jitter-eps", "inputs of the router are not jittered here")
    if theirs.text("moe-token-dispatcher-type") == "allgather":
        theirs.lost.append("--moe-token-dispatcher-type allgather: tokens travel all-to-all here")


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
    Rule(("moe-expert-capacity-factor",), _read_room, _write_room),
    word("moe-token-dispatcher-type", "plan.dispatch", _TO_EXPERTS, "allgather", always=True),
    Rule((), _tell_what_has_no_field),
)

FURTHER: Table = (
    count("mtp-num-layers", "model.mtp_layers", 0, always=True),
    number("mtp-loss-scaling-factor", "model.mtp_weight", 0.1, always=True),
)
