"""Tools: what an agent can call, and the execution of its calls.

Owns the built-in toolsets, Python tools, MCP servers, tools of hermes-agent, states in processes, and artifacts.

Entry points: `toolkit_of` makes the tools of a group, `execute_calls` runs the calls of a turn, `ToolRuntime` has the
resources of one rollout.
Left to others: isolation (`sandbox`, `user_code`), and checking arguments against a schema (`spec`).
"""
