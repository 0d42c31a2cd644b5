"""Tensor parallel: parameters and products sharded over the tp axis."""
