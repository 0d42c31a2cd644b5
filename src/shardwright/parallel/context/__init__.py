"""Context parallel: attention over a sequence that is cut over ranks."""
