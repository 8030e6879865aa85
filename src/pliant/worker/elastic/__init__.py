"""worker.elastic: How does a worker get into a group, from one era into the next, and to the group's state?"""
