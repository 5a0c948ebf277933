"""The door for environments written by hand, and what a spec compiles to. Its modules alone import atroposlib."""

from hermes_rl.tokens.hub import auto_tokenizer

auto_tokenizer()  # atroposlib imports it too, and would import torch and hear that models need it
