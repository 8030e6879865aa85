"""worker.script: Where is the user's script, what has it registered, and what may it not do?"""
