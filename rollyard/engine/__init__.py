"""Station 8: token ids in, token ids and logprobs out. `embedded` decodes with torch; `fake` is the scripted double."""
