"""Adafactor, without momentum. Shazeer and Stern 2018 (arXiv 1804.04235)."""

from shardwright.config.optimizer_facts import OptimizerFacts

FACTS = OptimizerFacts(
    name="adafactor",
    place=50,
    title="Adafactor",
    rule="shardwright.parallel.optimizers.elementwise:over_its_root",
    in_blocks=True,
    moments=lambda spec: ("exp_avg_sq",),
    reads=frozenset({"beta2"}),
    matrix_update="factored",
    matrix_rule="shardwright.parallel.optimizers.elementwise:nothing",
)
