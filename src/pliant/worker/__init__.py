"""What belongs to one worker's side of a run: what it does around the group's exchanges, and for its script."""
