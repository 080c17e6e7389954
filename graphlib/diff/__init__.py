"""Reverse-mode differentiation, and what is computed twice for it to save memory."""
