"""Station 4: compare. Rewards of a group become advantages."""
