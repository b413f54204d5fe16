"""Station 4: compare. Rewards become advantages: of a group, of a whole batch, or token by token."""
