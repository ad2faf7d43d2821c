"""The attention backend keeps every law of the conformance suite."""

from jackfield_example.attention import LoopBackend

from jackfield.conformance.attention.contract import AttentionContract


class TestLoopBackend(AttentionContract):
    backend = LoopBackend
