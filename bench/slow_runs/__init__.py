"""What bench/slow_network.py runs: the codecs, turns that are limited in time, and the tables."""
