"""Station 3: judge. A verdict for each completion."""
