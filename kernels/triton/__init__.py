"""GPU kernels in Triton and their launchers; each has a plain twin in `kernels.reference`.

Only a device executor imports this package: importing triton takes a second and starts threads.
"""
