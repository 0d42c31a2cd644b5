"""Settings of axolotl and LLaMA-Factory as the classes of their own packages read them, and as a job has them.

    python tests/interchange/trainer_classes.py CLONES     # the examples of both, as CLONES/OWNER+NAME/repo

`make interchange` installs the packages without what they need to train.
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).parents[1])

from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.interchange.foreign_job import job_of_texts
from shardwright.interchange.imported import Asked
from shardwright.interchange.system import SOURCES

Values = dict[str, Any]
# Options that ask for a GPU, a package or a file where transformers reads them, or that its releases from 5 on lack.
_NOT_PARSED = (
    *("deepspeed", "bf16", "fp16", "tf32", "fsdp", "fsdp_config", "report_to", "fp8", "plot_loss", "warmup_ratio"),
    "fsdp_transformer_layer_cls_to_wrap",
)


def job_values(job: JobSpec) -> Values:
    """The settings of a job that both classes have, too."""
    adapter = job.model.adapter
    values = {
        "microbatch": job.plan.microbatch_size,
        "accumulation": job.num_microbatches,
        "sequence": job.model.sequence,
        "learning rate": job.optimizer.learning_rate,
        "weight decay": job.optimizer.weight_decay,
        "clipping": job.optimizer.clip_grad_norm,
        "computed again": job.plan.recompute != "none",
        "numbers": job.precision.compute,
    }
    if adapter.rank:
        values |= {"rank": adapter.rank, "alpha": adapter.alpha, "4 bits": adapter.base == "nf4"}
    return values


@cache
def axolotl_names() -> frozenset[str]:
    """The names of axolotl's options. It drops others without a word."""
    from axolotl.utils.schemas.config import AxolotlInputConfig

    names = set(AxolotlInputConfig.model_fields)
    for field in AxolotlInputConfig.model_fields.values():
        alias = field.validation_alias
        names |= {str(name) for name in getattr(alias, "choices", [alias]) if name is not None}
    return frozenset(names)


def axolotl_values(options: Mapping[str, Any]) -> Values:
    """The settings of a file as axolotl's schema has them, on a device that has bf16. ValueError if it refuses it."""
    from axolotl.utils.schemas.config import AxolotlInputConfig

    read = AxolotlInputConfig(**options)
    is_fp16 = bool(read.fp16 or read.float16)
    is_bf16 = bool(read.bfloat16) or read.bf16 in (True, "full") or (read.bf16 == "auto" and not is_fp16)
    accumulation = read.gradient_accumulation_steps
    values = {
        "microbatch": read.micro_batch_size,
        "accumulation": read.batch_size // read.micro_batch_size if read.batch_size else accumulation,
        "sequence": read.sequence_len,
        "learning rate": float(read.learning_rate),
        "weight decay": float(read.weight_decay or 0),
        "clipping": 1.0 if read.max_grad_norm is None else float(read.max_grad_norm),
        "computed again": bool(read.gradient_checkpointing),
        "numbers": "bf16" if is_bf16 else "fp16" if is_fp16 else "float32",
    }
    if read.adapter:
        # The base is loaded in 4 bits by the word qlora (axolotl/loaders/model.py).
        values |= {"rank": read.lora_r, "alpha": read.lora_alpha}
        values["4 bits"] = read.adapter == "qlora" and bool(read.load_in_4bit)
    return values


def llama_factory_values(options: Mapping[str, Any]) -> Values:
    """The settings of a file as LLaMA-Factory's classes of arguments have them. ValueError if they refuse it."""
    os.environ.setdefault("DISABLE_VERSION_CHECK", "1")  # it names the releases that it trains with
    from llamafactory.hparams import parser
    from transformers import HfArgumentParser

    plain = {name: value for name, value in options.items() if name not in _NOT_PARSED}
    plain["output_dir"] = str(Path(tempfile.gettempdir()) / "unused")
    model, data, training, finetuning, _ = HfArgumentParser(parser._TRAIN_ARGS).parse_dict(plain)
    numbers = next((name for name in ("bf16", "fp16") if options.get(name) is True), "float32")
    values = {
        "microbatch": training.per_device_train_batch_size,
        "accumulation": training.gradient_accumulation_steps,
        "sequence": data.cutoff_len,
        "learning rate": float(training.learning_rate),
        "weight decay": float(training.weight_decay),
        "clipping": float(training.max_grad_norm),
        "computed again": not model.disable_gradient_checkpointing,
        "numbers": numbers,
    }
    if finetuning.finetuning_type == "lora":
        is_in_4_bits = model.quantization_bit == 4
        values |= {"rank": finetuning.lora_rank, "alpha": float(finetuning.lora_alpha), "4 bits": is_in_4_bits}
    return values


READERS: dict[str, Callable[[Mapping[str, Any]], Values]] = {
    "axolotl": axolotl_values,
    "llamafactory": llama_factory_values,
}
EXAMPLES = {
    "axolotl": ("axolotl-ai-cloud/axolotl", "examples"),
    "llamafactory": ("hiyouga/LLaMA-Factory", "examples"),
}
_ENGINES = ("deepspeed", "fsdp", "fsdp_config")
LLAMA = (
    '{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, '
    '"num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "rms_norm_eps": 1e-05, '
    '"max_position_embeddings": 131072, "tie_word_embeddings": false}'
)


def examples(system: str, clones: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of each YAML among the examples in a program's repository."""
    repository, folder = EXAMPLES[system]
    git = ["git", "--git-dir", str(clones / repository.replace("/", "+") / "repo")]
    listing = subprocess.run(
        [*git, "ls-tree", "-r", "--name-only", "HEAD", folder], capture_output=True, text=True, check=True
    ).stdout
    for name in listing.splitlines():
        if name.endswith((".yaml", ".yml")):
            show = subprocess.run([*git, "show", f"HEAD:{name}"], capture_output=True, text=True, check=True)
            yield name, show.stdout


def compared(system: str, text: str) -> str | Values:
    """The settings of a file that differ, as (here, there); or who refuses it. The engine's file is left out."""
    options = {name: value for name, value in yaml.safe_load(text).items() if name not in _ENGINES}
    texts = {"job.yaml": yaml.safe_dump(options), "config.json": LLAMA}
    try:
        job = job_of_texts(SOURCES[system], texts, Asked(cluster=AskedCluster(1, "h100-sxm")), "an example").job
    except PlanError:
        return "refused here"
    try:
        there = READERS[system](options)
    except Exception:  # whatever validators raise
        return "refused there"
    return {name: (value, there.get(name)) for name, value in job_values(job).items() if value != there.get(name)}


def main(clones: Path) -> int:
    """Compare the examples that both read. 1 if a setting of one differs."""
    counts: Counter[str] = Counter()
    for system in READERS:
        for name, text in examples(system, clones):
            outcome = compared(system, text)
            if isinstance(outcome, dict) and outcome:
                print(name, outcome)
            kind = outcome if isinstance(outcome, str) else "other settings" if outcome else "equal"
            counts[f"{system}: {kind}"] += 1
    print(dict(counts))
    return int(any("other settings" in key for key in counts))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
