"""What runs in a worker's process beside its loop.

Question  Which parts of a training process are about the user's script rather than about the group?
Holds     Nothing here speaks to the coordinator or decides for the group; it looks at what the script does to its own
          objects, and calls back into it.
Source    ours.
"""
