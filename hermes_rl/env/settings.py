"""From a spec to Atropos' configuration classes."""

from __future__ import annotations

from typing import Any

from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from hermes_rl.env.config import HermesAgentEnvConfig
from hermes_rl.runs.exact import tokenizer_of
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.tokens.tokenizer import small_tokenizer_path

CONCURRENCY = 64
"""Rollouts at a time where the spec does not say and Atropos' own loops, which do not measure, play them."""
MAX_TOKEN_LENGTH = 32768
"""Tokens of a sequence where neither the spec nor the trainer bounds it."""


def env_config(spec: Spec, mode: Mode = "serve") -> HermesAgentEnvConfig:
    """Return the configuration for a mode; what has no key of its own in a spec comes from `env:`."""
    serve, agent, toolsets = spec.serve, spec.agent_for(mode), spec.toolsets
    playing = spec.process if mode == "process" else serve
    fields: dict[str, Any] = {
        "group_size": playing.group_size,
        "total_steps": spec.process.groups if mode == "process" else serve.total_steps,
        "max_token_length": serve.max_token_length or MAX_TOKEN_LENGTH,
        "steps_per_eval": serve.eval_every or -1,
        "rollout_server_url": serve.api_url,
        "ensure_scores_are_not_same": playing.drop_uniform,
        "max_num_workers": max(1, (playing.concurrency or CONCURRENCY) // playing.group_size),
        "tokenizer_name": tokenizer_of(spec) or str(small_tokenizer_path()),
        "include_messages": True,
        "use_wandb": spec.wandb is not None and spec.wandb.mode != "disabled",
        "wandb_name": (spec.wandb.name if spec.wandb else None) or spec.name,
        "enabled_toolsets": list(toolsets.enabled),
        "disabled_toolsets": list(toolsets.disabled),
        "max_agent_turns": agent.max_turns,
        "eval_by": list(spec.evaluate.by),
        "agent_timeout": agent.timeout,
        "agent_task_timeout": agent.task_timeout,
        "agent_temperature": agent.temperature,
        "agent_max_tokens": agent.max_tokens,
        "extra_body": dict(agent.extra_body) or None,
        "terminal_backend": spec.sandbox.backend,
        "terminal_timeout": spec.sandbox.timeout,
        "seed": spec.seed,
    }
    return HermesAgentEnvConfig(**{**fields, **spec.env})


def server_configs(spec: Spec) -> list[APIServerConfig]:
    """One per policy server, without keys: those stay with the role that sends them."""
    return [
        APIServerConfig(
            model_name=server.model or "default",
            base_url=server.base_url or "",
            timeout=int(server.timeout),
            num_max_requests_at_once=server.max_concurrency,
            tokenizer_name=server.tokenizer or "none",
            server_type=server.type if server.type in ("openai", "vllm", "sglang") else "openai",
            health_check=False,
        )
        for server in spec.servers.get("policy", ())
    ]
