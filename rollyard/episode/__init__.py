"""Several turns instead of one answer: environments play episodes with the policy. Beside station 2."""
