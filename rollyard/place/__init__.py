"""Where it runs: the placements as a pure state machine, and the runtimes that host stations."""
