"""Schedulers and scheduling policies."""
