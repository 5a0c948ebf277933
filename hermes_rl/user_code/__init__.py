"""Run user code in separate processes: rewards, states, tools, and work on an agent's output."""
