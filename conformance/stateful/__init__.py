"""What the suites of stateful parts share: stories of calls, their search, laws, mutants."""
