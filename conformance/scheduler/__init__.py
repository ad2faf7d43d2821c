"""The conformance suite of schedulers: laws, a state machine in tiny worlds, mutants."""
