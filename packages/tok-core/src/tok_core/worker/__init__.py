"""The worker: carries out steps on its device, in the order they are sent."""
