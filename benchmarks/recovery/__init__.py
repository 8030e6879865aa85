"""The recovery: what it costs the others when a worker dies, hangs, comes or goes."""
