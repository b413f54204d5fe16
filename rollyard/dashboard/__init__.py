"""A run in a browser: a page on loopback, and the numbers behind it."""
