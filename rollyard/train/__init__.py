"""Station 6: learn. The loss and the reference trainer."""
