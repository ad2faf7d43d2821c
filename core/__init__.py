"""Contracts, plain data types, and the engine that runs on them; imports nothing else of ours."""
