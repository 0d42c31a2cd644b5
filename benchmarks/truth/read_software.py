"""The software of a run, and its month, by what a row's texts call them: a repository, a framework, a release, a date.

To add a framework, add its name to FRAMEWORKS, or a repository that uses it to REPOSITORIES.
"""

import re

# The framework that public repositories and programs run, as their sources have it. The first pattern that texts match
# counts.
REPOSITORIES = (
    ("kempnerforge", r"KempnerForge"),
    ("automodel", r"(?:NeMo[ -]|NVIDIA-NeMo/)Automodel"),
    ("megatron-bridge", r"training_results_v6\.\d.*/(?:gpt_oss|deepseek)"),
    ("paddlenlp", r"PaddleNLP|PaddlePaddle|\b\w+-paddle\b"),
    ("torchtune", r"torchtune"),
    ("thunder", r"lightning-thunder(?! pull)"),
    ("litgpt", r"[Ll]it-?[Gg][Pp][Tt]\b"),
    ("megatron-llama", r"Megatron-LLaMA"),
    ("megatron-lm", r"experiments/gpt2-meg/|VocabularyParallelism|LLM-Train-Eval|FlagPerf.*-megatron|[Pp]ai-?Megatron"),
    (
        "megatron-core",
        r"ModelLink|MindSpeed|FlagScale|Megatron-MoE-ModelZoo|dhelix|[Mm]s-swift.*[Mm]egatron|Megatron-FSDP"
        r"|Megatron-SWIFT|Megatron.core_v",
    ),
    ("torchtitan", r"pytorch/ao\b"),
    ("fsdp", r"prime-rl(?!.*torchtitan)|fms-fsdp|[Mm]odalities|OLMo-core|TinyLlama"),
    ("torch_xla", r"torchprime|PyTorch/XLA|torch_xla"),
    ("jax", r"[Ll]evanter|EasyLM|\b[Ff]lax\b"),
    ("mindspore", r"mindformers|MindSpore"),
    ("megatron-lm", r"NVIDIA/Megatron-LM\b"),
)
# Programs over huggingface/transformers: those with FSDP of their own, and those that take what their arguments say.
_FSDP_TRAINERS = r"vectorlm|YaFSDP|llama-(?:recipes|cookbook)|fms-acceleration"
_DEEPSPEED_TRAINERS = r"xtuner|QwenLM/Qwen\b|EasyContext"
_TRAINERS = (
    r"[Mm]s-swift|modelscope/swift|LLaMA-?Factory|[Aa]xolotl|\bTRL\b|alignment-handbook|open-r1|optimum-habana|dlrover"
    r"|huggingface/(?:trl|transformers|peft|accelerate|blog)|[Uu]nsloth|open-instruct|over transformers|SFTTrainer"
    r"|transformers' [Tt]rainer|(?:on|over|of) transformers \d|\bHF Trainer\b|Hugging ?Face [Tt]rainer"
)
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
    (
        "nemo",
        r"(?<!container )(?:NeMo|nemo(?!tron))(?! container)|dgxc|mlcommons/training_results|training_results_v",
        "",
    ),
    ("megascale", r"MegaScale(?!.*Megatron-LM)", ""),
    ("gpt-neox", r"[Nn]eo[Xx](?! 20B)|2304\.01373", ""),
    ("zero-bubble", r"2401\.10241|[Zz]ero[ -][Bb]ubble", ""),
    ("megatron-core", r"[Ss]imu[Mm]ax|\bmcore|_mcore_|Megatron-[Cc]ore", "2025-06"),
    ("primus", r"Primus", ""),
    ("nanotron", r"nanotron", ""),
    ("megatron-deepspeed", r"bigscience|BLOOM", "2022-02"),
    ("megatron-deepspeed", r"Megatron-DeepSpeed|meg-ds|2201\.11990|Deep[Ss]peed and Megatron|GLM-130B", ""),
    ("metaseq", r"metaseq|2205\.01068", ""),
    ("llm-foundry", r"llm-foundry|[Mm]osaic", ""),
    ("hai-llm", r"HAI-LLM|HaiScale|deepseek-ai|2401\.02954|2401\.06066|2405\.04434|2408\.14158|2412\.19437", ""),
    ("llama3", r"2407\.21783", ""),
    ("deepspeed", r"[Dd]eep[Ss]peed", ""),
    ("llm.c", r"llm\.c\b", ""),
    (
        "nanogpt",
        r"[Nn]ano(?:[Gg][Pp][Tt]|chat)|[Mm]in[Gg][Pp][Tt]|GPT(?:-2)? (?:written )?from scratch|plain (?:Py)?[Tt]orch",
        "",
    ),
    ("fsdp", r"FSDP|HSDP|SemiAnalysis|2501\.00656|2302\.13971|2307\.09288|2307\.08691", ""),
    ("jax", r"PaLM|\bJAX\b|T5X|GSPMD", ""),
    ("megatron-lm", r"Megatron[- ]LM|\b[Mm]egatron\b|2104\.04473|2205\.05198|2006\.09503|1909\.08053", ""),
    ("torch", r"(?:own|raw) Py[Tt]orch|\bDDP\b|DistributedDataParallel|torch\.(?:autocast|amp)", ""),
)
# Megatron-LM of these months and later is Megatron Core with Transformer Engine, unless a text says otherwise.
_CORE_SINCE = "2024-07"
_LEGACY = r"legacy|local (?:transformer )?impl"


def software_facts(row: dict[str, str]) -> dict[str, str]:
    """The software's column, with its month behind an @; the month alone where no text names a framework."""
    texts = " ".join(row.get(name) or "" for name in ("source", "model", "notes"))
    framework, usual_month = framework_of(texts, row.get("zero_stage") or "")
    month = month_of(texts, row.get("source") or "") or usual_month
    if not framework:
        return {"software": "", "date": month}
    if framework == "megatron-lm" and (month >= _CORE_SINCE or _needs_core(row)) and not re.search(_LEGACY, texts):
        framework = "megatron-core"
    return {"software": f"{framework}@{month}" if month else framework, "date": ""}


def _needs_core(row: dict[str, str]) -> bool:
    """True for products in fp8 and narrower, which Megatron-LM has by Transformer Engine alone, and for Blackwell."""
    precision, device = row.get("precision") or "", row.get("gpu") or ""
    return re.search(r"fp8|fp4", precision) is not None or re.search(r"\bG?B[23]00\b", device) is not None


def framework_of(texts: str, zero_stage: str) -> tuple[str, str]:
    """The framework that texts name, and the month that it has where they have none; ("", "") if they name none."""
    if repository := next((name for name, pattern in REPOSITORIES if re.search(pattern, texts)), ""):
        return repository, ""
    if trainer := _over_transformers(texts, zero_stage):
        return trainer, ""
    return next(((name, month) for name, pattern, month in FRAMEWORKS if re.search(pattern, texts)), ("", ""))


def _over_transformers(texts: str, zero_stage: str) -> str:
    """The framework that shards the model of a program over transformers; "" if texts name no such program."""
    has_fsdp = re.search(_FSDP_TRAINERS, texts) is not None
    has_deepspeed = re.search(_DEEPSPEED_TRAINERS, texts) is not None
    if not (has_fsdp or has_deepspeed or re.search(_TRAINERS, texts)):
        return ""
    has_liger = re.search(r"\b[Ll]iger", texts) is not None and not re.search(r"\b(?:no|without) [Ll]iger", texts)
    says_deepspeed = re.search(r"[Dd]eep[Ss]peed|ZeRO-[123O]|ds_config", texts) is not None
    only_deepspeed = zero_stage in ("1", "2") and "FSDP" not in texts  # stage 3 may be either's
    if not has_fsdp and (has_deepspeed or says_deepspeed or only_deepspeed):
        return "deepspeed-liger" if has_liger else "deepspeed"
    return "liger" if has_liger else "transformers"


# The months of MLPerf Training's rounds.
MLPERF_ROUNDS = {
    "2.0": "2022-06", "2.1": "2022-11", "3.0": "2023-06", "3.1": "2023-11", "4.0": "2024-05", "4.1": "2024-10",
    "5.0": "2025-05", "5.1": "2025-10", "6.0": "2026-05",
}  # fmt: skip
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_MONTH = {name[: length or None]: f"{number:02d}" for number, name in enumerate(_MONTHS, 1) for length in (0, 3)}
# Releases, by the pattern of a name before a version, as each project's list of releases has them.
RELEASES = {
    r"(?:Py[Tt]orch|\b[Tt]orch)": (
        "1.7 2020-10, 1.8 2021-03, 1.9 2021-06, 1.10 2021-10, 1.11 2022-03, 1.12 2022-06, 1.13 2022-10, 2.0 2023-03, "
        "2.1 2023-10, 2.2 2024-01, 2.3 2024-04, 2.4 2024-07, 2.5 2024-10, 2.6 2025-01, 2.7 2025-04, 2.8 2025-08, "
        "2.9 2025-10, 2.10 2026-01"
    ),
    r"[Dd]eep[Ss]peed(?: AutoTP)?": (
        "0.3 2020-09, 0.4 2021-06, 0.5 2021-08, 0.6 2022-03, 0.7 2022-07, 0.8 2023-01, 0.9 2023-04, 0.10 2023-07, "
        "0.11 2023-10, 0.12 2023-11, 0.13 2024-01, 0.14 2024-04, 0.15 2024-08, 0.16 2024-11, 0.17 2025-06, 0.18 2025-10"
    ),
    r"(?:core_|[Mm]egatron[- ][Cc]ore ?|\bmcore )": (
        "0.5 2024-01, 0.6 2024-04, 0.7 2024-06, 0.8 2024-08, 0.9 2024-10, 0.10 2024-12, 0.11 2025-03, 0.12 2025-05, "
        "0.13 2025-07, 0.14 2025-10, 0.15 2025-12, 0.16 2026-02"
    ),
    r"\b[Tt]ransformers": (
        "4.28 2023-04, 4.31 2023-07, 4.34 2023-10, 4.36 2023-12, 4.38 2024-02, 4.40 2024-04, 4.42 2024-06, "
        "4.44 2024-08, 4.46 2024-10, 4.48 2025-01, 4.50 2025-03, 4.51 2025-04, 4.53 2025-06, 4.55 2025-08, "
        "4.57 2025-10, 5.0 2026-01"
    ),
    r"(?:[Tt]ransformer[ -]?[Ee]ngine|\bTE)": (
        "1.0 2023-12, 1.5 2024-04, 1.9 2024-08, 1.12 2024-12, 2.0 2025-02, 2.3 2025-05, 2.8 2025-10, 2.10 2025-12"
    ),
    r"(?:flash[_-]attn|FlashAttention)": (
        "1.0 2023-04, 2.0 2023-07, 2.3 2023-09, 2.4 2023-12, 2.5 2024-01, 2.6 2024-07, 2.7 2024-11, 2.8 2025-06"
    ),
    r"torchtitan": "0.1 2025-06, 0.2 2025-10",
}
# Containers and products that are called by year and month.
_CALENDAR = (
    r"(?:NeMo|nemo|Megatron-Bridge|ngc|NGC|nvcr\S*|Py[Tt]orch|container)(?: container)?[:_ -]*v?"
    r"(2\d)\.(0[1-9]|1[0-2])\b",
    r"\b(2\d)\.(0[1-9]|1[0-2])(?:\.\d+)? (?:NeMo |NGC )?container",
    r"rocm/\S+:v(2\d)\.(\d{1,2})(?!\d)",
)


def month_of(texts: str, source: str) -> str:
    """The month of a run: a date behind the framework's name, its preprint's number, a date of a file, a date in
    words, the newest release that texts name, else the middle of its source's year."""
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
    if month := dated(source) or dated(texts):
        return month
    if month := newest_release(texts):
        return max(month, model_month(texts))
    years = re.findall(r"\b20[12]\d\b", source)
    return f"{max(years)}-06" if years else ""


# Months in which models came out; no run is older than its model.
MODELS = {
    "2023-02": r"\bLLaMA\b", "2023-07": r"[Ll]lama[ -]?2", "2023-08": r"\bQwen\b", "2023-09": r"Mistral",
    "2023-12": r"Mixtral", "2024-02": r"Gemma", "2024-04": r"[Ll]lama[ -]?3", "2024-05": r"DeepSeek-?V2",
    "2024-06": r"Gemma[ -]?2|Qwen[ -]?2", "2024-07": r"[Ll]lama[ -]?3\.[1-3]", "2024-09": r"Qwen[ -]?2\.5",
    "2024-12": r"DeepSeek-?V3", "2025-03": r"Gemma[ -]?3", "2025-04": r"Qwen[ -]?3|[Ll]lama[ -]?4",
    "2025-08": r"GPT-OSS",
}  # fmt: skip


def model_month(texts: str) -> str:
    """The month of the newest model that texts name; "" if they name none of these."""
    return max((month for month, pattern in MODELS.items() if re.search(pattern, texts)), default="")


def dated(text: str) -> str:
    """The month of the last date in a text, in words or in digits."""
    months = [f"{year}-{_MONTH[name]}" for name, year in re.findall(rf"\b({'|'.join(_MONTH)})\.? (20[12]\d)\b", text)]
    months += [f"{year}-{month}" for year, month in re.findall(r"\b(20[12]\d)-(0[1-9]|1[0-2])(?:-\d\d)?\b", text)]
    months += [f"{y}-{_MONTH[m]}" for m, y in re.findall(rf"\b({'|'.join(_MONTH)})\.? \d\d?, (20[12]\d)\b", text)]
    return max(months, default="")


def newest_release(texts: str) -> str:
    """The month of the newest release that texts name; "" if they name none that is known."""
    months = [f"20{year}-{int(month):02d}" for pattern in _CALENDAR for year, month in re.findall(pattern, texts)]
    for name, releases in RELEASES.items():
        for version in re.findall(rf"{name}[ =]*(?:version )?v?(\d\.\d+)", texts):
            months.append(_month_of_release(releases, version))
    return max(months, default="")


def _month_of_release(releases: str, version: str) -> str:
    """The month of a version, or of the newest known one before it; "" before all."""
    months = (release.split() for release in releases.split(", "))
    return max((month for known, month in months if _parts(known) <= _parts(version)), default="")


def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
