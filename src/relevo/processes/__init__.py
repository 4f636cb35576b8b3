"""What the operating system says of a process, and what may be asked of it from outside. Nothing here starts one."""
