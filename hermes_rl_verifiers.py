"""What `vf-eval hermes-rl-verifiers` and prime-rl load: verifiers finds no module inside of a package."""

from hermes_rl.integrations.verifiers import HermesHarness, HermesTaskset

__all__ = ["HermesHarness", "HermesTaskset"]
