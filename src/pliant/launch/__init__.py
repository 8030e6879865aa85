"""launch: How are the processes of a run started, watched and ended on this machine?"""
