"""Facts of a run that its notes state in words: number types, overlap, dispatchers, graphs, networks, memory."""

import re
from dataclasses import dataclass
from functools import cache

from shardwright.config import catalog

_NO = r"(?:no|not|non|never|without|w/o|neither|nor|disabl\w*)"
_OFF = r"\s*(?:[:=]|is|are|was|were)?\s*(?:off|false|False|0\b|none|disabled|not )"


def says(notes: str, pattern: str) -> str:
    """ "1" where notes have a pattern, "0" where they deny it, "" where they do not speak of it, or do both."""
    answers = set()
    for match in re.finditer(pattern, notes):
        before, behind = notes[max(0, match.start() - 24) : match.start()], notes[match.end() : match.end() + 12]
        is_denied = re.search(rf"\b{_NO}[ -](?:[\w-]+ )?$", before) or re.match(_OFF, behind)
        answers.add("0" if is_denied else "1")
    return answers.pop() if len(answers) == 1 else ""


def affirms(notes: str, pattern: str) -> str:
    """ "1" where notes have a pattern and never deny it, else ""."""
    return "1" if says(notes, pattern) == "1" else ""


_COMPILED = (
    r"\bcompile\b|(?:^|[;,:(]) *compiled\b|\bcompiled (?:blocks|layers|model)"
    r"|(?:model|blocks|layers|all)(?: is| are)? compiled\b"
)
_EAGER = r"(?:without|no|not) (?:torch\.)?compile|compile ?= ?[Ff]alse|\beager\b|not compiled"


def compiled(texts: str) -> str:
    """1 where a text says that blocks are compiled, 0 where it says that they are not."""
    if re.search(_EAGER, texts):
        return "0"
    return "1" if re.search(_COMPILED, texts) else ""


_WITHOUT_MASTERS = (
    r"without (?:a |any )?(?:float32 |fp32 )?(?:copy|copies|masters?)\b|no (?:float32 |fp32 )?masters?\b|\bbf16-true\b"
    r"|parameters of (?:16 bits|bfloat16)|pure (?:bf16|bfloat16)|training\.dtype bfloat16"
    r"|bf16 weights,? gradients and|all in bf16"
)
_GRADIENTS = (
    r"(?i)gradients?(?: that add up and)?(?: are)?(?: summed| accumulated| reduced)? in "
    r"(bf16|bfloat16|16 bits|fp16|fp32|float32)"
)


def ran_out(notes: str) -> bool:
    """True if a clause of the notes says no more than that the run was out of memory: others tell of other plans."""
    return re.search(r"(?i)(?:^|[;.]) *(?:cuda )?(?:oom|(?:ran |runs )?out of memory) *(?:$|[;.])", notes) is not None


def number_types(notes: str) -> dict[str, str]:
    """The number types of gradients, of the optimizer's moments and of the copies of parameters in float32."""
    facts = {}
    if all_in := re.search(r"[Ww]eights, gradients and moments in (bf16|fp32|fp16)", notes):
        facts = {"grads": all_in[1], "moments": all_in[1]}
    if re.search(_WITHOUT_MASTERS, notes):
        facts["masters"] = "none"
    if stated := re.search(r"(?i)\b(bf16|fp32)(?: Adam)? moments|moments in (bf16|fp32)", notes):
        facts["moments"] = (stated[1] or stated[2]).lower()
    if re.search(r"(?:fp32|float32) gradient accumulation", notes):
        facts["grads"] = "fp32"
    elif stated := re.search(_GRADIENTS, notes):
        number = stated[1].lower()
        facts["grads"] = {"bfloat16": "bf16", "16 bits": "bf16", "float32": "fp32"}.get(number, number)
    return facts


# The network between nodes by what a text calls it (config/networks), or the machine whose network it is.
NETWORKS = {
    "efa": r"\bEFA\b|\bp[45]d?e?n?\.\d+xlarge",
    "tcpx": r"TCPX|a3-?mega|a3-?high",
    "omnipath": r"[Oo]mni-?[Pp]ath|\bOPA\b",
    "roce": r"\bRoCE|a3-?ultra|a4-?high",
    "infiniband": r"[Ii]nfini[Bb]and|\bIB\b|\b[EHNX]DR\d*\b|\bSelene\b|\bEos\b|\bLeonardo\b|MareNostrum|JUWELS|JUPITER",
}


def network(notes: str) -> str:
    """The network that a text names first."""
    named = {name: match.start() for name, pattern in NETWORKS.items() if (match := re.search(pattern, notes))}
    return min(named, key=named.__getitem__) if named else ""


# Models whose code in public trainers balances experts by no rule: Megatron-Bridge,
# models/gpt_oss/gpt_oss_bridge.py, moe_router_load_balancing_type = "none".
_WITHOUT_BALANCE = r"GPT-OSS"
# And those whose gate's biases follow its loads: models/deepseek/deepseek_v3_bridge.py, moe_router_enable_expert_bias.
_BIASED = r"DeepSeek-V3|Moonlight"


def routing(notes: str, model: str) -> str:
    """How a mixture's tokens are spread over experts, as far as notes say so."""
    if re.search(r"round[- ]robin|deterministic (?:even )?routing|deterministic even", notes):
        return "in-turn"
    if re.search(r"forced? (?:even |expert |load )?(?:balanc|routing)|force_load_balanc|fake balanced", notes):
        return "forced"
    if "natural routing" not in notes:
        return ""
    if re.search(_WITHOUT_BALANCE, model) or "without a rule of balance" in notes:
        return "free"
    return "biased" if re.search(_BIASED, model) else "balanced"


# Axes whose communication is overlapped, by options of Megatron's that say so, and by words.
_OVERLAPPED = {
    "tp": r"tp_comm_overlap|tp-comm-overlap|products over tp overlapped|async(?:hronous)? tensor parallel\w*|\bmc2\b",
    "dp": r"overlap[_-]grad[_-]reduce|overlapped reductions",
    "a2a": r"overlap[_-]moe[_-]expert[_-]parallel[_-]comm|moe_a2a_overlap|overlap of the all-to-all",
}


def overlap(notes: str) -> str:
    """The axes whose communication is overlapped, and with no- those whose is not, as far as notes say so."""
    axes = {"TP": "tp", "DP": "dp", "PP": "pp", "EP": "a2a"}
    stated = re.findall(r"\b(no |without )?(TP|DP|PP|EP) overlap", notes)
    words = [f"no-{axes[axis]}" if denial else axes[axis] for denial, axis in stated]
    for axis, pattern in _OVERLAPPED.items():
        if axis not in words and f"no-{axis}" not in words and (answer := says(notes, pattern)):
            words.append(axis if answer == "1" else f"no-{axis}")
    return " ".join(dict.fromkeys(words))


def dispatcher(notes: str) -> str:
    """The dispatcher that sends tokens to their experts."""
    named = {
        "hybridep": r"(?i)hybrid-?ep\b",
        "deepep": r"(?i)deep-?ep\b",
        "all-gather": r"(?i)all-?gather dispatch",
        "all-to-all": r"(?i)all-?to-?all dispatch|experts over ep by all-to-all",
    }
    return next((name for name, pattern in named.items() if re.search(pattern, notes)), "")


_GRAPH_OF_STEP = (
    r"full(?:-| )iteration(?:-| )CUDA graph|full(?:-iteration)? CUDA graph|a CUDA graph of the step|FULL_CUDA_GRAPH=1"
)


def graphs(notes: str) -> str:
    """The CUDA graphs that a step is launched as."""
    if re.search(r"(?:no|without) (?:TE )?CUDA graphs?\b|CUDA graphs off", notes):
        return "none"
    if re.search(_GRAPH_OF_STEP, notes):
        return "step"
    return "parts" if re.search(r"CUDA graphs|graphs of (?:attention|the router|moe_)", notes) else ""


def memory_kind(notes: str, software: str) -> str:
    """The counter by which memory was measured."""
    if "on the LAST rank" in notes:
        return "last-rank"
    if software.startswith("nanotron"):  # src/nanotron/helpers.py, log_throughput: world rank 0 writes the table
        return "first-rank"
    if re.search(r"nvidia-smi|of the driver|in use of the device|\bNVML\b|pynvml|rocm-smi|\bDCGM\b", notes):
        return "driver"
    if re.search(r"max_memory_allocated|allocated|Max_MA\b", notes):
        return "allocator"
    return "reserved" if re.search(r"reserved", notes) else ""


_ON_HOST = r"(?:offloaded|kept on the host|on the host|to the host|go(?:es)? to the host|in host memory|on the CPU)"
_HOSTED = {
    "activations": (
        rf"(?:activations|inputs of layers|layer inputs)(?: are| is)?[^;.]{{0,20}}{_ON_HOST}"
        r"|[Aa]ctivation[- ]offload|cpu_checkpointing|--cpu-offloading\b|--cpu-activation"
    ),
    "optimizer": (
        rf"\b[Oo]ptimizer(?:'s)?(?: states?)?(?: is| are)? {_ON_HOST}|CPUOffload|ZeRO-(?:Offload|Infinity)"
        r"|offload(?:ed|s|ing)? (?:the |of the )?optimizer|[Oo]ptimizer[- ](?:cpu[- ])?offload"
        r"|offload_optimizer\w*\W+cpu"
    ),
    "parameters": (
        rf"\b[Pp]arameters(?: and optimizer)?(?: are)? {_ON_HOST}|CPUOffload|ZeRO-Infinity|offload_param\w*\W+cpu"
        r"|[Pp]arameter[- ]offload"
    ),
}


def offload(notes: str) -> str:
    """The parts of a job that are in host memory, as far as notes say so."""
    words = {name for name, pattern in _HOSTED.items() if affirms(notes, pattern)}
    if re.search(OFFLOADED, notes):
        words.add("activations")
    return " ".join(name for name in _HOSTED if name in words)


OFFLOADED = r"(?:q, k, v|qkv_proj)[^;]*offloaded"  # what MaxText's policies send to the host


def loss_by_parts(notes: str) -> str:
    """1 where the loss is computed by parts of the tokens."""
    parts = r"loss (?:is )?(?:computed )?(?:by|in) (?:\w+ )?parts|chunked[ _](?:loss|nll|cross)"
    return affirms(notes, parts)


def optimizer(notes: str) -> str:
    """An optimizer other than AdamW that notes name."""
    named = {"adafactor": r"\bAdafactor\b", "lion": r"\bLion\b", "muon": r"\bMuon\b", "sgd": r"\bSGD\b"}
    return next((name for name, pattern in named.items() if affirms(notes, pattern)), "")


_SHARD_GROUP = (
    r"zero1=(\d+)|FSDP group (\d+), replicated across (?!1 )|FSDP over (\d+), replicated|HSDP over nodes of (\d+)"
    r"|HSDP: sharded over the (\d+)"
)


def numbers_of_notes(notes: str, devices_per_node: str) -> dict[str, str]:
    """Numbers of the model and the plan that notes state."""
    expert_tp = (
        r"(?i)\b(?:etp|expert[ _-]?tp|expert[ _-]tensor[ _-]parallel(?:ism)?(?:[ _-](?:size|degree))?)\s*[=:]?\s*(\d+)"
    )
    facts = {}
    for name, pattern in (
        ("head_dim", r"head_dim (\d+)"),
        ("expert_tp", expert_tp),
        ("shard_group", _SHARD_GROUP),
        ("recompute_layers", r"(?:\bonly |recomput[^;]{0,60}?)\(?(\d+) of (?:the )?\d+(?: layers|\))"),
    ):
        if match := re.search(pattern, notes):
            facts[name] = next(filter(None, match.groups()))
    if "HYBRID_SHARD" in notes and devices_per_node:  # torch's default: shards within a node
        facts.setdefault("shard_group", devices_per_node)
    if mixed := re.search(r"(\d+) local layers \(window (\d+)\) to 1 global", notes):
        facts |= {"window": mixed[2], "window_every": str(int(mixed[1]) + 1)}
    elif alternating := re.search(r"alternating sliding window (\d+) / full", notes):
        facts |= {"window": alternating[1], "window_every": "2"}
    if ranks := re.search(r"q_lora (\d+), kv_lora (\d+)", notes):
        facts |= {"q_rank": ranks[1], "kv_rank": ranks[2]}
    elif rank := re.search(r"without q_lora, kv_lora (\d+)", notes):
        facts |= {"q_rank": "", "kv_rank": rank[1]}
    return facts


def facts_of_model(row: dict[str, str]) -> dict[str, str]:
    """Facts of the model's attention and MLPs that the catalog's models of that name have, if their width and heads are
    the row's: heads of another width than hidden / heads, ranks of latents, windows, biases; also of a model with fewer
    layers. Empty where models of that name differ."""
    name, sizes = _plain(row.get("model") or ""), (row.get("hidden") or "", row.get("heads") or "")
    facts = [model.facts for model in _models() if model.sizes == sizes and _plain(model.family) in name]
    return dict(facts[0]) if facts and all(other == facts[0] for other in facts) else {}


@dataclass(frozen=True)
class _Model:
    """A model of the catalog: its width and heads, the family that its name begins with, and columns that say how it
    differs from the usual."""

    sizes: tuple[str, str]
    family: str
    facts: dict[str, str]


@cache
def _models() -> tuple[_Model, ...]:
    """The catalog's models."""
    known = []
    for name in catalog.names("models"):
        if name.startswith("tiny-"):  # of this project alone
            continue
        model = catalog.read("models", name)
        hidden, heads = model.get("hidden", 0), model.get("heads", 0)
        facts = {}
        if (width := model.get("head_dim")) and width * heads != hidden:
            facts["head_dim"] = str(width)
        if latent := model.get("latent"):
            facts |= {"q_rank": str(latent.get("q_rank") or ""), "kv_rank": str(latent["kv_rank"])}
        if (window := model.get("window")) and not window.get("chunked"):
            facts |= {"window": str(window["size"]), "window_every": str(window.get("full_every", 1))}
        if model.get("activation") == "clamped-silu":
            facts |= {"bias": "1", "limited": "1"}
        known.append(_Model((str(hidden), str(heads)), re.split(r"-\d|-[a-z]+$", name)[0], facts))
    return tuple(known)


def _plain(name: str) -> str:
    """Letters and digits of a name."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
