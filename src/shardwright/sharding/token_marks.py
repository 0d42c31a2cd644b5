"""What a token says beside its id: data write it, the model reads it (parallel/context/document_mask.py).

A token that begins a document is given as -1 - id, which is negative. One of which no loss is taken, such as what a
user says in a chat, is given as id + UNCOUNTED: ids of vocabularies are far smaller.
"""

UNCOUNTED = 1 << 40
