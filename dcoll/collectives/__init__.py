"""The collectives on torch and NumPy arrays, under Horovod's names (calls) and below them (on_communicator)."""
