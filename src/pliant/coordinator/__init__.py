"""coordinator: What does the coordinator's process do with what it hears, and what does it keep?"""
