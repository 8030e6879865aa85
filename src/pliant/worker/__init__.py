"""One training process: what it does with the user's model, optimizer and script."""
