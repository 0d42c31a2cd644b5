"""Does what is asked for go together? Every fault, with its arithmetic and a way out."""
