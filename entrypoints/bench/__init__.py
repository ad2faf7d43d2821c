"""Times attention backends side by side, each checked before it is timed."""
