"""Model servers: roles, transport, retry, balance, concurrency, and the scripted policy."""
