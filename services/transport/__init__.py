"""What crosses between the processes: frames, descriptors, shared memory, and their values."""
