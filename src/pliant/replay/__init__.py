"""replay: How is a recorded run computed again by one process?"""
