"""What is served, by subject: each module has a router."""
