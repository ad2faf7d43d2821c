"""The attention conformance suite: what an attention backend owes, as laws that can be run."""
