"""Tokens: tokenizers, renderers (messages → tokens and back), parsers of tool calls, and sequences with masks.

Owns the separation of template and text, and the proof that trained tokens are the sampled ones.

Entry points: `load_tokenizer` and `make_renderer` load, `Transcript` keeps the tokens of a rollout.
Left to others: sampling (`servers`), and what is trained (`rollouts`).
"""
