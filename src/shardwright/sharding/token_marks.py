"""Marks that a token carries besides its id: data write them, the model reads them (parallel/context/document_mask.py).

A token that begins a document is given as -1 - id, which is negative. One of which no loss is taken, such as what a
user says in a chat, is given as id + UNCOUNTED: ids of vocabularies are far smaller.

A token that belongs to no document and only fills a sample up is an id of 0 with both UNCOUNTED and FILLING added; the
first of them, which keeps the others apart from the document before, begins a document: -1 - FILLING.
"""

UNCOUNTED = 1 << 40
FILLING = 1 << 41
