"""Tensor parallel: parameters and products that are cut over the tp axis."""
