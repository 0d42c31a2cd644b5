"""Expert parallel: the dispatch of tokens to their experts, and the products of many experts."""
