"""Tokens: tokenizers, renderers (messages → tokens and back), parsers of tool calls, and sequences with masks."""
