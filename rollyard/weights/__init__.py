"""Station 7: publish. New weights reach the engines; `rollover` is pure."""
