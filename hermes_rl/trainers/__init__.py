"""Feed trainers: the interface of a trainer, and the mode that serves one."""
