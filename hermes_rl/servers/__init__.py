"""Model servers: clients and their pools, transport, retries, API formats, and the scripted policy."""
