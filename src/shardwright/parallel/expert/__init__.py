"""Expert parallel: tokens on their way to their experts, and the products of many experts."""
