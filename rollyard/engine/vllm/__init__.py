"""vLLM, in a process that Rollyard owns."""
