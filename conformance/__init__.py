"""What proves a part right: conformance suites with their laws, oracles, mutants and reports."""
