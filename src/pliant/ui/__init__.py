"""ui: How does a user start, watch, check and replay runs?"""
