"""ui: How do people start, watch, check and replay runs?"""
