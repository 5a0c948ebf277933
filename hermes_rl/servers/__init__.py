"""Model servers: clients and their pools, transport, retry, dialects, and the scripted policy."""
