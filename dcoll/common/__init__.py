"""Where scripts look for what horovod.common has."""
