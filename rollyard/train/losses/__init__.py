"""The policy losses, by the names that `train.loss` has for them: each gives one number for each trained token."""
