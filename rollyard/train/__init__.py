"""Station 6: learn. The loss, the reference trainer, several of them as one, and one in another process."""
