"""Hostile input for every surface that reads what others wrote."""
