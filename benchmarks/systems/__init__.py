"""The systems compared: one module each, with ``train(worker)`` run in every process of the group."""
