"""How each system trains: ``train(trainee, name)`` is run in every process of the group."""
