"""What a run left, looked at: its steps, groups and rollouts, whether all of it is sound, and out of it into other files."""
