"""Megatron-LM's command line: its flags as settings, those that change nothing of a plan, and how they are written."""

import re
import shlex
from typing import Any

# Beginnings of flags that say nothing of the plan, by what they are about.
_WITHOUT_EFFECT = {
    "logs": "log- no-log- disable-log- tensorboard- wandb- timing- logging- one-logger- no-one-logger enable-one-logger "
            "app-tag- codecarbon otel- moe-per-layer-logging moe-routing-trace record- memory-snapshot profile "
            "use-pytorch-profiler pytorch-profiler nvtx- no-barrier config-logger aml- clearml- steps-per-print",
    "checkpoints": "save load no-save no-load non-persistent ckpt- no-ckpt- async- finetune pretrained- use-checkpoint- "
                   "override- exit- auto-detect- dist-ckpt- use-dist-ckpt no-strict- distrib-optim- replication "
                   "use-persistent- verify-integrity kill-switch universal- adlr- autoresume no-use-tokenizer-model "
                   "use-mp-args disable-use-tokenizer strict-fsdp no-use-checkpoint",
    "data": "data- split train-data- valid- test-data- train-weighted- vocab-file merge-file tokenizer tiktoken num-workers "
            "mock-data no-create-attention no-mmap dataloader reset- eod-mask num-dataset per-split short-seq mask-prob "
            "sample-rate trust-remote no-data- mmap- special-tokens vocab-extra null-tokenizer sft allow-ambiguous "
            "object-storage per-dataset train-sync no-tokenizer create-attention data-impl",
    "evaluation": "eval- start-eval skip-train full-validation multiple-validation validation- test-mode inference- "
                  "flash-decode max-tokens",
    "how processes meet and fail": "distributed- local- lazy-mpu rank node- master- rdzv seed no-check-for check-for rerun- "
                                   "manual-gc no-manual-gc empty-unused exit inprocess- enable-ft calc-ft ft- fault- "
                                   "error-injection straggler disable-straggler run-workload nccl-comm disable-gloo "
                                   "use-sharp sharp- high-priority flight- no-flight te-rng use-cpu-init no-init data-parallel-random "
                                   "init-model-with-meta no-sync deterministic use-mcore-models use-legacy enable-experimental "
                                   "enable-msc disable-msc gpu-sniff check-weight iterations-to-skip result-rejected abort-on "
                                   "sync-tp pp-partition batch-invariant fake-process create-all-gather",
    "how kernels are written": "no-masked- no-bias-swiglu no-bias-dropout no-persist- no-gradient-accumulation use-flash-attn "
                               "attention-backend transformer-impl no-rope-fusion cross-entropy- moe-grouped-gemm "
                               "moe-permute-fusion moe-router-fusion moe-pad-expert use-fused tp-comm- no-tp-comm disable-tp-comm "
                               "no-async-tensor async-tensor apply-layernorm-1p apply-query-key attention-softmax-in "
                               "fp16-lm moe-router-dtype moe-router-padding moe-router-force fp8-margin fp8-interval fp8-amax-compute "
                               "fp8-param keep-fp8 fp32-residual use-te cuda-graph enable-cuda external-cuda use-nccl-ub "
                               "fsdp-double gradient-reduce-div no-gradient-reduce calculate-per-token mla-down moe-single "
                               "init-method-xavier hysteresis min-loss-scale memory-centric rotary-interleaved moe-use-legacy "
                               "no-fp32-residual moe-flex-dispatcher moe-enable-deepep moe-deepep moe-hybridep disable-jit",
    "what overlaps with what": "overlap- no-overlap- delay- defer- wgrad- align- no-align moe-shared-expert-overlap "
                               "microbatch-group ddp- ep-overlap batch-p2p use-ring- no-delay suggested- contigious- "
                               "contiguous- use-contiguous",
    "older ways of saying what is read elsewhere": "DDP-impl ddp-impl no-contiguous deepspeed no-pipeline-parallel zero-stage "
                                                   "use-precision-aware main-grads main-params no-weight-decay-cond cpu-optimizer "
                                                   "use-pin-memory use-torch-optimizer partition-activations synchronize-each "
                                                   "megatron-fsdp- no-position-embedding decrease-batch",
}  # fmt: skip
_BEGINNINGS = tuple(sorted({name for names in _WITHOUT_EFFECT.values() for name in names.split()}))
_WITHOUT = re.compile("|".join(re.escape(name) for name in _BEGINNINGS))


def subject_of(name: str) -> str:
    """What a flag is about that says nothing of the plan; empty where it is not known."""
    found = _WITHOUT.match(name)
    if not found:
        return ""
    return next(subject for subject, names in _WITHOUT_EFFECT.items() if _longest(name) in names.split())


def _longest(name: str) -> str:
    return max((one for one in _BEGINNINGS if name.startswith(one)), key=len)


def settings_of(words: list[str]) -> dict[str, Any]:
    """The flags of a command with their values: one, several, or True for none. Later ones hold."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            # "--fp8-format hybrid" in one word, as quoted parts of arrays are
            name, blank, more = name.partition(" ")
            name = name if name == "DDP-impl" else name.replace("_", "-")
            found[name] = ([value] if equals else []) + (more.split() if blank else [])
        elif name:
            found[name].append(word)
    return {key: True if not values else values[0] if len(values) == 1 else values for key, values in found.items()}


def flag_words(settings: dict[str, Any]) -> list[str]:
    """Lines of a command: each flag with its values."""
    lines = []
    for name, value in settings.items():
        if value is True:
            lines.append(f"--{name}")
        elif value is not False and value is not None:
            values = value if isinstance(value, list) else [value]
            lines.append(" ".join([f"--{name}", *(shlex.quote(value_word(one)) for one in values)]))
    return lines


def value_word(value: Any) -> str:
    """One value as an argument."""
    return repr(value) if isinstance(value, float) else str(value)
