"""What happened: the durable record of a run, which recovery stands on and people browse with plain SQL."""
