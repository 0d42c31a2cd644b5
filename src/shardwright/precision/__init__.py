"""Number types: fp8 operands of matrix products, and the loss scale of fp16. Knows nothing of layers or ranks."""
