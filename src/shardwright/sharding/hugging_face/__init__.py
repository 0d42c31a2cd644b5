"""Weights as Hugging Face's files have them: their names, and how they lie in the tensors of this decoder."""
