"""Tokens: the tokenizer of a policy, the package's own small one, messages → tokens and masks."""
