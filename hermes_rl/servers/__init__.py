"""Model servers: clients and their pools, transport, retries, API formats, and the scripted policy.

Owns every call of a model, its check against a schema, token-level sampling, and the meter of usage and cost.

Entry points: `create_client` returns the `ModelClient` of a role, `Usage` counts its calls.
Left to others: what is asked (`agent`), and tokenizers and renderers (`tokens`).
"""
