"""Feeding trainers: the seam that a trainer stands behind, and the mode that serves one."""
