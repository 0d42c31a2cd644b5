"""Weights in Hugging Face's files: their names, and their places in the tensors of this decoder."""
