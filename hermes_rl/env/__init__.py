"""Atropos environments: the base class for hand-written ones, and the class that a spec compiles to.

Owns hooks, names and options of the reference design, and everything that needs atroposlib: only modules of this
package import it.

Entry points: `HermesAgentBaseEnv` is the base class, `compile_spec` returns the class of a spec.
Left to others: running rollouts (`rollouts`), and delivery to the trainer (`trainers`).
"""

from hermes_rl.tokens.hub import auto_tokenizer

auto_tokenizer()  # import it before atroposlib does: that would import torch, or warn that models need it
