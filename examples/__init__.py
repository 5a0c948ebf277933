"""Programs that use hermes-rl; each runs from a checkout."""
