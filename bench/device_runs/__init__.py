"""Parts of bench/devices.py."""
