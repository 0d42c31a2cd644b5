"""Delayed scaling: scales from the largest values of past steps. The recipe of NVIDIA's Transformer Engine, in its
format "hybrid": e4m3, and e5m2 for gradients."""

from shardwright.config.float8_facts import Float8Facts

FACTS = Float8Facts(name="delayed", place=10, activation="tensor", weight="tensor", gradient="e5m2", delayed=True)
