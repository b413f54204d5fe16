"""Station 1: what to ask. A resumable stream of prompts as token ids."""
