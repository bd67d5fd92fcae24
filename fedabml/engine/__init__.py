"""The engine: how many clients run at once, where, and in which process."""

# Whether the process is ours, as the command line's is. Then settings of the process that a call changes stay
# (`engine.process`); a process that only calls the library gets them back.
process_is_ours = False
