"""What is happening: time by phase, the records of steps, the report, the terminal view, metric sinks."""
