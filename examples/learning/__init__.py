"""A small policy that learns through hermes-rl: a transformer, its server, and a GRPO trainer on run-api."""
