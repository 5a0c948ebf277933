"""The agent of a rollout: everything between a prompt and an `AgentResult`.

Owns the loop of model calls and tool calls, agent programs with their endpoint and API dialects, seats of several
agents, simulated users, and the evidence that rewards get.

Entry points: `HermesAgentLoop` runs the loop, `ProgramDriver` an agent program, `MultiAgentEpisode` several seats.
Left to others: calling a model (`servers`), executing tools (`tools`), and grading (`scoring`, `rollouts`).
"""
