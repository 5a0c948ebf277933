"""Code of others in processes of its own: users' rewards, states and tools, and work over what an agent wrote."""
