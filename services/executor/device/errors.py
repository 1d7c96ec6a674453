"""What goes wrong with a device. Here, not in `device`, for those who know no torch."""


class DeviceError(RuntimeError):
    """The device failed at what it was given; later work may succeed."""


class DeviceMemoryError(DeviceError):
    """The device's memory does not suffice."""


class DeviceLostError(DeviceError):
    """The device computes nothing more in this process: only a new process helps."""
