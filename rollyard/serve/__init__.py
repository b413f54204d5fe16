"""For others: rollouts over HTTP, for trainers elsewhere and for agents that speak to an OpenAI-compatible address."""
