"""coordinator: What does the coordinator's process do with the messages it receives, and what does it store?"""
