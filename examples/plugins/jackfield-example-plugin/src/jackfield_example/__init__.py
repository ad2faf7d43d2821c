"""Example parts for Jackfield."""
