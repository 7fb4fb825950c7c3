"""The optimizer's flat weights and moments: on the device, on the host, on a disk, or quantized to 8 bits."""
