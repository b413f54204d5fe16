"""The embedded engine: a paged key-value cache and continuous batching, in plain torch."""
