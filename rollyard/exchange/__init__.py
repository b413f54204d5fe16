"""Two jobs that share nothing but a folder: one generates, the other trains."""
