"""core: What do all workers and the coordinator decide? Pure functions over frozen values: no torch, clock, random
numbers, operating system, sockets, threads or logging."""
