"""Atropos environments: the base class for hand-written ones, and the class that a spec compiles to.

Only modules of this package import atroposlib.
"""

from hermes_rl.tokens.hub import auto_tokenizer

auto_tokenizer()  # import it before atroposlib does: that would import torch, or warn that models need it
