"""GLM-4.7 and 5: the format of GLM-4.5, written without line breaks."""

from __future__ import annotations

from hermes_rl.tokens.parsers.glm45 import Glm

PARSER = Glm()
