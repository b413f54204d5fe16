"""Built-in tasks: endless problems with known answers, from a seed."""
