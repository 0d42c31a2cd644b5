"""Context parallel: attention over a sequence that is sharded over ranks."""
