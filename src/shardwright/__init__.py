"""Shardwright trains large models on clusters, and says beforehand what will happen."""

__version__ = "0.1.0"
