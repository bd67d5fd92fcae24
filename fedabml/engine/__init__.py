"""The engine: how many clients run at once, where, and in which process."""
