"""Marks that a token carries in addition to its id: data write them, the model reads them
(parallel/context/document_mask.py).

A token that begins a document is stored as -1 - id, which is negative. A token without a loss, such as a user's turn in
a chat, is stored as id + UNCOUNTED: ids of vocabularies are far smaller.

A token that belongs to no document and only fills a sample up is an id of 0 plus UNCOUNTED plus FILLING. The first of
them begins a document, which separates the filling from the document before: -1 - FILLING.
"""

UNCOUNTED = 1 << 40
FILLING = 1 << 41
