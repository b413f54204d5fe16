"""Station 5: pack. Judged groups become training rows in micro-batches under a token budget."""
