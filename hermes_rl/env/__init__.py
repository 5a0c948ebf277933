"""The door for environments written by hand, and what a spec compiles to. Its modules alone import atroposlib."""

from hermes_rl.tokens.hub import without_advice

without_advice()  # atroposlib imports the library, which says that models need PyTorch; nothing here needs models
