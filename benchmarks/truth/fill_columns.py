"""The columns of a table of measured runs that older tables state in texts only, filled once from those texts.

    python benchmarks/truth/fill_columns.py IN OUT

A prediction reads columns and no text, so its result is reviewed like any other data: a filled column stays as it is,
and what no text says stays empty, which is unknown. Each rule reads what a row's own source, notes and conventions say.
"""

import argparse
import csv
import re
from pathlib import Path

from shardwright.config.attention_kernels import kernel_names
from shardwright.config.software import software_of
from shardwright.config.software_generations import generation_of

Row = dict[str, str]
GIB = 1.073741824
COLUMNS = (
    "software", "date", "compiled", "attention", "grads", "moments", "overlap", "head_dim", "q_rank", "kv_rank",
    "expert_tp", "shard_group", "recompute_layers", "recompute_inferred", "layers_run", "flops_counted", "memory_kind",
    "network", "offload", "window", "window_every", "routing", "dispatcher", "graphs",
)  # fmt: skip

# The framework by what a text calls it, and its month where the text has none. The first pattern that matches counts.
FRAMEWORKS = (
    ("torchtitan", r"[Tt]orch[Tt]itan", ""),
    ("aleph-flash1", r"kernel: flash_attentionv1", ""),
    ("aleph-flash2-rms", r"kernel: flash_attention2 \+ RMS", ""),
    ("aleph-flash2", r"kernel: flash_attention2", ""),
    ("aleph-fused", r"kernel: fused", ""),
    ("aleph-torch", r"kernel: torch", ""),
    ("internevo", r"InternEvo|InternLM", ""),
    ("maxtext", r"[Mm]ax[Tt]ext", ""),
    ("paxml", r"[Pp]axml", ""),
    ("megatron-bridge", r"Megatron-Bridge", ""),
    ("nemo", r"NeMo|nemo(?!tron)|dgxc|mlcommons/training_results", ""),
    ("megascale", r"MegaScale(?!.*Megatron-LM)", ""),
    ("gpt-neox", r"[Nn]eo[Xx]|2304\.01373", ""),
    ("zero-bubble", r"2401\.10241|[Zz]ero[ -][Bb]ubble", ""),
    ("megatron-core", r"[Ss]imu[Mm]ax|\bmcore|_mcore_|Megatron-[Cc]ore", "2025-06"),
    ("primus", r"Primus", ""),
    ("nanotron", r"nanotron", ""),
    ("megatron-deepspeed", r"bigscience|BLOOM", "2022-02"),
    ("megatron-deepspeed", r"Megatron-DeepSpeed|2201\.11990|Deep[Ss]peed and Megatron|GLM-130B", ""),
    ("metaseq", r"metaseq|2205\.01068", ""),
    ("llm-foundry", r"llm-foundry|[Mm]osaic", ""),
    ("hai-llm", r"HAI-LLM|HaiScale|deepseek-ai|2401\.02954|2401\.06066|2405\.04434|2408\.14158|2412\.19437", ""),
    ("llama3", r"2407\.21783", ""),
    ("deepspeed", r"[Dd]eep[Ss]peed", ""),
    ("llm.c", r"llm\.c\b", ""),
    ("fsdp", r"nanoGPT", "2023-01"),
    ("fsdp", r"FSDP|HSDP|SemiAnalysis|2501\.00656|2302\.13971|2307\.09288|2307\.08691", ""),
    ("jax", r"PaLM|\bJAX\b|T5X|GSPMD", ""),
    ("megatron-lm", r"Megatron[- ]LM|2104\.04473|2205\.05198|2006\.09503|1909\.08053", ""),
)


def filled(row: Row) -> Row:
    """The row, with empty columns filled from its texts."""
    texts = " ".join(row.get(name) or "" for name in ("source", "model", "notes"))
    source, notes = row.get("source") or "", row.get("notes") or ""
    facts = software_facts(texts, source)
    facts |= facts_of_notes(notes) | {
        "compiled": compiled(texts),
        "grads": "fp32" if re.search(r"(?:fp32|float32) gradient accumulation", notes) else "",
        "moments": moments(notes),
        "network": network(notes),
        "routing": routing(notes, row.get("model") or ""),
        "offload": "activations" if re.search(_OFFLOADED, notes) else "",
        "overlap": overlap(notes),
        "dispatcher": dispatcher(notes),
        "graphs": graphs(notes),
        "recompute_inferred": "1" if "HEAD" in notes and row.get("recompute") else "",
        "flops_counted": flops_counted(row.get("flops_convention") or ""),
    }
    software = row.get("software") or facts["software"]
    facts["attention"] = attention(texts, software, facts["date"])
    if row.get("peak_mem_gb") or row.get("measured_gib"):
        facts["memory_kind"] = memory_kind(notes, software)
    if row.get("software"):
        facts["date"] = ""
    stated = {name: value for name, value in row.items() if value and value != "unknown"}
    new = row | {name: stated.get(name) or facts.get(name) or row.get(name, "") for name in COLUMNS}
    if row.get("measured_gib") and not row.get("peak_mem_gb"):
        new["peak_mem_gb"] = f"{float(row['measured_gib']) * GIB:.6g}"
    if row.get("gpu") == "H100" and "HBM2e" in notes:
        new["gpu"] = "H100-96G"
    if (row.get("recompute") == "selective" and "op-level" in notes) or "selective op" in notes:
        new["recompute"] = "matmul"  # torchtitan's: all but the results of attention and of every second product
    if row.get("recompute") == "selective" and re.search(_OFFLOADED, notes):
        new["recompute"] = "activation+attention+norm+up"  # MaxText's: all but the tensors that its policy names
    return new


_OFFLOADED = r"(?:q, k, v|qkv_proj)[^;]*offloaded"  # what MaxText's policies send to the host


def software_facts(texts: str, source: str) -> dict[str, str]:
    """The software's column, with its month behind an @; the month alone where no text names a framework."""
    framework, usual_month = next(
        ((name, month) for name, pattern, month in FRAMEWORKS if re.search(pattern, texts)), ("", "")
    )
    month = month_of(texts, source) or usual_month
    if not framework:
        return {"software": "", "date": month}
    return {"software": f"{framework}@{month}" if month else framework, "date": ""}


MLPERF_ROUNDS = {"4.0": "2024-05", "4.1": "2024-10", "5.0": "2025-05", "5.1": "2025-10"}  # of MLPerf Training


def month_of(texts: str, source: str) -> str:
    """The month of a run: a date behind the framework's name, its preprint's number, a date of a file, else the middle
    of its source's year."""
    if stated := re.search(r"(?:nanotron|verified) (20\d\d-(?:0[1-9]|1[0-2]))", texts):
        return stated[1]
    if container := re.search(r"NeMo container (2\d)\.(0[1-9]|1[0-2])", texts):
        return f"20{container[1]}-{container[2]}"
    if round_of_mlperf := re.search(r"training_results_v(\d\.\d)", source):
        return MLPERF_ROUNDS.get(round_of_mlperf[1], "")
    if paper := re.search(r"\b(\d\d)(0[1-9]|1[0-2])\.\d{4,5}\b", texts):
        return f"20{paper[1]}-{paper[2]}"
    if file := re.search(r"_(20[12]\d)(0[1-9]|1[0-2])_", source):
        return f"{file[1]}-{file[2]}"
    years = re.findall(r"\b20[12]\d\b", source)
    return f"{max(years)}-06" if years else ""


def compiled(texts: str) -> str:
    """1 where a text says that blocks are compiled, 0 where it says that they are not."""
    if re.search(r"(?:without|no|not) (?:torch\.)?compile|\beager\b", texts):
        return "0"
    return "1" if re.search(r"\bcompile\b", texts) else ""


# The network between nodes by what a text calls it (config/networks).
NETWORKS = {
    "efa": r"\bEFA\b",
    "tcpx": r"TCPX",
    "omnipath": r"[Oo]mni-?[Pp]ath|\bOPA\b",
    "roce": r"\bRoCE",
    "infiniband": r"[Ii]nfini[Bb]and|\bIB\b|\b[EHNX]DR\b|\bSelene\b|\bEos\b",
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
    if re.search(r"forced (?:expert )?balanc|force(?:d)? (?:load )?balanc", notes):
        return "forced"
    if "natural routing" not in notes:
        return ""
    if re.search(_WITHOUT_BALANCE, model):
        return "free"
    return "biased" if re.search(_BIASED, model) else "balanced"


def moments(notes: str) -> str:
    """The number type of Adam's moments."""
    if stated := re.search(r"(?i)\b(bf16|fp32)(?: Adam)? moments", notes):
        return stated[1].lower()
    return ""


def overlap(notes: str) -> str:
    """The axes whose communication is overlapped, and with no- those whose is not, as far as notes say so."""
    axes = {"TP": "tp", "DP": "dp", "PP": "pp", "EP": "a2a"}
    stated = re.findall(r"\b(no |without )?(TP|DP|PP|EP) overlap", notes)
    return " ".join(dict.fromkeys(f"no-{axes[axis]}" if denial else axes[axis] for denial, axis in stated))


def dispatcher(notes: str) -> str:
    """The dispatcher that sends tokens to their experts."""
    named = {"hybridep": r"HybridEP", "deepep": r"DeepEP", "all-to-all": r"all-?to-?all dispatcher"}
    return next((name for name, pattern in named.items() if re.search(pattern, notes)), "")


def graphs(notes: str) -> str:
    """The CUDA graphs that a step is launched as."""
    named = {"none": r"no CUDA graphs", "step": r"full(?:-iteration)? CUDA graph", "parts": r"CUDA graphs"}
    return next((name for name, pattern in named.items() if re.search(pattern, notes)), "")


def facts_of_notes(notes: str) -> dict[str, str]:
    """Numbers of the model and the plan that notes state."""
    expert_tp = (
        r"(?i)\b(?:etp|expert[ _-]?tp|expert[ _-]tensor[ _-]parallel(?:ism)?(?:[ _-](?:size|degree))?)\s*[=:]?\s*(\d+)"
    )
    facts = {}
    for name, pattern in (
        ("head_dim", r"head_dim (\d+)"),
        ("expert_tp", expert_tp),
        ("shard_group", r"zero1=(\d+)|FSDP group (\d+), replicated across (?!1 )"),
        ("recompute_layers", r"only (\d+) of \d+ layers"),
    ):
        if match := re.search(pattern, notes):
            facts[name] = next(filter(None, match.groups()))
    if mixed := re.search(r"(\d+) local layers \(window (\d+)\) to 1 global", notes):
        facts |= {"window": mixed[2], "window_every": str(int(mixed[1]) + 1)}
    elif alternating := re.search(r"alternating sliding window (\d+) / full", notes):
        facts |= {"window": alternating[1], "window_every": "2"}
    if ranks := re.search(r"q_lora (\d+), kv_lora (\d+)", notes):
        facts |= {"q_rank": ranks[1], "kv_rank": ranks[2]}
    elif rank := re.search(r"without q_lora, kv_lora (\d+)", notes):
        facts |= {"q_rank": "", "kv_rank": rank[1]}
    return facts


def with_earlier_facts(rows: list[Row]) -> list[Row]:
    """The rows; those whose notes refer to a row before them have its facts: "MLA as above" the latent ranks of their
    model, "a repeat" all facts of their plan."""
    ranks: dict[str, Row] = {}
    facts: dict[str, Row] = {}
    for row in rows:
        notes = row.get("notes") or ""
        if notes.endswith("a repeat"):
            row |= {name: row[name] or fact for name, fact in facts.get(row.get("plan_group", ""), {}).items()}
        else:
            facts.setdefault(row.get("plan_group", ""), {name: row[name] for name in COLUMNS})
        if row["kv_rank"]:
            ranks[row.get("model", "")] = {name: row[name] for name in ("q_rank", "kv_rank")}
        elif "MLA as above" in notes:
            row |= ranks.get(row.get("model", ""), {})
    return rows


def memory_kind(notes: str, software: str) -> str:
    """Of what the memory is that was measured."""
    if "on the LAST rank" in notes:
        return "last-rank"
    if software.startswith("nanotron"):  # src/nanotron/helpers.py, log_throughput: world rank 0 writes the table
        return "first-rank"
    if "nvidia-smi" in notes:
        return "driver"
    if re.search(r"max_memory_allocated|allocated", notes):
        return "allocator"
    return "reserved" if re.search(r"reserved", notes) else ""


_NO = r"(?:no|not|non|without|excl\w*|ignor\w*|leav\w* out)"


def flops_counted(convention: str) -> str:
    """The word for how a source counts FLOPs; nothing where it counts none."""
    text = convention.lower()
    if re.search(r"^$|^none$|not reported|\bonly$|^step time only|^tokens/s only", text):
        return ""
    base = "hardware" if _counts_again(text) else "model"
    if re.search(rf"\b{_NO}[ -](?:any |the )?attention|\b6 ?\*? ?nd?\b(?!.*(?:attention|12))", text):
        return f"{base}-6n"
    is_halved = re.search(r"causal", text) and not re.search(rf"\b{_NO}[ -]?causal", text)
    return f"{base}-causal" if is_halved else base


def _counts_again(text: str) -> bool:
    """True if recomputed FLOPs are counted."""
    if re.match(r"\s*(?:mfu|model)", text) or "hfu=" in text or re.search(rf"\b{_NO}\W+(?:\w+ )?recomput", text):
        return False
    return re.search(r"recomput|hardware|hfu|factor 4|\b96 ?\*", text) is not None


_FLASH = r"flash[ _-]?att(?:ention|n)(?:[ _-]?v?(?P<version>[123])(?!\d))?"
_DENIAL = r"(?:no|non|not|never|neither|nor|without|w/o|lack\w*|disabl\w*|instead of|\w+n't)"
# Only these words may stand between the two, so that the denial is not of another thing: "no dropout with
# FlashAttention".
_BETWEEN = r"(?:(?:use|using|used|yet|have|having|has|had|support|the|any|with|even|of)\b[ -]*)*"
_OFF = r"\s*[:=(]?\s*(?:is |was |were |are )?(?:off|disabled|unavailable|false|none|no|0|not(?: yet| \w+ed| in use)?)"
_MENTION = re.compile(rf"(?i)(?P<before>\b{_DENIAL}[ -]+{_BETWEEN})?{_FLASH}(?P<behind>{_OFF}(?=\s*(?:$|[;,.)])))?")


def mentioned_attention(texts: str) -> str:
    """The attention kernel that a text names, "none" if it says that FlashAttention was not used, or nothing.

    The last mention counts, because a paper's title may name another kernel.
    """
    if named := re.search(r"(?i)\battention kernel: (torch|fused)\b", texts):
        return {"torch": "torch", "fused": "fused-softmax"}[named[1].lower()]
    mentions = list(_MENTION.finditer(texts))
    if not mentions:
        return ""
    if mentions[-1]["before"] or mentions[-1]["behind"]:
        return "none"
    return {"2": "flash2", "3": "flash3"}.get(mentions[-1]["version"] or "1", "flash1")


def attention(texts: str, software: str, date: str) -> str:
    """The attention kernel that the texts name, unless the software has a newer one, which texts may call the same."""
    if re.search(r"(?i)\bfp8 attention|fp8_dot_product_attention", texts):
        return "cudnn-fp8"  # no other trains in fp8 (Transformer Engine, get_attention_backend)
    kernel = mentioned_attention(texts)
    framework, _, month = software.partition("@")
    default = software_of(generation_of(framework, month) or generation_of("megatron-lm", month or date)).attention
    if kernel == "none":
        return "" if default in ("torch", "softmax") else "fused-softmax"
    is_newer = default not in ("torch", "softmax", "flash1")
    return "" if is_newer and kernel_names().get(kernel) != default else kernel


def main() -> None:
    """Fill a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, metavar="IN")
    parser.add_argument("filled", type=Path, metavar="OUT")
    options = parser.parse_args()
    with options.table.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        rows, header = with_earlier_facts([filled(row) for row in reader]), list(reader.fieldnames or ())
    names = [*header, *(name for name in COLUMNS if name not in header)]
    names += ["peak_mem_gb"] * ("peak_mem_gb" not in names and "measured_gib" in names)
    with options.filled.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
