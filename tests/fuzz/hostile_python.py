"""Configuration functions in Python that are wrong, or meant to do harm to whoever reads them."""

from random import Random

from fuzz import mutations as mutate

# Forms that functions have beside the one that is written: fields put in later, copies, groups, other functions.
PYTHON_FORMS = (
    """from dataclasses import replace
import os
from torchtitan.models.llama3 import model_registry
STEPS = 10
def base(lr=1e-4, **more):
    return Trainer.Config(model_spec=model_registry("8B"), optimizer=default_adamw(lr), training=TrainingConfig(**more))
def job():
    config = base(3e-4, seq_len=4096, steps=STEPS * 2)
    config.parallelism.tensor_parallel_degree = 2
    config.optimizer.param_groups[0].optimizer_kwargs["lr"] = 1e-3
    if config.training.steps > 5 and "model" in ["model"]:
        config.activation_checkpoint = FullAC.Config()
    return replace(config, parallelism=ParallelismConfig(data_parallel_shard_degree=-1))
""",
    """from torchtitan.models.qwen3 import model_registry
def job() -> Trainer.Config:
    spec = model_registry("30B-A3B", moe_comm_backend="deepep", converters=[Float8LinearConverter.Config()])
    config = Trainer.Config(model_spec=spec, activation_checkpoint=None)
    config.optimizer = OptimizersContainer.Config(param_groups=[
        ParamGroupConfig(pattern="bias", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3}),
        ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=dict(lr=int("1"), betas=(0.9, 0.95)))])
    config.training.steps += 5
    config.parallelism.expert_parallel_degree = 4 if config.training.steps else 2
    return config
""",
)
_BOMBS = (
    "return job()",
    "while True: pass",
    "x = [1]; " + "x = x + x; " * 60,
    "c = T.Config(); c.training = c; return c",
    "c = T.Config(); " + "c = T.Config(a=c, b=c, d=c); " * 40 + "return c",
    "c = T.Config(); " + "c = T.Config(a=deepcopy(c), b=c); " * 40 + "return c",
    "x = 9 ** 9 ** 9 ** 9",
    "x = 'a' * 10 ** 12",
    "x = 10 ** 64 * 10 ** 64",
    "x = " + "(" * 150 + "1" + ")" * 150,
    "x = " + "-" * 5000 + "1",
    "x = a" + ".a" * 30_000,
    "x = [" * 90 + "]" * 90,
    "import os; os.system('rm -rf /')",
    "__import__('os').abort()",
    "open('/dev/zero').read()",
    "exec('while 1: pass')",
    "x = os.environ['HOME']; return x",
    "config = os.environ.get('X', 1 / 0)",
    "del config",
    "global STEPS; STEPS = STEPS",
    "config = config",
    "config.training = None",
    "config.training.steps = float('nan')",
    "config.training.seq_len = 1e999",
    "config.parallelism.module_fqns_per_model_part = [['layers.0'], 3, [None]]",
    "config.optimizer.param_groups = []",
    "config.optimizer.param_groups[99] = 1",
    "config.optimizer = 3",
    "config.model_spec = model_registry()",
    "config.model_spec = model_registry(None, converters=[1, [2], {}])",
    "config.activation_checkpoint = MemoryBudgetAC.Config()",
    "config.training[0] = 1",
    "x, y = 1, 2",
    "lambda: 0",
    "yield 3",
    "return {**config}",
    "@",
    "\x00",
    "\t x = 1",
)
_WORDS = (
    "None",
    "-1",
    "True",
    "'8B'",
    "**x",
    "*x",
    "lambda: 0",
    "f'{x}'",
    "[*x]",
    "0x",
    "...",
    "1_0",
    "1j",
    "b'x'",
    "a.b(c)",
)


def mangled_python(random: Random, text: str) -> str:
    """A file with a line, words or values that are wrong."""
    lines = text.splitlines(keepends=True)
    kind = random.randrange(4)
    if kind == 0:
        at = random.randrange(len(lines))
        indented = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        return "".join([*lines[:at], f"{indented}{random.choice(_BOMBS)}\n", *lines[at:]])
    words = text.split("=")
    for _ in range(random.choice([1, 1, 2, 5])):
        at = random.randrange(len(words))
        if kind == 1:
            words[at] = f"{random.choice(_WORDS)}, {words[at].partition(',')[2]}"
        elif kind == 2:
            words[at] = f"{mutate.value(random, 8)!r:.2000}, {words[at].partition(',')[2]}"
        elif len(words) > 1:
            del words[at]
    return "=".join(words)
