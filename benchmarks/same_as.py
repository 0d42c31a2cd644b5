"""Does this checkout do what another one did? Commands of both, and the numbers that they print, compared.

    python benchmarks/same_as.py ../before
    python benchmarks/same_as.py ../before --only train

The predictions are compared exactly: every row of `validate`, `estimate` and `plan` of every job in the catalog,
`explain` of some, `schedule --compare`. Trained are plans that cover the strategies, 20 steps each: losses and gradient
norms must have the same bits. Both checkouts run with the interpreter that runs this script. The exit status is 1 where
anything differs.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
PATIENCE_S = 900.0
SHAPES = (("4", "8"), ("8", "32"))
EXPLAINED = ("quickstart", "quickstart-moe", "llama3-405b-16k", "gpt-100b-32xa100")
TIMES = ("seconds", "search_s", "took_s")  # fields that say how long the command itself took
SMALL = (
    "model.layers=4", "model.hidden=64", "model.ffn=96", "model.vocab=512", "model.sequence=64",
    "batch.global_batch_size=16", "optimizer.steps=20", "optimizer.warmup_steps=2", "run.log_every=1",
    "run.eval_every=10", "run.eval_batches=1", "run.sample_tokens=0",
    f'data.path="{HERE / "benchmarks" / "README.md"}"',
)  # fmt: skip
PLANS: dict[str, tuple[str, ...]] = {
    "one": ("plan={}",),
    "dp2-zero1": ("plan={dp=2, zero=1}",),
    "dp2-zero2-offload": ("plan={dp=2, zero=2, offload_optimizer=0.5}",),
    "dp4-zero3-hybrid": ("plan={dp=4, zero=3, zero_ranks=2}",),
    "tp2-sp": ("plan={tp=2, sequence_parallel=true, microbatch_size=2}",),
    "pp4-1f1b": ("plan={pp=4, microbatch_size=2}",),
    "pp2-zb-v-recompute": ('plan={pp=2, schedule="zb-v", recompute="full"}',),
    "pp2-dualpipev-zero3": ('plan={pp=2, dp=2, schedule="dualpipev", zero=3}',),
    "pp2-dualpipe-tp2": ('plan={pp=2, tp=2, schedule="dualpipe"}',),
    "cp2-ring-bf16": ("plan={cp=2, microbatch_size=2}", 'precision.compute="bf16"'),
    "pp2-pipedream": ('plan={pp=2, schedule="pipedream"}', "optimizer.clip_grad_norm=0.0"),
    "dp2-powersgd-fp8": ('plan={dp=2, compress="powersgd"}', 'precision.float8="rowwise"'),
    "ep2-experts": ("plan={dp=2, ep=2}", "model.moe={experts=4, top_k=2, ffn=48}"),
    "pp2-zb-h1": ('plan={pp=2, schedule="zb-h1"}',),
    "pp2-interleaved-tp2": ('plan={pp=2, tp=2, schedule="interleaved-1f1b", virtual_stages=2}',),
    "pp2-2bw": ('plan={pp=2, schedule="pipedream-2bw"}', "optimizer.clip_grad_norm=0.0"),
    "zero1-offload-activations": ('plan={dp=2, zero=1, recompute="full", offload_activations=true}',),
    "dp2-zero3-offload-parameters": ("plan={dp=2, zero=3, offload_optimizer=1.0, offload_parameters=true}",),
    "cp2-ulysses": ('plan={cp=2, cp_method="ulysses", microbatch_size=2}',),
    "cp2-gathered-zb-v": ('plan={cp=2, pp=2, cp_method="all-gather", schedule="zb-v"}',),
    "tp2-fp8-delayed": ("plan={tp=2}", 'precision.compute="bf16"', 'precision.float8="delayed"'),
    "dp2-zero1-fp8-blockwise": ("plan={dp=2, zero=1}", 'precision.compute="bf16"', 'precision.float8="blockwise"'),
    "fp16-loss-scale": ("plan={dp=2}", 'precision.compute="fp16"'),
    "ep2-tp2-sigmoid": (
        "plan={dp=2, tp=2, ep=2, expert_tp=1, sequence_parallel=true}",
        'model.moe={experts=4, top_k=2, ffn=48, gate="sigmoid", shared_experts=1, bias_update=0.01}',
    ),
    "ep2-dualpipev-fp8": (
        'plan={dp=2, pp=2, ep=2, schedule="dualpipev"}', 'model.moe={experts=4, top_k=2, ffn=48}',
        'precision.compute="bf16"', 'precision.float8="rowwise"', "precision.float8_dispatch=true",
    ),
    "ep2-switch-capacity": (
        "plan={dp=2, ep=2}", 'model.moe={experts=4, ffn=48, gate="switch", capacity_factor=1.25}',
    ),
    "dp2-int8": ('plan={dp=2, compress="int8"}',),
    "dp2-topk-lion": ('plan={dp=2, compress="topk"}', 'optimizer.name="lion"'),
    "dp2-zero2-muon": ("plan={dp=2, zero=2}", 'optimizer.name="muon"'),
    "tp2-zero1-adafactor": ("plan={dp=2, tp=2, zero=1}", 'optimizer.name="adafactor"'),
    "mtp-latent": (
        "plan={dp=2, pp=2}", "model.mtp_layers=1", "model.kv_heads=0", "model.latent={kv_rank=16, rope_dim=8}",
    ),
    "windows-softcap": ("plan={tp=2}", "model.window={size=16, full_every=2}", "model.attention_softcap=20.0"),
}  # fmt: skip


def shardwright(checkout: Path, *arguments: str, folder: Path) -> str:
    """The standard output of a command of a checkout; with its message where it refuses."""
    done = subprocess.run(
        [sys.executable, "-m", "shardwright", *arguments], cwd=folder, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False, env=os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.stdout if done.returncode == 0 else f"{done.stdout}status {done.returncode}: {done.stderr}"


def predictions(checkout: Path, folder: Path) -> Iterator[tuple[str, Any]]:
    """The answers of the commands that predict, by the command."""
    rows = folder / "rows.csv"
    truth = HERE / "benchmarks" / "truth" / "runs.csv"
    yield (
        "validate",
        json.loads(shardwright(checkout, "validate", str(truth), "--json", "--out", str(rows), folder=folder)),
    )
    with rows.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield f"validate {row['id']}", row
    for job in jobs():
        for command in ("estimate", "plan"):
            yield f"{command} {job}", parsed(shardwright(checkout, command, job, "--json", folder=folder))
    for job in EXPLAINED:
        yield f"explain {job}", parsed(shardwright(checkout, "explain", job, "--json", folder=folder))
    for p, m in SHAPES:
        command = ("schedule", "--compare", "--stages", p, "--microbatches", m, "--json")
        yield " ".join(command), parsed(shardwright(checkout, *command, folder=folder))


def jobs() -> list[str]:
    """The jobs of this checkout's catalog."""
    folder = next(HERE.glob("src/shardwright/*/catalog/jobs"))
    return sorted(file.stem for file in folder.glob("*.toml"))


def trained(checkout: Path, folder: Path) -> Iterator[tuple[str, Any]]:
    """Loss and gradient norm of every step, and the losses of evaluations, by the plan."""
    for name, overrides in PLANS.items():
        run = folder / name
        sets = [part for override in (*SMALL, *overrides, f'run.folder="{run}"') for part in ("--set", override)]
        printed = shardwright(checkout, "train", "quickstart", *sets, folder=folder)
        metrics = run / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        kept = [{key: line[key] for key in line if "loss" in key or key in ("step", "grad_norm")} for line in lines]
        yield f"train {name}", kept if len(kept) >= 20 else printed


def parsed(text: str) -> Any:
    """JSON as values, without what differs from run to run; anything else as it is."""
    try:
        return without_times(json.loads(text))
    except ValueError:
        return text


def without_times(value: Any) -> Any:
    """A JSON value without the fields that say how long the command took."""
    if isinstance(value, dict):
        return {key: without_times(of) for key, of in value.items() if key not in TIMES}
    return [without_times(of) for of in value] if isinstance(value, list) else value


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Where two values differ, leaf by leaf."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            if key in before and key in after:
                yield from differences(before[key], after[key], f"{where}.{key}")
            else:
                yield f"{where}.{key} is only {'before' if key in before else 'after'}"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for n, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{where}[{n}]")
    elif before != after:
        yield f"{where}: {str(before)[:200]!r} before, {str(after)[:200]!r} after"


def main() -> None:
    """Compare, and say what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--only", choices=["predict", "train"])
    arguments = parser.parse_args()
    num_compared = num_different = 0
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / which for which in ("before", "after")]
        for folder in folders:
            folder.mkdir()
        for kind, collect in (("predict", predictions), ("train", trained)):
            if arguments.only not in (None, kind):
                continue
            both = zip(collect(arguments.before.resolve(), folders[0]), collect(HERE, folders[1]), strict=True)
            for (what, before), (other, after) in both:
                result = list(differences(before, after)) if what == other else [f"{other} in its place"]
                num_compared, num_different = num_compared + 1, num_different + bool(result)
                if not result:
                    print(f"{what}: the same", flush=True)
                for line in result[:5]:
                    print(f"{what}{line}", flush=True)
        print(f"{num_compared} compared, {num_different} differ")
    sys.exit(bool(num_different))


if __name__ == "__main__":
    main()
