"""A scale for each 128 numbers of a token, and for each 128 x 128 of a weight. DeepSeek-AI 2024 (DeepSeek-V3, arXiv
2412.19437, section 3.3): tiles are small enough for e4m3 everywhere."""

from shardwright.config.float8_facts import Float8Facts

FACTS = Float8Facts(name="blockwise", place=40, activation="tile", weight="block", gradient="e4m3")
