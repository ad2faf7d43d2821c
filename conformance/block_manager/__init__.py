"""The conformance suite of block managers: laws, a state machine in tiny worlds, mutants."""
