"""The columns of a table of measured runs that older tables state in texts only, filled once from those texts.

    python benchmarks/truth/fill_columns.py IN OUT

A prediction reads columns and no text, so its result is reviewed like any other data: a filled column stays as it is,
and what no text says stays empty, which is unknown. Each rule reads what a row's own source, notes and conventions say:
read_software.py has frameworks and their releases, read_facts.py what notes say of number types, overlap and memory.
"""

import argparse
import csv
import re
from pathlib import Path

import read_facts as facts_in
from read_software import software_facts

from shardwright.config.attention_kernels import kernel_names
from shardwright.config.software import software_of
from shardwright.config.software_generations import generation_of
from shardwright.cost.calibration import device_of

Row = dict[str, str]
GIB = 1.073741824
COLUMNS = (
    "software", "date", "compiled", "attention", "grads", "moments", "overlap", "head_dim", "q_rank", "kv_rank",
    "expert_tp", "shard_group", "recompute_layers", "recompute_inferred", "layers_run", "flops_counted", "memory_kind",
    "network", "offload", "window", "window_every", "routing", "dispatcher", "graphs", "bias", "limited", "masters",
    "autocast", "no_sync", "optimizer", "dropout", "loss_by_parts",
)  # fmt: skip


def filled(row: Row) -> Row:
    """The row, with empty columns filled from its texts."""
    texts = " ".join(row.get(name) or "" for name in ("source", "model", "notes"))
    source, notes = row.get("source") or "", row.get("notes") or ""
    facts = software_facts(row)
    facts |= facts_in.facts_of_model(row) | facts_in.numbers_of_notes(notes, row.get("gpus_per_node") or "")
    facts |= facts_in.number_types(notes) | {
        "compiled": facts_in.compiled("; ".join((source, notes))),
        "network": facts_in.network(f"{notes} {source}"),
        "routing": facts_in.routing(notes, row.get("model") or ""),
        "offload": facts_in.offload(notes) if has_host(row.get("gpu") or "") else "",
        "overlap": facts_in.overlap(notes),
        "dispatcher": facts_in.dispatcher(notes),
        "graphs": facts_in.graphs(notes),
        "loss_by_parts": facts_in.loss_by_parts(notes),
        "optimizer": facts_in.optimizer(notes),
        "autocast": facts_in.affirms(notes, r"\bautocast\b"),
        "no_sync": facts_in.affirms(notes, r"\bno_sync\b|sync(?:s|hroni[sz]ed)? once a step"),
        "dropout": facts_in.says(notes, r"\bdropout\b"),
        "recompute_inferred": "1" if "HEAD" in notes and row.get("recompute") else "",
        "flops_counted": flops_counted(row.get("flops_convention") or ""),
    }
    software = row.get("software") or facts["software"]
    facts["attention"] = attention(texts, software, facts["date"])
    if row.get("peak_mem_gb") or row.get("measured_gib"):
        facts["memory_kind"] = facts_in.memory_kind(notes, software)
    if row.get("software"):
        facts["date"] = ""
    stated = {name: value for name, value in row.items() if value and value != "unknown"}
    new = row | {name: stated.get(name) or facts.get(name) or row.get(name, "") for name in COLUMNS}
    if row.get("measured_gib") and not row.get("peak_mem_gb"):
        new["peak_mem_gb"] = f"{float(row['measured_gib']) * GIB:.6g}"
    if not (row.get("oom") or new.get("peak_mem_gb") or is_timed(row)) and facts_in.ran_out(notes):
        new["oom"] = "yes"
    if row.get("gpu") == "H100" and "HBM2e" in notes:
        new["gpu"] = "H100-96G"
    if (row.get("recompute") == "selective" and "op-level" in notes) or "selective op" in notes:
        new["recompute"] = "matmul"  # torchtitan's: all but the results of attention and of every second product
    if row.get("recompute") == "selective" and re.search(facts_in.OFFLOADED, notes):
        new["recompute"] = "activation+attention+norm+up"  # MaxText's: all but the tensors that its policy names
    return new


def is_timed(row: Row) -> bool:
    """True for a row with a measured time or rate."""
    return any(row.get(name) for name in ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu"))


def has_host(device: str) -> bool:
    """True where the catalog knows how a device reaches its host's memory; else nothing is predicted from there."""
    try:
        return device_of(device).host_gb_per_s > 0
    except KeyError:
        return True


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


_FLASH = r"flash[ _-]?att(?:ention|n)(?:[ _-]?v?(?P<version>[1234])(?!\d))?"
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
    return {"2": "flash2", "3": "flash3", "4": "cudnn"}.get(mentions[-1]["version"] or "1", "flash1")


def attention(texts: str, software: str, date: str) -> str:
    """The attention kernel that the texts name, unless the software has a newer one, which texts may call the same."""
    if re.search(r"(?i)\bfp8 attention|fp8_dot_product_attention", texts):
        return "cudnn-fp8"  # no other trains in fp8 (Transformer Engine, get_attention_backend)
    kernel = mentioned_attention(texts)
    framework, _, month = software.partition("@")
    default = software_of(generation_of(framework, month) or generation_of("megatron-lm", month or date)).attention
    if kernel == "none":
        return "" if default in ("torch", "softmax") else "fused-softmax"
    is_newer = default not in ("torch", "softmax", "flash1") and kernel not in ("flash3", "cudnn")
    return "" if is_newer and kernel_names().get(kernel) != default else kernel


def main() -> None:
    """Fill a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, metavar="IN")
    parser.add_argument("filled", type=Path, metavar="OUT")
    options = parser.parse_args()
    if not options.table.is_file():
        parser.error(f"there is no table {options.table}")
    with options.table.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        rows, header = with_earlier_facts([filled(row) for row in reader]), list(reader.fieldnames or ())
    names = [*header, *(name for name in COLUMNS if name not in header)]
    names += ["peak_mem_gb"] * ("peak_mem_gb" not in names and "measured_gib" in names)
    names += ["oom"] * ("oom" not in names and any("oom" in row for row in rows))
    with options.filled.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
