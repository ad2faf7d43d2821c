"""Attention backends, one module each."""
