"""Other engines for CPUs, each measured in an environment of its own."""
