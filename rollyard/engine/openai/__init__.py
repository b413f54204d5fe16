"""Any OpenAI-compatible server, for judges, teachers and evaluation: `client`, `chat` and `engine` hold what is public."""
