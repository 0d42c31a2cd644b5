"""One step told, as text and tables."""
