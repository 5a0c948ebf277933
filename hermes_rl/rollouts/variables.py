"""Select the environment variables that a spec names, directly or through a backend or a toolset, for other processes.

No other variables of the runner are sent to workers. `foreign.environment` selects the variables for user code.
"""

from __future__ import annotations

from collections.abc import Mapping

from hermes_rl.rollouts.sandboxes import named_toolsets
from hermes_rl.sandbox.remote import BACKEND_VARIABLES as OF_BACKENDS
from hermes_rl.spec.model import Spec
from hermes_rl.tools.hermes_toolsets import VARIABLES as OF_TOOLSETS


def key_names(spec: Spec) -> set[str]:
    """Return the names of the variables with keys and headers of model servers and tool servers."""
    servers = [server for role in spec.servers.values() for server in role]
    tools = spec.all_tools.values()
    headers = [*(server.headers_env for server in servers), *(tool.mcp.headers_env for tool in tools if tool.mcp)]
    keys = {server.api_key_env for server in servers if server.api_key_env is not None}
    return keys.union(*(variables_by_header.values() for variables_by_header in headers))


def named_variables(spec: Spec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` that the spec names.

    These are keys and headers, variables listed in `user_code.env`, and variables that its sandbox backend and its
    toolsets of hermes-agent read.
    """
    names = key_names(spec).union(spec.user_code.env, OF_BACKENDS.get(spec.sandbox.backend, ()))
    names = names.union(*(OF_TOOLSETS.get(toolset, ()) for _, toolset in named_toolsets(spec)))
    return {name: environ[name] for name in sorted(names) if name in environ}
