"""core decides: pure functions over frozen values. No torch, time, random, os, sockets, threads or logging."""
