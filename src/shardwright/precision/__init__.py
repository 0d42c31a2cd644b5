"""Number types: fp8 operands of matrix products, and the loss scale of fp16; independent of layers and ranks."""
